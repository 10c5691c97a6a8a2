"""Places where a block may be inserted: after the module with a path, on its output."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from growth_service.blocks import Block, ConvBlock, MLPBlock
from growth_service.errors import SiteError
from growth_service.models.families import Family, Group, Residual

StreamKind = Literal["vector", "image", "sequence"]
_KINDS: dict[int, StreamKind] = {2: "vector", 3: "sequence", 4: "image"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A residual stream that a block can read and add to."""

    path: str
    """Path of the module whose output is the stream."""
    kind: StreamKind
    width: int
    """Channels of the stream."""
    preserving: bool = True
    """Whether a zero branch added here leaves the network's function as it is."""
    reason: str = "pre-activation stream: adding zero changes nothing"


def sites(model: nn.Module) -> list[Site]:
    """All sites of a network of our own families, in the order of the forward pass.

    Raises:
        SiteError: If the model is of no known family; name module paths instead.
    """
    if not isinstance(model, Family):
        raise SiteError(
            f"no default sites are known for {type(model).__name__}: pass the paths of the modules whose output is "
            "the residual stream, for example sites=['layer1.0', 'layer2.0']"
        )
    found = []
    for i, group in enumerate(model.groups):
        assert isinstance(group, Group)
        width = group.entry.out_channels if isinstance(group.entry, nn.Conv2d) else group.entry.out_features
        kind: StreamKind = "image" if isinstance(group.entry, nn.Conv2d) else "vector"
        paths = [f"groups.{i}.entry"] + [f"groups.{i}.blocks.{j}" for j in range(len(group.blocks))]
        found += [Site(path=path, kind=kind, width=int(str(width))) for path in paths]
    return found


def resolve(model: nn.Module, path: str) -> nn.Module:
    """The module at ``path``.

    Raises:
        SiteError: If there is none (near paths are named), or it is a container whose children
            would run an inserted block twice or not at all.
    """
    named = dict(model.named_modules())
    if path not in named or not path:
        near = [name for name in named if name.startswith(path.split(".")[0])][:6] or list(named)[1:7]
        raise SiteError(f"no module at path {path!r}: use one of {', '.join(near)}, ...")
    module: nn.Module = named[path]
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        raise SiteError(
            f"{path!r} is a container ({type(module).__name__}): name its last child, whose output is the same stream"
        )
    return module


def stream_of(output: Any, *, path: str) -> Tensor:
    """The stream tensor in a module's output: itself, or the first item of a tuple.

    Raises:
        SiteError: If there is no floating-point tensor of 2 to 4 axes.
    """
    tensor = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(tensor, Tensor) or tensor.ndim not in _KINDS or not tensor.is_floating_point():
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(output).__name__
        raise SiteError(f"output of {path!r} ({shape}) is no residual stream: needs [B, d], [B, T, d] or [B, C, H, W]")
    return tensor


def with_stream(output: Any, stream: Tensor) -> Any:
    """A module's output with its stream replaced: the tensor, or the first item of a tuple or list."""
    if not isinstance(output, tuple | list):
        return stream
    items = [stream, *output[1:]]
    if isinstance(output, tuple) and hasattr(output, "_fields"):  # a named tuple
        return type(output)(*items)
    return type(output)(items)


def site_of(stream: Tensor, *, path: str) -> Site:
    """Describe the stream that was seen at ``path``."""
    return Site(path=path, kind=_KINDS[stream.ndim], width=stream.shape[1 if stream.ndim == 4 else -1])


def default_block_config(model: nn.Module, site: Site) -> dict[str, Any]:
    """The block that fits a site: the shape of the nearest block, else hidden = width."""
    near = neighbour(model, site)
    if near is not None:
        return near.config()
    if site.kind == "image":
        group_size = 4 if site.width % 4 == 0 else 1
        return ConvBlock(site.width, site.width, group_size=group_size).config()
    return MLPBlock(site.width, site.width).config()


def neighbour(model: nn.Module, site: Site) -> Block | None:
    """The nearest full block on a stream of the same width: before the site, else after it.

    Only branches of base and inserted blocks count, not the extra units of a widened one.
    """
    before: Block | None = None
    reached = False
    wanted = ConvBlock if site.kind == "image" else MLPBlock
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


def size_of(model: nn.Module) -> tuple[int, int, int]:
    """Depth (residual blocks), width (hidden units over all blocks) and parameters."""
    depth = len(blocks_of(model))
    width = sum(m.hidden for m in model.modules() if isinstance(m, Block))
    return depth, width, sum(p.numel() for p in model.parameters())


__all__ = [
    "Residual",
    "Site",
    "blocks_of",
    "default_block_config",
    "neighbour",
    "resolve",
    "site_of",
    "sites",
    "size_of",
]
