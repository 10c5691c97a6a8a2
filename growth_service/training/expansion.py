"""Steps on a whole network, spelled out as steps at places of the network that is there."""

from collections.abc import Iterator

from torch import nn

from growth_service.blocks import Block, ConvBlock, TransformerBlock
from growth_service.core.steps import AddBlock, AddChannels, AddHeads, AddUnits, Change, Deepen, Widen
from growth_service.errors import UserError
from growth_service.models import sites
from growth_service.models.sites import Site, blocks_of


def expand(model: nn.Module, change: Change) -> list[Change]:
    """What a change does at single places, in the order in which it is done; one that names its place is itself.

    Raises:
        UserError: If the network is too small to grow by such a factor.
    """
    match change:
        case Deepen():
            return list(_deeper(model, change))
        case Widen():
            wider = list(_wider(model, change))
            if not wider:
                raise UserError(f"{change} adds nothing to this network: its widths are too small for such a factor")
            return wider
        case _:
            return [change]


def _deeper(model: nn.Module, change: Deepen) -> Iterator[Change]:
    """Copies behind each site of the blocks that write there; one new block in a group that has none."""
    for group in _groups(model):
        behind = [(site.path, [p for p in blocks_of(model) if _writes_at(p, site.path)]) for site in group]
        if not any(blocks for _, blocks in behind):
            yield AddBlock(site=group[-1].path, inner="random")
        for site, blocks in behind:
            for _ in range(change.times - 1):
                for path in blocks:
                    like = path if change.inner == "copy" else None
                    yield AddBlock(site=site, inner=change.inner, like=like, exact=change.exact)


def _writes_at(block: str, site: str) -> bool:
    """Whether a block is the site's own branch, or was inserted there."""
    return block == f"{site}.branch" or block.startswith(f"{site}.grown.")


def _wider(model: nn.Module, change: Widen) -> Iterator[Change]:
    """Channels for every stream first, so that new units and heads read them all; then units and heads of every block.

    Channels and units come in whole groups of the norms over them.
    """
    more = change.times - 1
    blocks = blocks_of(model)
    for group in _groups(model):
        site = group[0]
        own = [b for p, b in blocks.items() if p.startswith(_group_path(site))]
        channels = _whole_groups(site.width * more, own)
        if channels:
            yield AddChannels(site=site.path, channels=channels)
    for path, block in blocks.items():
        pieces = [m for m in block.modules() if isinstance(m, Block)]
        units = _whole_groups(sum(b.hidden for b in pieces if b.type_name != "heads") * more, [block])
        heads = round(sum(int(b.config().get("heads", 0)) for b in pieces) * more)
        if heads and isinstance(block, TransformerBlock):
            yield AddHeads(block=path, heads=heads)
        if units:
            yield AddUnits(block=path, units=units)


def _whole_groups(number: float, blocks: list[Block]) -> int:
    """The number of channels or units nearest to ``number`` that fills whole groups of GroupNorm."""
    size = max((int(b.config().get("group_size", 1)) for b in blocks if isinstance(b, ConvBlock)), default=1)
    return round(number / size) * size


def _groups(model: nn.Module) -> list[list[Site]]:
    """Sites of each stream of a family, in order."""
    found: dict[str, list[Site]] = {}
    for site in sites(model):
        found.setdefault(_group_path(site), []).append(site)
    return list(found.values())


def _group_path(site: Site) -> str:
    return ".".join(site.path.split(".")[:2]) + "."
