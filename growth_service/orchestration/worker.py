"""What a Train worker runs: the stage loop, with records going out and verdicts coming in."""

import json
from typing import Any

import ray.train

from growth_service.core.decisions import decision_from_dict
from growth_service.core.records import FinalRecord
from growth_service.errors import GrowthError
from growth_service.orchestration.board import await_verdict
from growth_service.training.config import TrialConfig
from growth_service.training.ranks import Ranks, one_thread
from growth_service.training.stage_loop import Record, run_trial


def train_loop(config: dict[str, Any]) -> None:
    """Run one trial on this rank; every rank reports equally often.

    Args:
        config: ``{"trial": TrialConfig as JSON, "board": name of the decision board}``.
    """
    one_thread()
    ranks = Ranks()
    try:
        _run(config, ranks)
    except GrowthError as error:  # the same mistake on every rank and at every try: no reason to start again
        failed = {"kind": "failed", "trial": config["trial"]["trial"], "reason": str(error)}
        ray.train.report({"kind": "failed", "loss_val": float("nan"), "record": json.dumps(failed)})


def _run(config: dict[str, Any], ranks: Ranks) -> None:
    loop = run_trial(TrialConfig.from_dict(config["trial"]), ranks=ranks)
    record = next(loop)
    while True:
        ray.train.report(as_metrics(record))
        if isinstance(record, FinalRecord):
            return
        found = await_verdict(config["board"], trial=record.trial, stage=record.stage) if ranks.is_first else None
        found = ranks.broadcast(found)
        record = loop.send(decision_from_dict(found) if found is not None else None)


def as_metrics(record: Record) -> dict[str, Any]:
    """A record on its way through Train and Tune: flat, with the whole as JSON text."""
    if isinstance(record, FinalRecord):
        return {"kind": "final", "loss_val": record.loss_val, "record": json.dumps(record.to_dict())}
    return {"kind": "stage", "loss_val": record.loss_val, "record": json.dumps(record.to_dict())}
