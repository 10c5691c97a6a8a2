"""Growth schedules as values: an initial size and the rule that turns it into grow steps.

A schedule says nothing about weights or gradients; it can be compared, hashed, stored as JSON
and played in simulated time.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from growth_service.errors import UserError

Axis = Literal["depth", "width", "stream", "data"]
"""What may grow: blocks, hidden units of blocks, channels of the residual stream, training samples."""
MEASURED_AXES: tuple[Axis, ...] = ("depth", "width", "data")
"""Axes on which a probe has candidates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AddBlock:
    """Depth: insert a residual block after the module at ``site``."""

    site: str
    inner: Literal["random", "copy"] = "random"
    """Inner weights at birth: drawn by seed, or copied from the nearest block of the same shape."""
    jumpboard: bool = False
    """Start from one line-searched step along the projected direction (changes the output)."""

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
class AddData:
    """Data: train on this share of the training split from now on (nested subsets)."""

    share: float

    def __str__(self) -> str:
        """``data@0.50``."""
        return f"data@{self.share:.2f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AddChannels:
    """Width of the residual stream: add ``channels`` to the stream that passes through ``site``."""

    site: str
    channels: int

    def __str__(self) -> str:
        """``stream@groups.0.entry+16``."""
        return f"stream@{self.site}+{self.channels}"


Change = AddBlock | AddUnits | AddChannels | AddData
_CHANGES: dict[Axis, type[Change]] = {"depth": AddBlock, "width": AddUnits, "stream": AddChannels, "data": AddData}


def axis_of(change: Change) -> Axis:
    """The axis that a change grows."""
    return next(axis for axis, kind in _CHANGES.items() if isinstance(change, kind))


def change_to_dict(change: Change) -> dict[str, Any]:
    """Plain JSON with the axis as its tag."""
    return {"axis": axis_of(change)} | asdict(change)


def change_from_dict(data: dict[str, Any]) -> Change:
    """Inverse of :func:`change_to_dict`."""
    fields = dict(data)
    axis: Axis = fields.pop("axis")
    return _CHANGES[axis](**fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialSize:
    """The size a network starts with."""

    blocks: tuple[int, ...]
    """Residual blocks in each group of equal resolution."""
    hidden: tuple[int, ...]
    """Hidden units (channels) of a block in each group."""
    data_share: float = 1.0
    """Share of the training split, in (0, 1]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSteps:
    """A fixed list: after stage ``s`` take these changes, whatever is measured.

    Raises:
        UserError: If a jumpboard step and a data step are due after the same stage: the first moves the
            network on the old subset, the second changes the subset, and neither could be accounted for.
    """

    steps: tuple[tuple[int, tuple[Change, ...]], ...] = ()

    def __post_init__(self) -> None:
        for stage in sorted({when for when, _ in self.steps}):
            due = self.after(stage)
            leaps = any(isinstance(c, AddBlock) and c.jumpboard for c in due)
            if leaps and any(isinstance(c, AddData) for c in due):
                raise UserError(
                    f"a jumpboard step and a data step are both due after stage {stage}: their gains could not be told "
                    "apart; take them after different stages, or set jumpboard to false"
                )

    def after(self, stage: int) -> tuple[Change, ...]:
        """The changes due after ``stage`` (0 is the first); empty where there are none."""
        return tuple(change for when, changes in self.steps if when == stage for change in changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalGuided:
    """Certificates decide: grow where a gain is certain and transfers, stop where none is left.

    Raises:
        UserError: If an axis is not measured by a probe.
    """

    axes: tuple[Axis, ...] = ("depth", "width", "data")
    """Axes that may grow."""
    level: float = 0.05
    """Error level of each look, over all candidates."""
    tolerance_nats: float | None = None
    """Smallest gain worth a step; None: max(0.01, 2 % of the present validation loss)."""
    data_factor: float = 2.0
    """Growth of the training subset in one data step, > 1."""
    units: int = 8
    """Hidden units in one width step."""
    inner: Literal["random", "copy"] = "random"
    """Inner weights of a candidate block, as in :class:`AddBlock`."""
    jumpboard: bool = True
    """Line-search one step along the projected direction at each depth step."""

    def __post_init__(self) -> None:
        for axis in self.axes:
            if axis not in MEASURED_AXES:
                raise UserError(
                    f"axis {axis!r} cannot be guided by the signal: a probe has candidates for "
                    f"{', '.join(MEASURED_AXES)}; take such steps from a fixed schedule"
                )


Policy = FixedSteps | SignalGuided


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthSchedule:
    """One point of a growth space: what one trial runs."""

    name: str
    initial: InitialSize
    policy: Policy
    num_stages: int
    """Stretches of training between decisions; each gets an equal share of the budget."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON that :meth:`from_dict` reads back."""
        policy: dict[str, Any]
        match self.policy:
            case FixedSteps(steps=steps):
                listed = [[when, [change_to_dict(c) for c in changes]] for when, changes in steps]
                policy = {"kind": "fixed", "steps": listed}
            case SignalGuided():
                policy = {"kind": "signal"} | asdict(self.policy) | {"axes": list(self.policy.axes)}
        return {
            "name": self.name,
            "initial": {
                "blocks": list(self.initial.blocks),
                "hidden": list(self.initial.hidden),
                "data_share": self.initial.data_share,
            },
            "policy": policy,
            "num_stages": self.num_stages,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "GrowthSchedule":
        """Inverse of :meth:`to_dict`, after a trip through JSON too."""
        initial, policy = dict(data["initial"]), dict(data["policy"])
        size = InitialSize(
            blocks=tuple(initial["blocks"]),
            hidden=tuple(initial["hidden"]),
            data_share=initial["data_share"],
        )
        rule: Policy
        if policy.pop("kind") == "fixed":
            rule = FixedSteps(steps=tuple((w, tuple(change_from_dict(c) for c in cs)) for w, cs in policy["steps"]))
        else:
            rule = SignalGuided(**policy | {"axes": tuple(policy["axes"])})
        return cls(name=data["name"], initial=size, policy=rule, num_stages=data["num_stages"])
