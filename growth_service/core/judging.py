"""Across trials: which of them may go on."""

import math
from dataclasses import dataclass

from growth_service.core.decisions import Decision, Stop, TrainOn


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
