"""Places where a block may be inserted: after the module with a path, on its output."""

from typing import Any

import torch
from torch import nn

from growth_service.blocks import Block, ConvBlock, MLPBlock, TransformerBlock, block_from_config, copy_of
from growth_service.errors import SiteError
from growth_service.models import adapters
from growth_service.models.families import GPT, Family, Group, Residual, TokenEmbedding
from growth_service.models.streams import Site, StreamKind, resolve, site_of, stream_of, with_stream


def sites(model: nn.Module) -> list[Site]:
    """All sites of a network of our own families or of a known architecture, in the order of the forward pass.

    Raises:
        SiteError: If the model is of neither; name module paths instead.
    """
    if not isinstance(model, Family):
        known = adapters.sites(model)
        if known is not None:
            return known
        raise SiteError(
            f"no default sites are known for {type(model).__name__}: pass the paths of the modules whose output is "
            "the residual stream, for example sites=['layer1.0', 'layer2.0']"
        )
    found = []
    for i, group in enumerate(model.groups):
        assert isinstance(group, Group)
        kind, width = _stream_from(group.entry)
        paths = [f"groups.{i}.entry"] + [f"groups.{i}.blocks.{j}" for j in range(len(group.blocks))]
        found += [Site(path=path, kind=kind, width=width) for path in paths]
    return found


def _stream_from(entry: nn.Module) -> tuple[StreamKind, int]:
    """Kind and width of the stream that the entry of a family's group writes."""
    match entry:
        case TokenEmbedding():
            return "sequence", entry.embedding_dim
        case nn.Conv2d():
            return "image", entry.out_channels
        case nn.Linear():
            return "vector", entry.out_features
        case _:
            raise SiteError(f"the entry of a group is a {type(entry).__name__}, which writes no known stream")


def default_block_config(model: nn.Module, site: Site) -> dict[str, Any]:
    """The block that fits a site: the shape of the network's own layers or nearest block, else hidden = width."""
    known = None if isinstance(model, Family) else adapters.config_at(model, site)
    if known is not None:
        return known
    near = neighbour(model, site)
    if near is not None:
        return near.config()
    if isinstance(model, GPT):
        return dict(model.branch)
    if site.kind == "image":
        group_size = 4 if site.width % 4 == 0 else 1
        return ConvBlock(site.width, site.width, group_size=group_size).config()
    return MLPBlock(site.width, site.width).config()


def default_block(model: nn.Module, site: Site, *, generator: torch.Generator, copy: bool) -> tuple[Block, str | None]:
    """The block that fits a site, and the path of the block or layer whose inner weights it copies.

    Args:
        model: The network.
        site: Where the block would go.
        generator: Of random inner weights.
        copy: Whether to copy a neighbour: the block that reads this very stream, else the nearest one.
    """
    known = None if isinstance(model, Family) else adapters.block_at(model, site, generator=generator, copy=copy)
    if known is not None:
        return known
    source = reader(model, site) or nearest(model, site) if copy else None
    if source is not None:
        block = resolve(model, source)
        assert isinstance(block, Block)
        return copy_of(block, generator=generator), source
    return block_from_config(default_block_config(model, site), generator=generator), None


def reader(model: nn.Module, site: Site) -> str | None:
    """Path of the block of a family that reads the stream at a site, or None behind the last one of a group."""
    head, _, last = site.path.rpartition(".")
    if not isinstance(model, Family):
        return None
    following = f"{head}.blocks.0.branch" if last == "entry" else ""
    if last.isdigit():
        following = f"{head}.{int(last) + 1}.branch"
    try:
        found = model.get_submodule(following) if following else None
    except AttributeError:
        return None
    return following if isinstance(found, Block) else None


def nearest(model: nn.Module, site: Site) -> str | None:
    """Path of :func:`neighbour`."""
    near = neighbour(model, site)
    return None if near is None else next(path for path, module in model.named_modules() if module is near)


def neighbour(model: nn.Module, site: Site) -> Block | None:
    """The nearest full block on a stream of the same width: before the site, else after it.

    Only branches of base and inserted blocks count, not the extra units of a widened one.
    """
    before: Block | None = None
    reached = False
    kinds: dict[StreamKind, type[Block]] = {"image": ConvBlock, "sequence": TransformerBlock, "vector": MLPBlock}
    wanted = kinds[site.kind]
    for path, module in model.named_modules():
        reached = reached or path == site.path
        fits = isinstance(module, wanted) and module.config()["width"] == site.width
        if not fits or ".widened." in path:
            continue
        inside = path.startswith(site.path + ".")
        if reached and not inside:
            return before or module
        before = module
    return before


def blocks_of(model: nn.Module) -> dict[str, Block]:
    """Every residual branch by path, without the extra units of widened blocks."""
    return {p: m for p, m in model.named_modules() if isinstance(m, Block) and ".widened." not in p}


def existing_block(model: nn.Module, path: str) -> Block:
    """The block at a path.

    Raises:
        SiteError: If there is none.
    """
    found = resolve(model, path)
    if not isinstance(found, Block):
        raise SiteError(f"{path!r} is no block of this network: use one of {', '.join(blocks_of(model))}")
    return found


def size_of(model: nn.Module) -> tuple[int, int, int]:
    """Depth (residual blocks), width (hidden units over all blocks) and parameters."""
    depth = len(blocks_of(model))
    width = sum(m.hidden for m in model.modules() if isinstance(m, Block))
    return depth, width, sum(p.numel() for p in model.parameters())


__all__ = [
    "Residual",
    "Site",
    "StreamKind",
    "blocks_of",
    "default_block",
    "default_block_config",
    "existing_block",
    "neighbour",
    "resolve",
    "site_of",
    "sites",
    "size_of",
    "stream_of",
    "with_stream",
]
