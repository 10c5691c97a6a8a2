"""What the Train workers of a lane run: one trial after another, records going out and verdicts coming in."""

import gc
import json
from typing import Any

import ray

from growth_service.core.decisions import decision_from_dict
from growth_service.core.records import FinalRecord
from growth_service.errors import GrowthError
from growth_service.orchestration.exchange import Metrics, failed, find_exchange
from growth_service.training.config import TrialConfig
from growth_service.training.ranks import Ranks, one_thread
from growth_service.training.stage_loop import Record, run_trial


class Desk:
    """A lane's side of the exchange; only rank 0 has one."""

    def __init__(self, name: str, *, lane: int) -> None:
        self._exchange, self._lane = find_exchange(name), lane

    def take(self) -> dict[str, Any] | None:
        """The next trial; None at the end of the study."""
        while True:
            found = ray.get(self._exchange.take.remote(self._lane))
            if found:
                trial: dict[str, Any] | None = found.get("trial")
                return trial

    def offer(self, trial: str, metrics: Metrics) -> None:
        """Hand a record in."""
        ray.get(self._exchange.offer.remote(self._lane, trial, metrics))

    def verdict(self, trial: str, stage: int) -> dict[str, Any]:
        """Wait for the verdict on a stage."""
        while True:
            found: dict[str, Any] | None = ray.get(self._exchange.verdict.remote(self._lane, trial, stage))
            if found is not None:
                return found

    def stumble(self, trial: str, error: Exception) -> None:
        """Say why this worker is about to die."""
        ray.get(self._exchange.stumble.remote(trial, f"{type(error).__name__}: {error}"[:500]))


def lane_loop(config: dict[str, Any]) -> None:
    """Run trials on this rank until there are no more.

    Args:
        config: ``{"exchange": its name, "lane": number of this group of workers}``.
    """
    one_thread()
    ranks = Ranks()
    desk = Desk(config["exchange"], lane=config["lane"]) if ranks.is_first else None
    while (trial := ranks.broadcast(desk.take() if desk else None)) is not None:
        _run(trial, ranks, desk)
        gc.collect()


def _run(trial: dict[str, Any], ranks: Ranks, desk: Desk | None) -> None:
    name: str = trial["trial"]
    try:
        _run_stages(trial, ranks, desk)
    except GrowthError as error:  # the same mistake on every rank and at every try: no reason to start again
        if desk:
            desk.offer(name, failed(name, str(error)))
    except Exception as error:
        if desk:
            desk.stumble(name, error)
        raise


def _run_stages(trial: dict[str, Any], ranks: Ranks, desk: Desk | None) -> None:
    loop = run_trial(TrialConfig.from_dict(trial), ranks=ranks)
    record = next(loop)
    while True:
        if desk:
            desk.offer(record.trial, as_metrics(record))
        if isinstance(record, FinalRecord):
            return
        verdict = ranks.broadcast(desk.verdict(record.trial, record.stage) if desk else None)
        record = loop.send(decision_from_dict(verdict))


def as_metrics(record: Record) -> Metrics:
    """A record on its way to Tune: flat, with the whole as JSON text."""
    if isinstance(record, FinalRecord):
        return {"kind": "final", "loss_val": record.loss_val, "record": json.dumps(record.to_dict())}
    return {"kind": "stage", "loss_val": record.loss_val, "record": json.dumps(record.to_dict())}
