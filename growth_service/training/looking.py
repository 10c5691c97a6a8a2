"""When and at what a trial looks: the probe after a stage, and what it will cost."""

from typing import Any

from growth_service.core.schedule import GrowthSchedule, SignalGuided
from growth_service.probing import SaturationReport, probe
from growth_service.probing.probe import Estimate, estimate_flops
from growth_service.training.batches import chunks_of
from growth_service.training.evaluate import CHUNK, loss_sum
from growth_service.training.growing import candidates
from growth_service.training.state import TrialState


def look(state: TrialState, schedule: GrowthSchedule) -> SaturationReport | None:
    """Probe the network after its present stage; None where the policy does not look."""
    inputs, policy = _inputs(state, schedule), schedule.policy
    if inputs is None or not isinstance(policy, SignalGuided):
        return None
    return probe(
        state.model,
        loss=loss_sum,
        reduction="sum",
        tolerance=policy.tolerance_nats,
        ridge=state.config.probe["ridge"],
        seed=state.config.seed,
        mapper=state.ranks.map,
        **inputs,
    )


def look_estimate(state: TrialState, schedule: GrowthSchedule) -> Estimate:
    """FLOPs that the next look will cost at most, and the cost of finding out; zeros where there is none."""
    inputs = _inputs(state, schedule)
    if inputs is None:
        return Estimate(flops=0, cost=0)
    return estimate_flops(state.model, loss=loss_sum, reduction="sum", **inputs)


def _inputs(state: TrialState, schedule: GrowthSchedule) -> dict[str, Any] | None:
    """Candidates and samples of the look after the present stage; none after the last stage."""
    policy, stage = schedule.policy, state.stage
    if not isinstance(policy, SignalGuided) or stage + 1 >= schedule.num_stages:
        return None
    found = candidates(state.model, policy, stage=stage, seed=state.config.seed)
    if not found:
        return None
    limits, splits = state.config.probe, state.splits
    return {
        "candidates": found,
        "batches": chunks_of(splits.probe, size=CHUNK, limit=limits["samples"]),
        "train_batches": chunks_of(splits.train, size=CHUNK, limit=min(state.subset, limits["train_samples"])),
        "level": policy.level,
    }
