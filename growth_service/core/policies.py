"""Policies as values: the rule of a growth schedule that turns what is known after a stage into grow steps.

What a policy decides is in :mod:`growth_service.core.rules`.
"""

from dataclasses import asdict, dataclass
from typing import Any

from growth_service.core.steps import (
    AddBlock,
    AddData,
    Axis,
    Change,
    Deepen,
    Inner,
    Widen,
    change_from_dict,
    change_to_dict,
)
from growth_service.errors import UserError

MEASURED_AXES: tuple[Axis, ...] = ("depth", "width", "data")
"""Axes on which a probe has candidates."""


def check_together(changes: tuple[Change, ...], *, when: str) -> None:
    """Refuse a step that moves the network on the old subset together with one that changes the subset.

    Raises:
        UserError: If both are there.
    """
    moves = any(
        (isinstance(c, AddBlock) and (c.jumpboard or not c.exact)) or (isinstance(c, Deepen) and not c.exact)
        for c in changes
    )
    if moves and any(isinstance(c, AddData) for c in changes):
        raise UserError(
            f"a step that changes outputs (a jumpboard step, plain stacking) and a data step are both due {when}: "
            "their gains could not be told apart; take them after different stages, or set jumpboard to false"
        )


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
            check_together(due, when=f"after stage {stage}")

    def after(self, stage: int) -> tuple[Change, ...]:
        """The changes due after ``stage`` (0 is the first); empty where there are none."""
        return tuple(change for when, changes in self.steps if when == stage for change in changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomSite:
    """One block at a site drawn by the trial's seed, after each of these stages: what choosing the site is worth."""

    after: tuple[int, ...]
    inner: Inner = "copy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Triggered:
    """The same changes again and again, whenever a simple number says so.

    Raises:
        UserError: If a threshold is not positive, or nothing would be changed.
    """

    trigger: str
    """``plateau``: the validation loss fell by less than the share ``threshold`` over the last stage (AutoGrow, Wen et
    al. 2020, arXiv:1906.02909). ``ag_plateau``: grow until the largest norm of an activation gradient falls by less
    than the share ``threshold`` from one stage to the next (Liu et al. 2026, arXiv:2608.14664). ``tokens_per_param``:
    more than ``threshold`` training targets were seen per parameter of the present network."""
    threshold: float
    changes: tuple[Change, ...]
    most: int = 8
    """Times that the changes are taken at most."""

    def __post_init__(self) -> None:
        if self.trigger not in ("plateau", "ag_plateau", "tokens_per_param"):
            raise UserError(f"unknown trigger {self.trigger!r}: use plateau, ag_plateau or tokens_per_param")
        check_together(self.changes, when="at once")
        if not self.threshold > 0 or not self.changes or self.most < 1:
            raise UserError(
                f"a trigger needs a threshold above 0 and changes to take at least once, got threshold "
                f"{self.threshold}, {len(self.changes)} changes, at most {self.most} times"
            )


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
    inner: Inner = "random"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetAware:
    """What the rest of the budget buys decides: by training on, or by growing first and training then.

    After each stage every step that the axes allow is sized on the live network, and its advantage over training on
    is predicted (:mod:`growth_service.core.advantage`). The best one is taken where its advantage is certain enough.
    Certificates end the trial where no block or unit would help any more, and call for data.

    Raises:
        UserError: If nothing may grow, or a number is out of its range.
    """

    axes: tuple[Axis, ...] = ("depth", "stream", "data")
    """Axes that may grow, the first one preferred where two promise the same: ``stream`` is width, with the hidden
    units and heads that go with it."""
    width_factors: tuple[float, ...] = (1.5, 2.0)
    """Width steps that are considered."""
    confidence: float = 0.55
    """Probability with which a step has to be better than training on, in (0, 1). The default has the lowest regret on
    recorded forks of workloads that the prediction was not fitted on."""
    inner: Inner = "copy"
    """Inner weights of new blocks."""
    exact: bool = True
    """False: copy output projections too, as plain stacking does."""
    look: bool = True
    """Whether to look at certificates, where a look costs at most ``look_share`` of what was spent."""
    look_share: float = 0.1
    level: float = 0.05
    """Error level of each look."""
    tolerance_nats: float | None = None
    """Smallest gain that keeps a trial going; None: max(0.01, 2 % of the loss)."""
    data_factor: float = 2.0
    """Growth of the training subset in one data step, > 1."""
    passes: float = 1.0
    """Passes over the training subset in force after which more data is added, where there is more."""

    def __post_init__(self) -> None:
        for axis in self.axes:
            if axis not in ("depth", "stream", "data"):
                raise UserError(f"axis {axis!r} is not grown by what the budget buys: use depth, stream, data")
        ranges = {
            "confidence": (self.confidence, 0, 1),
            "look_share": (self.look_share, 0, 1),
            "data_factor": (self.data_factor, 1, 1e3),
            "passes": (self.passes, 0, 1e6),
        } | {f"width factor {f:g}": (f, 1, 16) for f in self.width_factors}
        for name, (value, low, high) in ranges.items():
            if not low < value < high:
                raise UserError(f"{name} must be above {low:g} and below {high:g}, got {value:g}")
        if not self.axes or ("stream" in self.axes and not self.width_factors):
            raise UserError("nothing may grow: name axes, and width_factors where the stream is one of them")

    @property
    def steps(self) -> tuple[Change, ...]:
        """The steps on the network that are considered, in the order of the axes."""
        by_axis: dict[Axis, tuple[Change, ...]] = {
            "depth": (Deepen(inner=self.inner, exact=self.exact),),
            "stream": tuple(Widen(times=f) for f in self.width_factors),
        }
        return tuple(step for axis in self.axes for step in by_axis.get(axis, ()))


Policy = FixedSteps | RandomSite | Triggered | SignalGuided | BudgetAware
_KINDS: dict[str, type[Policy]] = {
    "fixed": FixedSteps,
    "random_site": RandomSite,
    "triggered": Triggered,
    "signal": SignalGuided,
    "budget": BudgetAware,
}


def policy_to_dict(policy: Policy) -> dict[str, Any]:
    """Plain JSON with ``kind`` as its tag."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(policy, cls))
    values: dict[str, Any]
    match policy:
        case FixedSteps(steps=steps):
            values = {"steps": [[when, [change_to_dict(c) for c in changes]] for when, changes in steps]}
        case Triggered(changes=changes):
            values = asdict(policy) | {"changes": [change_to_dict(c) for c in changes]}
        case _:
            values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(policy).items()}
    return {"kind": kind} | values


def policy_from_dict(data: dict[str, Any]) -> Policy:
    """Inverse of :func:`policy_to_dict`, after a trip through JSON too."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "kind"}
    if data["kind"] == "fixed":
        values["steps"] = tuple((when, tuple(map(change_from_dict, changes))) for when, changes in values["steps"])
    elif data["kind"] == "triggered":
        values["changes"] = tuple(map(change_from_dict, values["changes"]))
    kind: Any = _KINDS[data["kind"]]
    policy: Policy = kind(**values)
    return policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What a look measures: candidates, and how sure it has to be."""

    axes: tuple[Axis, ...] = ("depth", "width")
    """``depth``: a block at every site; ``width``: units of every block. ``data`` alone looks at depth."""
    level: float = 0.05
    tolerance_nats: float | None = None
    units: int = 8
    inner: Inner = "random"
    most_share: float = 1.0
    """A look that would cost more than this share of what was spent is left out."""


def sight_of(policy: Policy) -> Sight | None:
    """What a policy wants measured after a stage; None: nothing."""
    match policy:
        case SignalGuided():
            return Sight(
                axes=policy.axes,
                level=policy.level,
                tolerance_nats=policy.tolerance_nats,
                units=policy.units,
                inner=policy.inner,
            )
        case BudgetAware(look=True):
            return Sight(
                axes=("depth", "width"),
                level=policy.level,
                tolerance_nats=policy.tolerance_nats,
                inner=policy.inner,
                most_share=policy.look_share,
            )
        case Triggered(trigger="ag_plateau"):
            return Sight(axes=("depth",))
        case _:
            return None
