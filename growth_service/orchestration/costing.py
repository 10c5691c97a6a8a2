"""What a job will cost on this machine: counted FLOPs, measured rates, expected time."""

import os
import time
from pathlib import Path
from typing import Any

from growth_service.models.sites import size_of
from growth_service.orchestration import plan, resources, sampling
from growth_service.spec import JobSpec
from growth_service.training.batches import next_indices, shards_of
from growth_service.training.datasets import prepare_for
from growth_service.training.evaluate import loss_sum
from growth_service.training.ranks import one_thread
from growth_service.training.stage_loop import StageLoop

START_S = 15.0
"""From the start of a study to workers that take trials: ``benchmarks/overhead.py`` measured 14.9 s on two cores; not a
promise."""
TIMED_BATCHES = 8


def cost_of(job: JobSpec, *, folder: Path) -> dict[str, Any]:
    """Count and time the beginning of each schedule.

    Args:
        job: A checked job.
        folder: Scratch folder for the prepared data set.

    Returns:
        Per trial: sizes, FLOPs per sample, batches of its first stage, FLOP rate on one thread; in all:
        FLOPs, expected seconds, bytes of checkpoints.
    """
    one_thread()
    data = prepare_for(job, folder / "data")
    trials = plan.planned_trials(job)
    sampling.rehearse_space(job)
    plan.check_networks(job, trials, data)
    first = plan.check_budgets(job, trials, data, folder=folder)
    listed = [_trial_cost(job, trial, data, folder, first[trial.name]) for trial in trials]
    at_once = resources.concurrent(job, cpus=float(os.cpu_count() or 1))
    workers = job.resources.workers
    seconds = sum(job.budget.trial / t["flops_per_s"] / workers for t in listed)
    num = resources.num_trials(job)
    return {
        "trials": listed,
        "num_trials": num,
        "at_once": at_once,
        "study_flops": resources.study_budget(job).total_flops,
        "start_s": START_S,
        "expected_s": START_S + seconds * num / max(len(listed), 1) / at_once,
        "disk_bytes": sum(t["params"] * 4 * 3 * 2 * job.search.num_stages for t in listed),
    }


def _trial_cost(
    job: JobSpec, trial: plan.PlannedTrial, data: dict[str, Any], folder: Path, batches: int
) -> dict[str, Any]:
    loop = plan.fresh_loop(job, trial, data=data, folder=folder)
    depth, width, params = size_of(loop.state.model)
    return {
        "name": trial.name,
        "depth": depth,
        "width": width,
        "params": params,
        "train_samples": loop.state.subset,
        "flops_per_sample": loop.state.cost.train,
        "first_stage_batches": batches,
        "flops_per_s": _rate(job, loop),
    }


def _rate(job: JobSpec, loop: StageLoop) -> float:
    """FLOP per second of training steps on one thread."""
    settings = job.training
    position = loop.state.position
    took = []
    for _ in range(TIMED_BATCHES):
        started = time.perf_counter()
        indices, position = next_indices(
            position, subset=loop.state.subset, batch_size=settings.batch_size, seed=job.seed
        )
        loop.gradients.backward(shards_of(loop.state.splits.train, indices, num_shards=settings.shards), loss_sum)
        loop.state.optimizer.step()
        took.append(time.perf_counter() - started)
    return settings.batch_size * loop.state.cost.train / sorted(took)[len(took) // 2]
