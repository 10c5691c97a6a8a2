"""What the Train workers of a lane run: one trial after another, records going out and verdicts coming in."""

import contextlib
import gc
import json
import uuid
from typing import Any

import ray

from growth_service.core.decisions import Decision, decision_from_dict
from growth_service.core.records import FinalRecord, StageRecord
from growth_service.errors import GrowthError
from growth_service.orchestration.exchange import Metrics, failed, find_exchange
from growth_service.training.config import TrialConfig
from growth_service.training.ranks import Ranks, one_thread
from growth_service.training.stage_loop import Record, run_trial


class Desk:
    """A lane's side of the exchange, on one rank; rank 0 speaks for the lane.

    Calls that wait come back empty after a while, and are made again: no rank waits for another for hours.
    """

    def __init__(self, name: str, *, lane: int) -> None:
        self._exchange, self._lane, self._workers = find_exchange(name), lane, uuid.uuid4().hex

    def take(self) -> dict[str, Any]:
        """The next trial as ``{"trial": ...}``, ``{"closed": True}``, or nothing yet."""
        try:
            found: dict[str, Any] = ray.get(self._exchange.take.remote(self._lane, self._workers))
            if "trial" in found:
                ray.get(self._exchange.begin.remote(self._lane, found["trial"]["trial"]))
        except ray.exceptions.RayActorError:  # the study was interrupted
            return {"closed": True}
        return found

    def offer(self, trial: str, metrics: Metrics) -> None:
        """Hand a record in."""
        ray.get(self._exchange.offer.remote(self._lane, trial, metrics))

    def verdict(self, trial: str, stage: int) -> dict[str, Any] | None:
        """The verdict on a stage; None: not yet."""
        found: dict[str, Any] | None = ray.get(self._exchange.verdict.remote(self._lane, trial, stage))
        return found

    def stumble(self, trial: str, error: Exception) -> None:
        """Say why this worker is about to die."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._exchange.stumble.remote(trial, f"{type(error).__name__}: {error}"[:500]))


def lane_loop(config: dict[str, Any]) -> None:
    """Run trials on this rank until there are no more, or the study is gone.

    Args:
        config: ``{"exchange": its name, "lane": number of this group of workers}``.
    """
    one_thread()
    ranks = Ranks()
    try:
        desk = Desk(config["exchange"], lane=config["lane"])
    except ValueError:  # the study was interrupted while these workers started
        return
    while "closed" not in (found := ranks.broadcast(desk.take() if ranks.is_first else None)):
        if "trial" in found:
            _run(found["trial"], ranks, desk)
            gc.collect()


def _run(trial: dict[str, Any], ranks: Ranks, desk: Desk) -> None:
    name: str = trial["trial"]
    try:
        _run_stages(trial, ranks, desk)
    except GrowthError as error:  # the same mistake on every rank and at every try: no reason to start again
        if ranks.is_first:
            desk.offer(name, failed(name, str(error)))
    except Exception as error:
        desk.stumble(name, error)
        raise


def _run_stages(trial: dict[str, Any], ranks: Ranks, desk: Desk) -> None:
    loop = run_trial(TrialConfig.from_dict(trial), ranks=ranks)
    record = next(loop)
    while True:
        if ranks.is_first:
            desk.offer(record.trial, as_metrics(record))
        if isinstance(record, FinalRecord):
            return
        record = loop.send(_verdict(record, ranks, desk))


def _verdict(record: StageRecord, ranks: Ranks, desk: Desk) -> Decision:
    """Wait for the verdict on a stage, on all ranks."""
    while True:
        found = ranks.broadcast(desk.verdict(record.trial, record.stage) if ranks.is_first else None)
        if found is not None:
            return decision_from_dict(found)


def as_metrics(record: Record) -> Metrics:
    """A record on its way to Tune: flat, with the whole as JSON text."""
    if isinstance(record, FinalRecord):
        return {"kind": "final", "loss_val": record.loss_val, "record": json.dumps(record.to_dict())}
    return {"kind": "stage", "loss_val": record.loss_val, "record": json.dumps(record.to_dict())}
