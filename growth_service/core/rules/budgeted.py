"""What the rest of the budget buys decides: training on, growing, more data, or nothing more."""

from growth_service.core.advantage import Advantage, advantage, outlook
from growth_service.core.decisions import Decision, Grow, Reading, SizeAfter, Stop, TrainOn
from growth_service.core.policies import BudgetAware
from growth_service.core.rules.certified import data_step, settled_by_certificates

WORSE = 1.01
"""A validation loss that rose by more than this factor over a stage, while the training loss fell, is overfitting."""


def decide_budgeted(reading: Reading, policy: BudgetAware) -> Decision:
    """Compare training on with every step that the policy considers, by predicted advantage.

    In this order: certificates that settle it; data, once the subset was seen often enough; the step with the largest
    advantage, where that is certain enough; the end, where the network overfits and no step promises anything.
    """
    more_data = data_step(reading, axes=policy.axes, factor=policy.data_factor)
    settled = settled_by_certificates(reading, more_data)
    if settled is not None:
        return settled
    seen = reading.targets_seen / max(1.0, reading.data_share * reading.targets_available)
    if more_data is not None and seen >= policy.passes:
        return Grow(changes=(more_data,), reason=f"{seen:.1f} passes over the training subset in force: add data")
    judged = [(size, found) for size in reading.sizes_after if (found := _advantage(reading, size)) is not None]
    if not judged:
        if _overfits(reading):
            reason = "training on makes the validation loss worse, and what is left does not pay for a step of growth"
            return Stop(cause="overfitting", reason=reason)
        return TrainOn(reason="what is left does not pay for any step of growth and the training after it")
    best, found = max(judged, key=lambda pair: pair[1].lower(policy.confidence))
    finding = _in_words(reading, best, found)
    if found.lower(policy.confidence) > 0:
        return Grow(changes=(best.change,), reason=finding)
    if _overfits(reading):
        reason = f"training on makes the validation loss worse, and {finding}"
        return Stop(cause="overfitting", reason=reason)
    return TrainOn(reason=finding)


def _advantage(reading: Reading, size: SizeAfter) -> Advantage | None:
    return advantage(size.change, outlook(reading, size))


def _in_words(reading: Reading, best: SizeAfter, found: Advantage) -> str:
    at = outlook(reading, best)
    return (
        f"{best.change} promises {found.mean:+.1%} (sd {found.sd:.1%}) over training on, the best of "
        f"{len(reading.sizes_after)}: it would see {at.targets_per_param:.3g} training targets per parameter; "
        + (
            f"nobody looked, the gap is {at.gap:.0%}"
            if at.predicted_gain is None or at.cosine is None
            else f"a block promises {at.predicted_gain:.0%} of the loss to first order, and training and held-out data "
            f"agree on it with a cosine of {at.cosine:.2f}"
        )
    )


def _overfits(reading: Reading) -> bool:
    """Whether the last stage raised the validation loss; a stage that began with a step is given another."""
    if len(reading.past) < 2 or reading.past[-2].grew:
        return False
    return reading.past[-1].loss_val > WORSE * reading.past[-2].loss_val
