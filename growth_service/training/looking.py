"""When and at what a trial looks: the probe after a stage, what it will cost, and what steps would make of it."""

import copy
import logging
from dataclasses import asdict, replace
from typing import Any

from growth_service.core.decisions import SizeAfter
from growth_service.core.policies import BudgetAware, Policy, Sight, sight_of
from growth_service.core.schedule import GrowthSchedule
from growth_service.core.steps import Change, Deepen
from growth_service.errors import GrowthError
from growth_service.models.flops import flops_per_sample
from growth_service.probing import SaturationReport, probe
from growth_service.probing.probe import Estimate, estimate_flops
from growth_service.training.batches import chunks_of
from growth_service.training.evaluate import CHUNK, loss_sum
from growth_service.training.growing import CHECKED_SAMPLES, candidates, take_step
from growth_service.training.state import TrialState

logger = logging.getLogger(__name__)


def look(state: TrialState, schedule: GrowthSchedule, *, last: bool) -> SaturationReport | None:
    """Probe the network after its present stage; None where the policy does not look."""
    sight = _sight(schedule, last=last)
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


def sizes_after(state: TrialState, policy: Policy) -> tuple[SizeAfter, ...]:
    """What the network would be after each step that the policy considers; steps that it cannot take are left out.

    Nothing is run but one sample a step, to count its FLOPs.
    """
    if not isinstance(policy, BudgetAware):
        return ()
    return tuple(found for step in policy.steps if (found := _size_after(state, step)) is not None)


def _size_after(state: TrialState, step: Change) -> SizeAfter | None:
    """Take the step on a copy."""
    model, train = copy.deepcopy(state.model), state.splits.train
    try:
        taken = take_step(
            model,
            (replace(step, exact=True) if isinstance(step, Deepen) else step,),  # the same sizes
            decided_after=state.stage,
            seed=state.config.seed,
            optimizer=None,
            train=train,
            subset=state.subset,
            ridge=state.config.probe["ridge"],
            fold_limit=state.config.probe["train_samples"],
            ranks=state.ranks,
            checked=False,
        )
    except GrowthError as error:
        logger.info("Not considering %s: %s", step, error)
        return None
    cost = flops_per_sample(model.train(), train.inputs[:1])
    return SizeAfter(
        change=step,
        params=sum(p.numel() for p in model.parameters()),
        flops_per_sample=cost.train,
        flops=2 * CHECKED_SAMPLES * cost.forward * len(taken.receipts),  # outputs before and after each part
    )


def look_settings(schedule: GrowthSchedule, *, last: bool) -> dict[str, Any] | None:
    """What the policy says about the look after the present stage, as plain JSON; None where there is none."""
    sight = _sight(schedule, last=last)
    return None if sight is None else asdict(sight) | {"axes": list(sight.axes)}


def look_estimate(state: TrialState, schedule: GrowthSchedule, *, last: bool, until: int) -> Estimate:
    """FLOPs that the next look will cost at most, and the cost of finding out; no FLOPs where there is no look.

    Args:
        state: The trial.
        schedule: Whose policy looks.
        last: Whether nothing comes after the stage.
        until: FLOPs that the trial will have spent after it: a policy may leave out a look that is dear beside them.
    """
    sight = _sight(schedule, last=last)
    inputs = _inputs(state, sight)
    if sight is None or inputs is None:
        return Estimate(flops=0, cost=0)
    found = estimate_flops(state.model, loss=loss_sum, reduction="sum", **inputs)
    return found if found.flops <= sight.most_share * until else Estimate(flops=0, cost=found.cost)


def _inputs(state: TrialState, sight: Sight | None) -> dict[str, Any] | None:
    """Candidates and samples of the look after the present stage; none after the last stage."""
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


def _sight(schedule: GrowthSchedule, *, last: bool) -> Sight | None:
    """What is measured after a stage: nothing after the last one."""
    return None if last else sight_of(schedule.policy)
