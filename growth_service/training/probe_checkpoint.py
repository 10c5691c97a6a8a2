"""Probe the network in a checkpoint with the data of its study."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from growth_service.core.decisions import Anneal, Decision, Grow, Reading, Stop, TrainOn
from growth_service.core.policies import SignalGuided, sight_of
from growth_service.core.rules import decide
from growth_service.core.schedule import GrowthSchedule
from growth_service.errors import CheckpointError
from growth_service.probing import probe
from growth_service.training.batches import chunks_of
from growth_service.training.checkpoint import load_checkpoint
from growth_service.training.config import TrialConfig
from growth_service.training.data import open_splits, subset_size
from growth_service.training.evaluate import CHUNK, loss_sum
from growth_service.training.growing import candidates
from growth_service.training.ranks import one_thread


def probe_checkpoint(
    folder: Path, *, tolerance: float | None, samples: int | None, level: float, seed: int
) -> dict[str, Any]:
    """Certificates at every site and block of a checkpoint's network, and advice.

    Args:
        folder: A checkpoint in a trial of a study (its ``trial.json`` names data and limits).
        tolerance: Smallest gain that counts; None: the schedule's own, else the default rule.
        samples: Most probe samples; None: the job's.
        level: Error level over all candidates.
        seed: Of the candidates.

    Returns:
        The report as JSON, with ``next``, what the schedule's own rule would do, in words.

    Raises:
        CheckpointError: If the checkpoint is damaged, or belongs to no trial.
    """
    one_thread()
    config = _trial_config(folder)
    found = load_checkpoint(folder)
    splits = open_splits(_data_folder(folder, config))
    policy = _policy(config.growth_schedule(), tolerance=tolerance, level=level)
    sight = sight_of(policy)
    assert sight is not None
    share = found.streams["data_share"]
    subset = min(subset_size(len(splits.train.targets), share), config.probe["train_samples"])
    report = probe(
        found.model,
        batches=chunks_of(splits.probe, size=CHUNK, limit=samples or config.probe["samples"]),
        train_batches=chunks_of(splits.train, size=CHUNK, limit=subset),
        loss=loss_sum,
        reduction="sum",
        candidates=candidates(found.model, sight, stage=len(found.history), seed=seed),
        level=level,
        tolerance=policy.tolerance_nats,
        ridge=config.probe["ridge"],
        seed=seed,
    )
    reading = Reading(
        stage=0,
        num_stages=2,
        spent_flops=0,
        budget_flops=0,
        data_share=share,
        tolerance_nats=report.tolerance_nats,
        candidates=tuple(s.reading() for s in report.sites),
    )
    return report.to_dict() | {"next": _advice(decide(reading, policy))}


def _data_folder(folder: Path, config: TrialConfig) -> Path:
    """The study's prepared data: where the trial found it, or beside the trials where the study was moved to."""
    for place in (Path(config.data), folder.resolve().parents[3] / "data"):
        if (place / "data.json").is_file():
            return place
    raise CheckpointError(f"the data of {folder} is not at {config.data}: keep the study's folder together")


def _trial_config(folder: Path) -> TrialConfig:
    path = folder.parent.parent / "trial.json"
    try:
        return TrialConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} belongs to no trial of a study: {path} cannot be read ({error})") from error


def _policy(schedule: GrowthSchedule, *, tolerance: float | None, level: float) -> SignalGuided:
    """The schedule's own rule where it has one, looking at depth and width in any case."""
    match schedule.policy:
        case SignalGuided() as own:
            rule = replace(own, axes=("depth", "width", "data"))
        case _:
            rule = SignalGuided()
    return replace(rule, level=level, tolerance_nats=tolerance if tolerance is not None else rule.tolerance_nats)


def _advice(decision: Decision) -> str:
    match decision:
        case Grow(changes=changes, reason=reason):
            return f"grow {', '.join(map(str, changes))} - {reason}"
        case Anneal(reason=reason) | Stop(reason=reason):
            return f"stop growing - {reason}"
        case TrainOn(reason=reason):
            return f"train on, or probe with more samples - {reason}"
