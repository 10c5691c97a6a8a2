"""From certificates to the next action of a trial, and from records to its fate in the study.

A decision is data with a reason in words and numbers; executing it is somebody else's work.
``decide`` answers inside a trial (it owns the weights), ``judge`` across trials (it owns the
budget).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, assert_never

from growth_service.core.certificate import Verdict
from growth_service.core.schedule import (
    AddBlock,
    AddData,
    AddUnits,
    Change,
    FixedSteps,
    Policy,
    SignalGuided,
    change_from_dict,
    change_to_dict,
)

StopCause = Literal["budget", "schedule", "saturated", "no_transferable_gain", "pruned", "diverged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOn:
    """Train the same network for another stage."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Grow:
    """Take these changes together, then train."""

    changes: tuple[Change, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """End the trial; its last network is the result."""

    cause: StopCause
    reason: str


Decision = TrainOn | Grow | Stop


def decision_to_dict(decision: Decision) -> dict[str, Any]:
    """Plain JSON with ``kind`` as its tag."""
    match decision:
        case TrainOn(reason=reason):
            return {"kind": "train_on", "reason": reason}
        case Grow(changes=changes, reason=reason):
            return {"kind": "grow", "changes": [change_to_dict(c) for c in changes], "reason": reason}
        case Stop(cause=cause, reason=reason):
            return {"kind": "stop", "cause": cause, "reason": reason}
        case _:
            assert_never(decision)


def decision_from_dict(data: dict[str, Any]) -> Decision:
    """Inverse of :func:`decision_to_dict`."""
    if data["kind"] == "grow":
        return Grow(changes=tuple(map(change_from_dict, data["changes"])), reason=data["reason"])
    if data["kind"] == "stop":
        return Stop(cause=data["cause"], reason=data["reason"])
    return TrainOn(reason=data["reason"])


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateReading:
    """What the probe says about one candidate; gains in nats."""

    kind: Literal["depth", "width", "stream"]
    path: str
    """Site of a new block, or path of the block that would get new units."""
    verdict: Verdict
    gain_lower: float
    gain_upper: float
    transfer_gain: float
    """Held-out gain of the direction that training would take, expected."""
    transfer_upper: float
    """Its upper limit."""
    realisable: float
    """eta, in [0, 1]."""
    added_flops: int
    """Forward and backward FLOPs per training sample that the step adds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """State of a trial after a stage, as far as a decision needs it."""

    stage: int
    num_stages: int
    spent_flops: int
    budget_flops: int
    data_share: float
    tolerance_nats: float
    candidates: tuple[CandidateReading, ...] = ()


def decide(reading: Reading, policy: Policy) -> Decision:
    """What the trial does next.

    Args:
        reading: The trial after its last stage. Signal-guided policies need its candidates.
        policy: The rule of the schedule.

    Returns:
        Stop at the end of the schedule or on a certificate, a grow step, or training on.
    """
    if reading.stage + 1 >= reading.num_stages:
        spent = f"{reading.spent_flops:.3g} of {reading.budget_flops:.3g} FLOPs spent"
        return Stop(cause="schedule", reason=f"all {reading.num_stages} stages are trained, {spent}")
    match policy:
        case FixedSteps():
            changes = policy.after(reading.stage)
            if not changes:
                return TrainOn(reason=f"the schedule grows nothing after stage {reading.stage}")
            listed = ", ".join(map(str, changes))
            return Grow(changes=changes, reason=f"the schedule says {listed} after stage {reading.stage}")
        case SignalGuided():
            return _decide_by_signal(reading, policy)
        case _:
            assert_never(policy)


def _decide_by_signal(reading: Reading, policy: SignalGuided) -> Decision:
    """The decision table: saturated, not transferable, useful, undetermined - in this order.

    Source: the table of what depth, width and data could each buy, from the test-risk
    decomposition of Cheng et al. 2026: a gain on training that does not transfer calls for data.
    """
    tol = reading.tolerance_nats
    found = sorted(reading.candidates, key=lambda c: (c.path, c.kind))  # ties do not depend on the order of looking
    if not found:
        return TrainOn(reason="no site was probed")
    more_data = _data_step(reading, policy)
    highest = max(found, key=lambda c: c.gain_upper)
    open_ = [c for c in found if c.verdict != "saturated"]
    if not open_:
        reason = (
            f"saturated: at all {len(found)} candidates the predicted gain is below the tolerance of "
            f"{tol:.3g} nats (largest upper limit {highest.gain_upper:.3g} at {highest.path})"
        )
        return Stop(cause="saturated", reason=reason)
    if all(c.transfer_upper < tol for c in open_):
        leading = max(open_, key=lambda c: c.transfer_upper)
        finding = (
            f"at all {len(found)} candidates what training would learn moves the held-out loss by less than "
            f"the tolerance of {tol:.3g} nats (largest upper limit {leading.transfer_upper:.3g} at {leading.path})"
        )
        if more_data is not None:
            return Grow(changes=(more_data,), reason=f"{finding}: more of this data is left, add it")
        return Stop(cause="no_transferable_gain", reason=f"no transferable gain: {finding}")
    useful = [c for c in found if c.verdict == "useful"]
    if useful:
        return _grow_useful(useful, policy, more_data, tolerance=tol)
    reason = (
        f"undetermined: no candidate is certain above the tolerance of {tol:.3g} nats (largest lower limit "
        f"{max(c.gain_lower for c in found):.3g}), nor all below it (largest upper limit {highest.gain_upper:.3g})"
    )
    return TrainOn(reason=reason)


def _grow_useful(
    useful: list[CandidateReading], policy: SignalGuided, more_data: AddData | None, *, tolerance: float
) -> Decision:
    """Some candidate is certainly useful: data where training could not realise it, else the best per FLOP."""
    transferable = [c for c in useful if c.transfer_gain > 0]
    best = max(transferable or useful, key=lambda c: c.transfer_gain / max(c.added_flops, 1))
    finding = (
        f"useful at {best.path}: predicted gain at least {best.gain_lower:.3g} nats > tolerance {tolerance:.3g}, "
        f"transferable {best.transfer_gain:.3g}, best per FLOP of {len(useful)} useful candidates"
    )
    if more_data is not None and best.realisable < 0.5:
        reason = f"{finding}, but only {best.realisable:.0%} is realisable with this many samples: add data"
        return Grow(changes=(more_data,), reason=reason)
    allowed = [c for c in transferable if c.kind in policy.axes]
    if not allowed:
        why = "training would not move towards it" if not transferable else f"only {', '.join(policy.axes)} may grow"
        return TrainOn(reason=f"{finding}, but {why}")
    chosen = max(allowed, key=lambda c: c.transfer_gain / max(c.added_flops, 1))
    if chosen is not best:
        finding = (
            f"useful at {chosen.path}: predicted gain at least {chosen.gain_lower:.3g} nats > tolerance "
            f"{tolerance:.3g}, transferable {chosen.transfer_gain:.3g}, best per FLOP on the axes that may grow"
        )
    if chosen.kind == "depth":
        return Grow(
            changes=(AddBlock(site=chosen.path, inner=policy.inner, jumpboard=policy.jumpboard),), reason=finding
        )
    return Grow(changes=(AddUnits(block=chosen.path, units=policy.units),), reason=finding)


def _data_step(reading: Reading, policy: SignalGuided) -> AddData | None:
    """The next larger training subset, or None where all data is in use or data may not grow."""
    if "data" not in policy.axes or reading.data_share >= 1.0:
        return None
    return AddData(share=min(1.0, reading.data_share * policy.data_factor))


def tolerance_nats(policy_value: float | None, *, loss_nats: float) -> float:
    """The smallest gain that counts: as fixed by the policy, else max(0.01, 2 % of the loss)."""
    return policy_value if policy_value is not None else max(0.01, 0.02 * loss_nats)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where one trial stood at one moment: compute spent and validation loss."""

    trial: str
    flops: int
    loss_val: float


def judge(standing: Standing, finished: list[Standing], *, prune_ratio: float, grace_flops: int) -> Decision:
    """Across trials: may this one go on?

    One rule: a trial is pruned when its validation loss is more than ``prune_ratio`` times the
    best that a finished schedule reached with no more compute, once it has had its grace.

    Args:
        standing: The trial's last record.
        finished: All records of the finished trials that it may be compared with.
        prune_ratio: > 1; larger prunes less.
        grace_flops: Compute before which nothing is pruned.

    Returns:
        ``TrainOn`` or ``Stop(cause="pruned")``, each with its numbers.
    """
    if not math.isfinite(standing.loss_val):
        return Stop(cause="pruned", reason=f"the validation loss of {standing.trial} is {standing.loss_val}")
    rivals = [s for s in finished if s.flops <= standing.flops and math.isfinite(s.loss_val)]
    if standing.flops < grace_flops or not rivals:
        return TrainOn(reason=f"nothing finished to compare {standing.trial} with at its compute yet")
    best = min(rivals, key=lambda s: (s.loss_val, s.trial))
    facts = (
        f"validation loss {standing.loss_val:.4g} at {standing.flops:.3g} FLOPs against "
        f"{best.loss_val:.4g} of {best.trial} at {best.flops:.3g}"
    )
    if standing.loss_val > prune_ratio * best.loss_val:
        return Stop(cause="pruned", reason=f"{facts}: more than {prune_ratio:g} times as high")
    return TrainOn(reason=f"{facts}: within a factor of {prune_ratio:g}")
