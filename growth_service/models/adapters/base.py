"""What an adapter knows about an architecture: where its stream is, and its layers as candidate blocks."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from growth_service.blocks import Block, block_from_config
from growth_service.errors import UserError
from growth_service.models.streams import Site


@dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """A layer of a network, as a candidate block."""

    config: dict[str, Any]
    """Of a block of the layer's architecture, for a stream of a given width."""
    inner: dict[str, Tensor] | None
    """State of the block, without its projection, with which its features are those of the layer. None: the layer
    cannot read a stream of this width and resolution (it has a stride, or reads another width)."""
    fixed: dict[str, Tensor] = field(default_factory=dict)
    """State of every block of this architecture, whatever its weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One architecture, recognised by the name of its class, so that its library need not be imported."""

    library: str
    """Module that defines the class, for example ``torchvision.models.resnet``."""
    class_name: str
    sites: Callable[[Any], list[Site]]
    """Sites of the network in the order of its forward pass, with paths inside it."""
    twin: Callable[[Any, Any, int], Twin | None]
    """(network, module at a site, width of a stream) -> the module as a block; None: it is no residual layer."""

    def fits(self, module: nn.Module) -> bool:
        """Whether a module is of this architecture."""
        return any(c.__module__ == self.library and c.__name__ == self.class_name for c in type(module).__mro__)


class Found(NamedTuple):
    """The one network of a known architecture in a model: itself, or a part under heads and wrappers."""

    path: str
    network: nn.Module
    adapter: Adapter

    def sites(self) -> list[Site]:
        """Its sites, with paths in the model."""
        return [replace(s, path=self.outer(s.path)) for s in self.adapter.sites(self.network)]

    def outer(self, path: str) -> str:
        """A path inside the network, as a path in the model."""
        return f"{self.path}.{path}" if self.path else path


class Offer(NamedTuple):
    """What an architecture proposes for a site."""

    twin: Twin
    source: str | None
    """Path of the layer that the twin was read from; None: its inner weights do not fit, only its shape."""
    like: Tensor
    """A parameter of the network: precision and device."""


def find(model: nn.Module, adapters: tuple[Adapter, ...]) -> Found | None:
    """The network of a known architecture in a model; None where there is none, or more than one."""
    found = [Found(p, m, a) for p, m in model.named_modules() for a in adapters if a.fits(m)]
    return found[0] if len(found) == 1 else None


def offer(found: Found, site: Site) -> Offer | None:
    """The layer that reads the stream at a site, else the one that wrote it, as a block; None: no such site.

    Raises:
        UserError: If no block can have the shape of the network's layers.
    """
    inside = found.adapter.sites(found.network)
    index = next((i for i, s in enumerate(inside) if found.outer(s.path) == site.path), None)
    if index is None:
        return None
    like = next(p for p in found.network.parameters() if p.is_floating_point())
    twins = []
    for near in (index + 1, index):
        if near < len(inside):
            path = inside[near].path
            twin = found.adapter.twin(found.network, found.network.get_submodule(path), inside[index].width)
            if twin is not None and twin.inner is not None:
                return Offer(twin, found.outer(path), like)
            twins.append(twin)
    shapes = [t for t in reversed(twins) if t is not None]
    return Offer(shapes[0], None, like) if shapes else None


def make(offered: Offer, *, generator: torch.Generator, copy: bool) -> tuple[Block, str | None]:
    """The proposed block in the network's precision, and the path of the layer whose inner weights it has.

    It is in evaluation mode, as networks are when they are looked at: copied BatchNorm statistics are used, not moved.
    """
    block = block_from_config(offered.twin.config, generator=generator).eval()
    block.to(dtype=offered.like.dtype, device=offered.like.device)
    inner = offered.twin.inner if copy else None
    block.load_state_dict(block.state_dict() | offered.twin.fixed | (inner or {}))
    return block, None if inner is None else offered.source


def need(fact: object, *, layer: nn.Module, what: str) -> None:
    """Refuse a layer that no block can copy.

    Raises:
        UserError: If the fact is false.
    """
    if not fact:
        raise UserError(
            f"a layer {type(layer).__name__} with {what} has no block of the same shape: pass blocks of your own, "
            "blocks={'path of the site': Block}"
        )
