"""Across trials: which of them may go on.

A trial is pruned where even an optimistic continuation of its learning curve would not reach what a finished trial
reached with as much compute. Other well-known rules are here for comparison.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, assert_never

from growth_service.core.decisions import Decision, Stop, TrainOn

RuleName = Literal["law", "ratio", "median", "asha", "none"]
_BUCKETS = 24
"""Parts of a budget, over which the improvements that were still to come are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where one trial stood after one stage."""

    trial: str
    stage: int = 0
    flops: int
    loss_val: float
    reachable_nats: float = 0.0
    """Largest gain that certificates do not rule out and the trial may still take; 0 where nobody looked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """When a trial is pruned."""

    name: RuleName = "law"
    """``law``: by an optimistic learning curve. ``ratio``: a loss many times that of the best at no more compute.
    ``median``: worse than the median of finished trials after the same stage (Golovin et al. 2017). ``asha``: not
    among the best 1 / ``reduction`` after stages 0, 1, 3, 7, ... (Li et al. 2020, arXiv:1810.05934). ``none``."""
    optimism: float = 1.5
    """Power by which improvements still to come may exceed the best that was seen, >= 1 (``law``)."""
    margin: float = 0.02
    """Share by which the optimistic loss must miss the best (``law``)."""
    prune_ratio: float = 3.0
    """Factor of the loss over the best at no more compute (``ratio``)."""
    reduction: int = 3
    """Of ``asha``, >= 2."""
    grace_flops: int = 0
    """Compute before which nothing is pruned."""


class Incumbents:
    """What the finished trials that may be compared with have shown, kept small as they come."""

    def __init__(self) -> None:
        self._flops: list[int] = []
        self._best: list[tuple[float, str]] = []
        self._remaining: list[float] = [1.0] * (_BUCKETS + 1)
        self._by_stage: dict[int, list[float]] = {}
        self.num_trials = 0

    def add(self, history: Sequence[Standing]) -> None:
        """Take in a trial that ended; one without a finite loss says nothing."""
        finite = [s for s in history if math.isfinite(s.loss_val)]
        if not finite:
            return
        self.num_trials += 1
        last = finite[-1]
        for standing in finite:
            self._admit(standing)
            insort(self._by_stage.setdefault(standing.stage, []), standing.loss_val)
            bucket = _bucket(standing.flops / last.flops)
            if standing.loss_val > 0:
                self._remaining[bucket] = min(self._remaining[bucket], last.loss_val / standing.loss_val)

    def best_at(self, flops: int) -> tuple[float, int, str] | None:
        """Lowest loss that was reached with no more compute, with how much, and by whom."""
        i = bisect_right(self._flops, flops) - 1
        return None if i < 0 else (self._best[i][0], self._flops[i], self._best[i][1])

    def remaining(self, share: float) -> float:
        """Smallest ratio of a last loss to the loss at this share of the compute, or at an earlier one that was seen.

        From earlier on, more was still to come: the bound stays optimistic where nobody stood at this very share.
        """
        bucket = _bucket(share)
        seen = self._remaining[bucket]
        return seen if seen < 1.0 or bucket == _BUCKETS else min(self._remaining[: bucket + 1])

    def losses_after(self, stage: int) -> Sequence[float]:
        """Losses of finished trials after a stage, in order."""
        return self._by_stage.get(stage, [])

    def _admit(self, s: Standing) -> None:
        """Keep (flops, loss) if nothing at no more compute is as good; ties go to the first name."""
        i = bisect_left(self._flops, s.flops)
        before = bisect_right(self._flops, s.flops) - 1
        if before >= 0 and self._best[before] <= (s.loss_val, s.trial):
            return
        end = i
        while end < len(self._flops) and self._best[end] >= (s.loss_val, s.trial):
            end += 1
        self._flops[i:end] = [s.flops]
        self._best[i:end] = [(s.loss_val, s.trial)]


