"""The exchange: where trials wait for a lane, and records and verdicts change hands.

Tune's trials hand their configuration in and read the records that come back. Lanes (long-lived Train workers) take a
trial, offer a record after each stage and ask for the verdict on it. The study posts verdicts. Nobody is stopped from
outside: a trial that reads "stop" returns, and its lane takes the next one.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import ray

from growth_service.orchestration.profile import Event

NAMESPACE = "growth"
PATIENCE_S = 20.0
"""How long one call waits for news before it comes back empty and is made again."""
Metrics = dict[str, Any]
"""A record as Tune gets it: flat, with the whole as JSON text. ``kind`` is stage, final or failed."""


class Exchange:
    """State of the exchange; every waiting call returns after ``patience_s`` without news.

    Args:
        restarts: How often the workers of a trial may die before the trial counts as failed.
        patience_s: As said.
    """

    def __init__(self, *, restarts: int, patience_s: float = PATIENCE_S) -> None:
        self._restarts, self._patience_s = restarts, patience_s
        self._news = asyncio.Condition()
        self._closed = False
        self._waiting: list[str] = []
        self._configs: dict[str, dict[str, Any]] = {}
        self._records: dict[str, list[Metrics]] = {}
        self._verdicts: dict[tuple[str, int], dict[str, Any]] = {}
        self._lanes: dict[int, str | None] = {}
        self._deaths: dict[str, int] = {}
        self._stumbles: dict[str, str] = {}
        self._lost: str | None = None
        self.events: list[Event] = []

    # -- Tune's trials ---------------------------------------------------------------------------

    async def follow(self, trial: str, config: dict[str, Any], heard: int) -> list[Metrics]:
        """Records of a trial after the first ``heard``; the first call puts it in the queue."""
        async with self._news:
            if trial not in self._configs:
                self._configs[trial] = config
                self._records.setdefault(trial, [])
                self._waiting.append(trial)
                if self._lost is not None and not self._lanes:
                    self._fail(trial, self._lost)
                self._news.notify_all()
            await self._until(lambda: len(self._records[trial]) > heard)
            return self._records[trial][heard:]

    # -- lanes -----------------------------------------------------------------------------------

    async def take(self, lane: int) -> dict[str, Any]:
        """The next trial for a lane: ``{"trial": config}``, or ``{"closed": True}``; neither: ask again.

        A lane that has a trial and asks for one has lost its workers: it gets the same trial again, or, if that
        happened too often, the next one.
        """
        async with self._news:
            if lane not in self._lanes:
                self._note(lane, "up")
            self._reclaim(lane)
            if self._lanes[lane] is None:
                await self._until(lambda: bool(self._waiting) or self._closed)
                if self._waiting:
                    self._lanes[lane] = self._waiting.pop(0)
            name = self._lanes[lane]
            if name is not None:
                self._note(lane, "took", name)
                return {"trial": self._configs[name]}
            return {"closed": True} if self._closed else {}

    async def offer(self, lane: int, trial: str, metrics: Metrics) -> None:
        """A record of the trial that a lane has; the last one frees the lane."""
        async with self._news:
            self._records.setdefault(trial, []).append(metrics)
            ended = metrics["kind"] != "stage"
            if ended:
                self._lanes[lane] = None
            self._note(lane, "end" if ended else "record", trial)
            self._news.notify_all()

    async def verdict(self, lane: int, trial: str, stage: int) -> dict[str, Any] | None:
        """The verdict on a stage; None: not yet."""
        async with self._news:
            await self._until(lambda: (trial, stage) in self._verdicts)
            found = self._verdicts.get((trial, stage))
            if found is not None:
                self._note(lane, "verdict", trial)
            return found

    async def stumble(self, trial: str, reason: str) -> None:
        """Why the workers of a trial are about to die."""
        self._stumbles[trial] = reason

    # -- the study -------------------------------------------------------------------------------

    async def post(self, trial: str, stage: int, verdict: dict[str, Any]) -> None:
        """Publish a verdict; the first one for a stage stands."""
        async with self._news:
            self._verdicts.setdefault((trial, stage), verdict)
            self._news.notify_all()

    async def lane_lost(self, lane: int, reason: str) -> None:
        """A lane is gone for good: its trial fails, and so does every other one when no lane is left."""
        async with self._news:
            name = self._lanes.pop(lane, None)
            if name is not None:
                self._fail(name, self._stumbles.get(name, reason))
            if not self._lanes:
                self._lost = reason
                for waiting in self._waiting:
                    self._fail(waiting, reason)
                self._waiting.clear()
            self._news.notify_all()

    async def close(self) -> None:
        """No more trials: lanes that ask are told to end."""
        async with self._news:
            self._closed = True
            self._news.notify_all()

    async def timeline(self) -> list[Event]:
        """All events so far."""
        return self.events

    # -- inside ----------------------------------------------------------------------------------

    def _reclaim(self, lane: int) -> None:
        name = self._lanes.setdefault(lane, None)
        if name is None:
            return
        self._deaths[name] = self._deaths.get(name, 0) + 1
        if self._deaths[name] > self._restarts:
            reason = self._stumbles.get(name, "its workers died; see the logs in Ray's session folder")
            self._fail(name, f"{reason} (workers started {self._restarts + 1} times)")
            self._lanes[lane] = None

    def _fail(self, trial: str, reason: str) -> None:
        self._records.setdefault(trial, []).append(failed(trial, reason))
        self._news.notify_all()

    def _note(self, lane: int, what: str, trial: str = "") -> None:
        self.events.append(Event(time.time(), lane, what, trial))

    async def _until(self, ready: Callable[[], bool]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await self._news.wait_for(ready)


def failed(trial: str, reason: str) -> Metrics:
    """The last record of a trial whose work failed."""
    record = {"kind": "failed", "trial": trial, "reason": reason}
    return {"kind": "failed", "loss_val": float("nan"), "record": json.dumps(record)}


def make_exchange(name: str, *, restarts: int) -> Any:
    """Start an exchange in the driver, outside every placement group."""
    actor = ray.remote(Exchange)
    return actor.options(
        name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=1000, scheduling_strategy="DEFAULT"
    ).remote(restarts=restarts)


def find_exchange(name: str) -> Any:
    """The exchange of a study, from another process."""
    return ray.get_actor(name, namespace=NAMESPACE)
