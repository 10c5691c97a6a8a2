"""Stages that other trials have run: when two are the same, and how a trial takes one over."""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from growth_service.core.decisions import Grow
from growth_service.core.rates import decaying_window
from growth_service.core.records import StageRecord
from growth_service.core.schedule import GrowthSchedule
from growth_service.core.steps import change_to_dict
from growth_service.errors import CheckpointError
from growth_service.training import checkpoint as store
from growth_service.training.looking import look_settings
from growth_service.training.optimizer import DECAY_SHARE
from growth_service.training.ranks import weights_digest
from growth_service.training.stage import Extent, Stage
from growth_service.training.stage_cache import Claim, StageCache, stage_key
from growth_service.training.state import TrialState

logger = logging.getLogger(__name__)


def key_of(state: TrialState, schedule: GrowthSchedule, extent: Extent, *, look_due: bool) -> str:
    """Address of the coming stage: everything that determines its result, as a digest.

    What the policy does with the result is not part of it, nor is the budget, unless the rates of the stage depend
    on it.
    """
    config, settings = state.config, state.config.training
    decaying = decaying_window(
        settings.get("rates", "restarts"), extent.window, decay_share=settings.get("decay_share", DECAY_SHARE)
    )
    return stage_key(
        base=config.base,
        data=state.splits.digest,
        seed=config.seed,
        training=settings,
        probe=config.probe,
        data_share=schedule.initial.data_share,
        before=state.key,
        stage=state.stage,
        changes=[change_to_dict(c) for c in state.decision.changes] if isinstance(state.decision, Grow) else [],
        until=extent.until,
        decaying=[*decaying, config.budget_flops] if decaying or extent.last else [],
        look=look_settings(schedule, due=look_due),
    )


def claim_of(cache: dict[str, Any] | None, key: str) -> Claim | None:
    """The right to run a stage in a trial with a cache; waits while another trial runs it."""
    if cache is None:
        return None
    try:
        return StageCache(Path(cache["folder"]), limit_bytes=cache["limit_bytes"]).claim(key)
    except OSError as error:
        logger.warning("Running without the stage cache, since it cannot be used: %s", error)
        return None


def is_shareable(state: TrialState, record: StageRecord, *, stage: Stage) -> bool:
    """Whether the stage would be the same in a trial of another budget: what had to stay free did not bind it."""
    if stage.extent.last:  # only trials of the same budget find it
        return True
    return not stage.blind and _room_for(state, record, stage.extent, forward=state.cost.forward)


def _room_for(state: TrialState, record: StageRecord, extent: Extent, *, forward: int) -> bool:
    at_the_end = forward * len(state.splits.test.targets)
    return state.budget.total_flops >= max(record.flops_total, extent.until) + at_the_end


def take_over(state: TrialState, folder: Path, *, extent: Extent) -> StageRecord | None:
    """Stand where another trial stood after this stage.

    Returns:
        Its record as one of this trial; None where the checkpoint is damaged, or where this trial would have run
        another stage, since its budget does not leave enough for its end.
    """
    started, name = time.perf_counter(), f"{state.stage:03d}"
    try:
        found = store.load_checkpoint(folder / name)
    except CheckpointError as error:
        logger.warning("Running stage %s of trial %s again, since %s", name, state.config.trial, error)
        return None
    theirs = StageRecord.from_dict(found.history[-1])
    if not extent.last and not _room_for(state, theirs, extent, forward=found.streams["cost_forward"]):
        return None
    state.stand_at(found)
    state.spend(theirs.flops_total - state.budget.spent_flops)
    state.keep_jumpboard(folder / f"{name}-jumpboard")
    state.ranks.agree(weights_digest(state.model), what=f"after taking over stage {name}")
    seconds = time.perf_counter() - started
    return replace(
        theirs,
        trial=state.config.trial,
        budget=state.budget.to_dict(),
        stage_s=seconds,
        overhead_s=seconds,
        grow_s=0.0,
        flops_wasted=state.flops_wasted,
        attempt=state.attempt,
        reused=True,
    )
