"""The rules of growing: from what is known after a stage to what the trial does next. Pure functions."""

from typing import assert_never

from growth_service.core.decisions import Decision, Grow, Reading, Stop, TrainOn
from growth_service.core.policies import BudgetAware, FixedSteps, Policy, RandomSite, SignalGuided, Triggered
from growth_service.core.rules.budgeted import decide_budgeted
from growth_service.core.rules.certified import decide_certified
from growth_service.core.rules.triggered import decide_random_site, decide_triggered


def decide(reading: Reading, policy: Policy) -> Decision:
    """What the trial does next.

    Args:
        reading: The trial after its last stage. Policies that look need its candidates.
        policy: The rule of the schedule.

    Returns:
        Stop at the end of the schedule or on a certificate, a grow step, or training on.
    """
    if reading.stage + 1 >= reading.num_stages:
        spent = f"{reading.spent_flops:.3g} of {reading.budget_flops:.3g} FLOPs spent"
        return Stop(cause="schedule", reason=f"all {reading.num_stages} stages are trained, {spent}")
    match policy:
        case FixedSteps():
            return _decide_fixed(reading, policy)
        case RandomSite():
            return decide_random_site(reading, policy)
        case Triggered():
            return decide_triggered(reading, policy)
        case SignalGuided():
            return decide_certified(reading, policy)
        case BudgetAware():
            return decide_budgeted(reading, policy)
        case _:
            assert_never(policy)


def _decide_fixed(reading: Reading, policy: FixedSteps) -> Decision:
    changes = policy.after(reading.stage)
    if not changes:
        return TrainOn(reason=f"the schedule grows nothing after stage {reading.stage}")
    listed = ", ".join(map(str, changes))
    return Grow(changes=changes, reason=f"the schedule says {listed} after stage {reading.stage}")


__all__ = ["decide"]
