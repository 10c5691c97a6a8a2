"""When and at what a trial looks: the probe after a stage, and what it will cost."""

from dataclasses import asdict
from typing import Any

from growth_service.core.advantage import could_pay
from growth_service.core.policies import BudgetAware, Sight, sight_of
from growth_service.core.schedule import GrowthSchedule
from growth_service.probing import SaturationReport, probe
from growth_service.probing.probe import Estimate, estimate_flops
from growth_service.training.batches import chunks_of
from growth_service.training.evaluate import CHUNK, loss_sum
from growth_service.training.growing import candidates
from growth_service.training.sizing import sizes_after
from growth_service.training.state import TrialState


def look_is_due(state: TrialState, schedule: GrowthSchedule, *, last: bool, until: int) -> bool:
    """Whether a look after the coming stage could change what comes next.

    Nothing comes after the last stage. A policy that weighs steps against training on need not look where what is left
    by then pays for none of them and there is no more data.

    Args:
        state: The trial before the stage.
        schedule: Whose policy looks.
        last: Whether nothing comes after the stage.
        until: FLOPs that the trial will have spent after it.
    """
    policy = schedule.policy
    if last or not isinstance(policy, BudgetAware):
        return not last
    if "data" in policy.axes and state.data_share < 1:
        return True
    left, per_sample = state.budget.total_flops - until, state.targets_per_sample
    per_step = state.config.training["batch_size"] * per_sample
    return policy.look and any(
        could_pay(size, left=left, targets_per_sample=per_sample, targets_per_step=per_step)
        for size in sizes_after(state, policy)
    )


def look(state: TrialState, schedule: GrowthSchedule, *, due: bool) -> SaturationReport | None:
    """Probe the network after its present stage; None where the policy does not look."""
    sight = _sight(schedule, due=due)
    inputs = _inputs(state, sight)
    if inputs is None or sight is None:
        return None
    return probe(
        state.model,
        loss=loss_sum,
        reduction="sum",
        tolerance=sight.tolerance_nats,
        ridge=state.config.probe["ridge"],
        seed=state.config.seed,
        mapper=state.ranks.map,
        **inputs,
    )


def look_settings(schedule: GrowthSchedule, *, due: bool) -> dict[str, Any] | None:
    """What the policy says about the look after the present stage, as plain JSON; None where there is none."""
    sight = _sight(schedule, due=due)
    return None if sight is None else asdict(sight) | {"axes": list(sight.axes)}


def look_estimate(state: TrialState, schedule: GrowthSchedule, *, due: bool, until: int) -> Estimate:
    """FLOPs that the next look will cost at most, and the cost of finding out; no FLOPs where there is no look.

    Args:
        state: The trial.
        schedule: Whose policy looks.
        due: From :func:`look_is_due`.
        until: FLOPs that the trial will have spent after it: a policy may leave out a look that is dear beside them.
    """
    sight = _sight(schedule, due=due)
    inputs = _inputs(state, sight)
    if sight is None or inputs is None:
        return Estimate(flops=0, cost=0)
    found = estimate_flops(state.model, loss=loss_sum, reduction="sum", **inputs)
    return found if found.flops <= sight.most_share * until else Estimate(flops=0, cost=found.cost)


def _inputs(state: TrialState, sight: Sight | None) -> dict[str, Any] | None:
    """Candidates and samples of the look after the present stage."""
    stage = state.stage
    if sight is None:
        return None
    found = candidates(state.model, sight, stage=stage, seed=state.config.seed)
    if not found:
        return None
    limits, splits = state.config.probe, state.splits
    return {
        "candidates": found,
        "batches": chunks_of(splits.probe, size=CHUNK, limit=limits["samples"]),
        "train_batches": chunks_of(splits.train, size=CHUNK, limit=min(state.subset, limits["train_samples"])),
        "level": sight.level,
    }


def _sight(schedule: GrowthSchedule, *, due: bool) -> Sight | None:
    """What is measured after a stage."""
    return sight_of(schedule.policy) if due else None
