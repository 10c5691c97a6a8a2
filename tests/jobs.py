"""Small jobs, and what their trials do when they run alone in this process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from growth_service.orchestration import plan
from growth_service.spec import JobSpec, parse_job
from growth_service.training.datasets import prepare
from growth_service.training.ranks import Ranks, one_thread
from growth_service.training.stage_loop import run_trial

REPOSITORY = Path(__file__).resolve().parent.parent
DIGITS = REPOSITORY / "search_spaces" / "jobs" / "digits.yaml"
FASHION = REPOSITORY / "search_spaces" / "jobs" / "fashion_mnist.yaml"
TEXT = REPOSITORY / "search_spaces" / "jobs" / "text.yaml"

SMALL = {"blocks": [1, 1], "hidden": [8, 8]}
JOINT = {"use": "certified", "name": "joint", **SMALL, "tolerance": "0.1 nats", "data_share": 0.5}


def job_data(storage: Path, **changes: Any) -> dict[str, Any]:
    """A job on digits whose trials train for about a second."""
    data: dict[str, Any] = {
        "version": 1,
        "name": "small",
        "data": {"name": "digits"},
        "model": {"family": "resnet", "widths": [8, 16]},
        "training": {"batch_size": 32, "shards": 4, "learning_rate": 0.01},
        "budget": {"trial": "6 GFLOP"},
        "probe": {"samples": 120, "train_samples": 128},
        "search": {
            "stages": 3,
            "concurrent_trials": 2,
            "schedules": [
                {"use": "scratch", "name": "scratch", **SMALL},
                JOINT,
                {"use": "one_shot_late", "name": "late", **SMALL, "add_units": 4, "add_channels": 4},
            ],
        },
        "scheduler": {"rule": "none"},
        "storage": str(storage),
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            data[section] = data[section] | {name: value} if section in data else {name: value}
        else:
            data[section] = value
    return data


def small_job(storage: Path, **changes: Any) -> JobSpec:
    """The same, checked."""
    return parse_job(job_data(storage, **changes), source="test job")


def alone(job: JobSpec, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Comparable records of each listed trial when it runs by itself, without Ray: stages, then the end."""
    one_thread()
    data = prepare(job.data.name, seed=job.seed, target=folder / "data")
    return {
        trial.name: [
            record.comparable()
            for record in run_trial(
                replace(plan.trial_config(job, trial, data=data, folder=folder), cache=None), ranks=Ranks()
            )
        ]
        for trial in plan.planned_trials(job)
    }


def recorded(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The same out of a study's ``result.json``."""
    from growth_service.core.records import TrialRecord

    trials = [TrialRecord.from_dict(t) for t in json.loads(json.dumps(result["trials"]))]
    return {t.trial: [*(s.comparable() for s in t.stages), t.final.comparable()] for t in trials if t.final}
