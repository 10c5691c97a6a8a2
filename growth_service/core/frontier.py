"""Which schedules are worth their compute: the Pareto frontier of loss against FLOPs."""

import math
from typing import NamedTuple

from growth_service.core.records import TrialRecord


class Outcome(NamedTuple):
    """One trial as a point: compute spent and loss reached (both: less is better)."""

    trial: str
    flops: float
    loss: float


def outcomes(trials: list[TrialRecord]) -> list[Outcome]:
    """Total compute and last validation loss of each trial; failed ones and those without a stage are left out."""
    return [
        Outcome(
            trial=t.trial,
            flops=float(t.final.flops_total if t.final is not None else t.stages[-1].flops_total),
            loss=t.stages[-1].loss_val,
        )
        for t in trials
        if t.stages and not (t.final is not None and t.final.cause == "failed")
    ]


SAME_COMPUTE_SHARE = 0.01
"""Trials whose compute differs by less count as equally dear: budgets are met to a batch, not to a FLOP."""


def frontier(found: list[Outcome], *, same_share: float = 0.0) -> list[Outcome]:
    """The outcomes that no other beats on one axis without being worse on the other.

    Ties stay: two trials with equal compute and loss are both on the frontier.

    Args:
        found: Any outcomes; those with NaN are never on the frontier.
        same_share: Compute that differs by less than this share counts as equal.

    Returns:
        Sorted by compute; empty for an empty list.
    """
    finite = [o for o in found if o.flops == o.flops and o.loss == o.loss]

    def beaten(o: Outcome) -> bool:
        return any(
            (p.flops <= o.flops * (1 + same_share) and p.loss < o.loss)
            or (p.flops < o.flops * (1 - same_share) and p.loss <= o.loss)
            for p in finite
        )

    return sorted((o for o in finite if not beaten(o)), key=lambda o: (o.flops, o.loss, o.trial))


class Preference(NamedTuple):
    """A recommended schedule and why."""

    trial: str
    reason: str


def prefer(found: list[Outcome], *, noise_share: float = 0.02) -> Preference | None:
    """The cheapest schedule whose loss is within ``noise_share`` of the best one.

    Returns:
        None where no outcome is finite.
    """
    unbeaten = frontier([o for o in found if math.isfinite(o.loss)], same_share=SAME_COMPUTE_SHARE)
    if not unbeaten:
        return None
    best = min(unbeaten, key=lambda o: o.loss)
    cheap = next(o for o in unbeaten if o.loss <= best.loss + noise_share * abs(best.loss))
    if cheap == best:
        reason = (
            f"it has the lowest validation loss ({best.loss:.4g} nats), and nothing cheaper comes within "
            f"{noise_share:.0%}"
        )
    else:
        saved = 1 - cheap.flops / best.flops
        reason = (
            f"its loss ({cheap.loss:.4g} nats) is within {noise_share:.0%} of the best ({best.loss:.4g}, {best.trial}) "
            f"for {saved:.0%} less compute"
        )
    return Preference(cheap.trial, reason)
