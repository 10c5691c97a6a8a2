"""Sites and default blocks of architectures that other libraries define.

Recognition is by the name of the class, so importing this package loads neither torchvision nor
transformers, and a model of theirs may sit under any head or wrapper.
"""

import torch
from torch import nn

from growth_service.blocks import Block
from growth_service.models.adapters import torchvision, transformers
from growth_service.models.adapters.base import Adapter, Twin, find, make, offer
from growth_service.models.streams import Site

ADAPTERS: tuple[Adapter, ...] = (*torchvision.ADAPTERS, *transformers.ADAPTERS)


def sites(model: nn.Module) -> list[Site] | None:
    """Sites of a model that holds one network of a known architecture, in forward order; None: it does not."""
    found = find(model, ADAPTERS)
    return None if found is None else found.sites()


def config_at(model: nn.Module, site: Site) -> dict[str, object] | None:
    """Configuration of a block of the architecture of the network's layers; None: not a known site."""
    found = find(model, ADAPTERS)
    offered = None if found is None else offer(found, site)
    return None if offered is None else dict(offered.twin.config)


def block_at(
    model: nn.Module, site: Site, *, generator: torch.Generator, copy: bool
) -> tuple[Block, str | None] | None:
    """A block of the architecture of the network's layers, in the network's precision and on its device.

    Args:
        model: A model that holds one network of a known architecture.
        site: One of its :func:`sites`.
        generator: Of random inner weights.
        copy: Whether inner weights are those of a layer: the one that reads this stream, else the one
            that wrote it, where the stream has its width and resolution.

    Returns:
        The block, and the path of the layer that was copied (None: weights are random); None where the
        site is not known.

    Raises:
        UserError: If no block can have the shape of the network's layers.
    """
    found = find(model, ADAPTERS)
    offered = None if found is None else offer(found, site)
    return None if offered is None else make(offered, generator=generator, copy=copy)


__all__ = ["ADAPTERS", "Adapter", "Twin", "block_at", "config_at", "sites"]
