"""Residual streams: where one is in a network, and how it is found in a module's output."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from growth_service.errors import SiteError

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


def resolve(model: nn.Module, path: str) -> nn.Module:
    """The module at ``path``.

    Raises:
        SiteError: If there is none (near paths are named), or it is a container whose children
            would run an inserted block twice or not at all.
    """
    try:
        module = model.get_submodule(path) if path else None
    except AttributeError:
        module = None
    if module is None:
        named = dict(model.named_modules())
        near = [name for name in named if name.startswith(path.split(".")[0])][:6] or list(named)[1:7]
        raise SiteError(f"no module at path {path!r}: use one of {', '.join(near)}, ...")
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
