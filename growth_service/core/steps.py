"""Grow steps as values: what may change about a network or its data between two stages.

The first five name one place each. :class:`Deepen` and :class:`Widen` name none: they are spelled out on the live
network when they are taken, so one value fits a network of any size.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from growth_service.errors import UserError

_Number = TypeVar("_Number", int, float)
Axis = Literal["depth", "width", "stream", "data"]
"""What may grow: blocks, hidden units and heads of blocks, channels of the residual stream, training samples."""
Inner = Literal["random", "copy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AddBlock:
    """Depth: insert a residual block after the module at ``site``."""

    site: str
    inner: Inner = "random"
    """Inner weights at birth: drawn by seed, or copied from ``like``."""
    jumpboard: bool = False
    """Start from one line-searched step along the projected direction (changes the output)."""
    like: str | None = None
    """Path of the block to copy; None: the nearest block of the same shape."""
    exact: bool = True
    """False: copy the output projection too, as plain stacking does (changes the output)."""

    def __str__(self) -> str:
        """``depth@groups.0.blocks.0``."""
        return f"depth@{self.site}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AddUnits:
    """Width: add ``units`` hidden units to the block at path ``block``."""

    block: str
    units: int

    def __str__(self) -> str:
        """``width@groups.0.blocks.0.branch+8``."""
        return f"width@{self.block}+{self.units}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AddHeads:
    """Width: add ``heads`` attention heads, of the size of its own, to the block at path ``block``."""

    block: str
    heads: int

    def __str__(self) -> str:
        """``heads@groups.0.blocks.0.branch+2``."""
        return f"heads@{self.block}+{self.heads}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AddChannels:
    """Width of the residual stream: add ``channels`` to the stream that passes through ``site``."""

    site: str
    channels: int

    def __str__(self) -> str:
        """``stream@groups.0.entry+16``."""
        return f"stream@{self.site}+{self.channels}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AddData:
    """Data: train on this share of the training split from now on (nested subsets)."""

    share: float

    def __str__(self) -> str:
        """``data@0.50``."""
        return f"data@{self.share:.2f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deepen:
    """Depth of the whole network times ``times``: behind each site, copies of the blocks that write there."""

    times: int = 2
    inner: Inner = "copy"
    exact: bool = True
    """False: copy output projections too, as plain stacking does (changes the output)."""

    def __str__(self) -> str:
        """``depth*2``, or ``stack*2`` where outputs change."""
        return f"{'depth' if self.exact else 'stack'}*{self.times}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Widen:
    """Width of the whole network times ``times``: the streams, the hidden units and the heads of all blocks."""

    times: float = 2.0

    def __str__(self) -> str:
        """``width*1.5``."""
        return f"width*{self.times:g}"


Change = AddBlock | AddUnits | AddHeads | AddChannels | AddData | Deepen | Widen
_KINDS: dict[str, type[Change]] = {
    "depth": AddBlock,
    "width": AddUnits,
    "heads": AddHeads,
    "stream": AddChannels,
    "data": AddData,
    "deepen": Deepen,
    "widen": Widen,
}
_AXES: dict[str, Axis] = {"heads": "width", "deepen": "depth", "widen": "stream"}


def kind_of(change: Change) -> str:
    """Its tag in JSON."""
    return next(name for name, kind in _KINDS.items() if isinstance(change, kind))


def axis_of(change: Change) -> Axis:
    """The axis that a change grows."""
    kind = kind_of(change)
    found: Axis = _AXES.get(kind, kind)  # type: ignore[arg-type]  # the other kinds are named after their axes
    return found


def change_to_dict(change: Change) -> dict[str, Any]:
    """Plain JSON with its kind as a tag."""
    return {"kind": kind_of(change)} | asdict(change)


def change_from_dict(data: dict[str, Any]) -> Change:
    """Inverse of :func:`change_to_dict`; checkpoints of earlier versions call the tag ``axis``."""
    fields = dict(data)
    kind = fields.pop("kind") if "kind" in fields else fields.pop("axis")
    return _KINDS[kind](**fields)


def change_from_words(words: str) -> Change:
    """Inverse of ``str``: ``depth*2``, ``width@groups.0.blocks.0.branch+8``, ``data@0.5``; new blocks are copies.

    Raises:
        UserError: If it is no step.
    """
    head, sign, tail = words.partition("*") if "*" in words else words.partition("@")
    place, _, number = tail.rpartition("+")
    try:
        match head, sign:
            case (("depth" | "stack"), "*"):
                return Deepen(times=_at_least(int(tail), 2), exact=head == "depth")
            case "width", "*":
                return Widen(times=_at_least(float(tail), 1.01))
            case "data", "@":
                return AddData(share=_at_least(min(float(tail), 1.0), 0.001))
            case "depth", "@" if tail:
                return AddBlock(site=tail, inner="copy")
            case "width", "@" if place:
                return AddUnits(block=place, units=_at_least(int(number), 1))
            case "heads", "@" if place:
                return AddHeads(block=place, heads=_at_least(int(number), 1))
            case "stream", "@" if place:
                return AddChannels(site=place, channels=_at_least(int(number), 1))
    except ValueError:
        pass
    raise UserError(
        f"{words!r} is no step: use depth*2, stack*2, width*1.5, data@0.5, depth@SITE, width@BLOCK+8, heads@BLOCK+2 or "
        "stream@SITE+16"
    )


def _at_least(value: _Number, lowest: float) -> _Number:
    if not lowest <= value < 1e6:
        raise ValueError(f"{value} is out of range")
    return value
