"""What a trial does next, and what is known when that is decided: values, with their reasons in words and numbers.

The rules that get from one to the other are in :mod:`growth_service.core.rules`.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, assert_never

from growth_service.core.certificate import Verdict
from growth_service.core.steps import Change, change_from_dict, change_to_dict

StopCause = Literal["budget", "schedule", "saturated", "no_transferable_gain", "overfitting", "pruned", "diverged"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Anneal:
    """Decay the learning rate at once, then end the trial: it stops before its budget is used up."""

    cause: StopCause
    reason: str


Decision = TrainOn | Grow | Anneal | Stop


def decision_to_dict(decision: Decision) -> dict[str, Any]:
    """Plain JSON with ``kind`` as its tag."""
    match decision:
        case TrainOn(reason=reason):
            return {"kind": "train_on", "reason": reason}
        case Grow(changes=changes, reason=reason):
            return {"kind": "grow", "changes": [change_to_dict(c) for c in changes], "reason": reason}
        case Anneal(cause=cause, reason=reason):
            return {"kind": "anneal", "cause": cause, "reason": reason}
        case Stop(cause=cause, reason=reason):
            return {"kind": "stop", "cause": cause, "reason": reason}
        case _:
            assert_never(decision)


def decision_from_dict(data: dict[str, Any]) -> Decision:
    """Inverse of :func:`decision_to_dict`."""
    if data["kind"] == "grow":
        return Grow(changes=tuple(map(change_from_dict, data["changes"])), reason=data["reason"])
    if data["kind"] == "anneal":
        return Anneal(cause=data["cause"], reason=data["reason"])
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
    gain: float = math.nan
    """Point estimate of the predicted gain; may be negative."""
    cosine: float = 0.0
    """Between the held-out gradient and the direction that training would take, both in what the candidate can
    express; in [-1, 1]."""

    @classmethod
    def from_certificate(cls, certificate: dict[str, Any]) -> "CandidateReading":
        """The part of a record's certificate that a decision needs; null there is an unbounded limit."""

        def number(name: str, unbounded: float) -> float:
            value = certificate[name]
            return unbounded if value is None else float(value)

        return cls(
            kind=certificate["kind"],
            path=certificate["site"],
            verdict=certificate["verdict"],
            gain_lower=number("gain_lcl", -math.inf),
            gain_upper=number("predicted_gain_ucl", math.inf),
            transfer_gain=number("transfer_gain", -math.inf),
            transfer_upper=number("transfer_ucl", math.inf),
            realisable=number("eta", 0.0),
            added_flops=certificate["added_flops"],
            gain=number("predicted_gain", math.nan),
            cosine=number("cosine", 0.0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeAfter:
    """What the network would be after a step."""

    change: Change
    params: int
    flops_per_sample: int
    """Forward and backward of one training sample."""
    flops: int = 0
    """Of taking the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """A stage before, as far as a rule looks back."""

    loss_val: float
    grew: bool
    """Whether something grew after it."""
    ag_max: float | None = None
    """Largest norm of an activation gradient; None: nobody looked."""


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
    past: tuple[Past, ...] = ()
    """All stages so far, this one last."""
    loss_train: float = math.nan
    loss_val: float = math.nan
    params: int = 0
    targets_seen: int = 0
    """Training targets so far, repeated ones too."""
    targets_available: int = 0
    """Different training targets in all of the training split."""
    targets_per_sample: int = 1
    targets_per_step: int = 1
    """Of one optimiser step."""
    flops_per_sample: int = 0
    sizes_after: tuple[SizeAfter, ...] = ()
    """Steps that the policy considers, sized on the live network."""
    sites: tuple[str, ...] = ()
    """Where blocks could go."""
    seed: int = 0
    """Of the trial."""

    @property
    def targets_per_param(self) -> float:
        """Training targets seen per parameter of the present network."""
        return self.targets_seen / max(self.params, 1)

    @property
    def times_grown(self) -> int:
        """Stages after which something grew."""
        return sum(p.grew for p in self.past)


def tolerance_nats(policy_value: float | None, *, loss_nats: float) -> float:
    """The smallest gain that counts: as fixed by the policy, else max(0.01, 2 % of the loss)."""
    return policy_value if policy_value is not None else max(0.01, 0.02 * loss_nats)
