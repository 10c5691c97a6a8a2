"""Playing a study: trials in waves, each judged after every stage by the rule that judges real ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from growth_service.core.decisions import Stop
from growth_service.core.judging import Rule
from growth_service.core.records import StageRecord
from growth_service.core.referee import Referee, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What became of a study."""

    pruned_after: tuple[int | None, ...]
    """Stage after which each trial was pruned; None: it ran to its end."""
    winner: int
    """The trial that would end with the lowest loss if none were pruned."""
    best_loss: float
    """Lowest loss of the trials that ran to their end; infinite where none did."""
    spent_share: float
    """Compute that was spent, of what all trials would have spent."""

    @property
    def winner_lost(self) -> bool:
        """Whether the eventual winner was pruned."""
        return self.pruned_after[self.winner] is not None


def play(
    losses: NDArray[np.float64], *, shares: Sequence[float], rule: Rule, wave_size: int = 2, budget_flops: int = 10**12
) -> Played:
    """Play one study of trials with equal budgets.

    Args:
        losses: After each stage of each trial. ``[trials, stages]``
        shares: Of the budget, one a stage.
        rule: When to prune; its grace is in FLOPs of ``budget_flops``.
        wave_size: Trials that run side by side, stage by stage.
        budget_flops: Of a trial.
    """
    num_trials, num_stages = losses.shape
    spent = [round(end * budget_flops) for end in np.cumsum(shares)]
    referee = Referee(wave_size=wave_size, deterministic=True, rule=rule)
    for trial in range(num_trials):
        referee.enlist(str(trial), index=trial)
    pruned: dict[int, int] = {}
    for first in range(0, num_trials, wave_size):
        wave = list(range(first, min(first + wave_size, num_trials)))
        for stage in range(num_stages):
            for trial in wave:
                if trial not in pruned:
                    told = referee.hear(_record(trial, stage, float(losses[trial, stage]), spent[stage], budget_flops))
                    pruned |= {int(v.trial): v.stage for v in told if _prunes(v) and v.stage + 1 < num_stages}
        for trial in wave:
            referee.hear_end(str(trial))
    whole = [float(losses[t, -1]) for t in range(num_trials) if t not in pruned]
    cost = sum(spent[pruned[t]] if t in pruned else budget_flops for t in range(num_trials))
    return Played(
        pruned_after=tuple(pruned.get(t) for t in range(num_trials)),
        winner=int(losses[:, -1].argmin()),
        best_loss=min(whole, default=float("inf")),
        spent_share=cost / (num_trials * budget_flops),
    )


def _prunes(verdict: Verdict) -> bool:
    return isinstance(verdict.decision, Stop)


def _record(trial: int, stage: int, loss: float, flops: int, budget: int) -> StageRecord:
    return StageRecord(
        trial=str(trial),
        stage=stage,
        depth=1,
        width=1,
        params=1,
        train_samples=1,
        data_share=1.0,
        loss_train=loss,
        loss_val=loss,
        accuracy_val=0.0,
        flops_total=flops,
        flops_probe=0,
        budget={"total_flops": budget, "spent_flops": flops, "reserved_flops": 0, "free_flops": budget - flops},
        decision={},
    )