def judge(history: Sequence[Standing], incumbents: Incumbents, *, rule: Rule, until_flops: int) -> Decision:
    """May this trial go on?

    Args:
        history: Its records so far, the last one last.
        incumbents: What it may be compared with.
        rule: When to prune.
        until_flops: Compute at which it would end.

    Returns:
        ``TrainOn`` or ``Stop(cause="pruned")``, each with its numbers.
    """
    now = history[-1]
    if not math.isfinite(now.loss_val):
        return Stop(cause="pruned", reason=f"the validation loss of {now.trial} is {now.loss_val}")
    if rule.name == "none":
        return TrainOn(reason="nothing is pruned in this study")
    if now.flops < rule.grace_flops or incumbents.num_trials == 0:
        return TrainOn(reason=f"nothing finished to compare {now.trial} with at its compute yet")
    match rule.name:
        case "law":
            return _by_law(history, incumbents, rule, until_flops)
        case "ratio":
            return _by_ratio(now, incumbents, rule)
        case "median":
            return _by_rank(now, incumbents, share=0.5, what="median")
        case "asha":
            if (now.stage + 1) & now.stage:
                return TrainOn(reason=f"stage {now.stage} is no rung")
            return _by_rank(now, incumbents, share=1 / rule.reduction, what=f"best of {rule.reduction}")
        case _:
            assert_never(rule.name)


def optimistic_loss(history: Sequence[Standing], incumbents: Incumbents, *, until_flops: int, optimism: float) -> float:
    """The lowest loss that a trial could still end with, short of a surprise.

    The lower one of two continuations, less what certificates do not rule out: its own curve as a power law of
    compute without a floor, as steep as it ever was; and the largest improvement that any finished trial still made
    from that share of its compute on. Both are raised to the power ``optimism``.
    """
    now = history[-1]
    share = min(1.0, now.flops / max(until_flops, 1))
    slopes = [
        math.log(a.loss_val / b.loss_val) / math.log(b.flops / a.flops)
        for a, b in pairwise(history)
        if 0 < a.flops < b.flops and 0 < b.loss_val < a.loss_val
    ]
    if len(history) < 2:
        return 0.0
    law = share ** max(slopes, default=0.0)
    seen = incumbents.remaining(share)
    return float(now.loss_val * min(law, seen) ** optimism - max(0.0, now.reachable_nats))


def _by_law(history: Sequence[Standing], incumbents: Incumbents, rule: Rule, until_flops: int) -> Decision:
    now, best = history[-1], incumbents.best_at(until_flops)
    if best is None:
        return TrainOn(reason=f"nothing finished within the compute of {now.trial} yet")
    bound = optimistic_loss(history, incumbents, until_flops=until_flops, optimism=rule.optimism)
    facts = (
        f"validation loss {now.loss_val:.4g} at {now.flops:.3g} FLOPs could at best become {max(bound, 0):.4g} at "
        f"{until_flops:.3g}, against {best[0]:.4g} of {best[2]} at {best[1]:.3g}"
    )
    if bound > best[0] * (1 + rule.margin):
        return Stop(cause="pruned", reason=f"{facts}: out of reach by more than {rule.margin:.0%}")
    return TrainOn(reason=f"{facts}: within reach")


def _by_ratio(now: Standing, incumbents: Incumbents, rule: Rule) -> Decision:
    best = incumbents.best_at(now.flops)
    if best is None:
        return TrainOn(reason=f"nothing finished to compare {now.trial} with at its compute yet")
    facts = (
        f"validation loss {now.loss_val:.4g} at {now.flops:.3g} FLOPs against {best[0]:.4g} of {best[2]} at "
        f"{best[1]:.3g}"
    )
    if now.loss_val > rule.prune_ratio * best[0]:
        return Stop(cause="pruned", reason=f"{facts}: more than {rule.prune_ratio:g} times as high")
    return TrainOn(reason=f"{facts}: within a factor of {rule.prune_ratio:g}")


def _by_rank(now: Standing, incumbents: Incumbents, *, share: float, what: str) -> Decision:
    others = incumbents.losses_after(now.stage)
    better = bisect_left(others, now.loss_val)
    facts = f"{better} of {len(others)} finished trials were better after stage {now.stage}"
    if better > share * len(others):
        return Stop(cause="pruned", reason=f"{facts}: not within the {what}")
    return TrainOn(reason=f"{facts}: within the {what}")


def _bucket(share: float) -> int:
    return min(_BUCKETS, max(0, math.ceil(share * _BUCKETS - 1e-9)))
