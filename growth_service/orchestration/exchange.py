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
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from growth_service.orchestration.profile import Event

NAMESPACE = "growth"
PATIENCE_S = 20.0
"""How long one call waits for news before it comes back empty and is made again."""
ABANDONED = {"kind": "stop", "cause": "budget", "reason": "nobody follows this trial any more"}
"""The verdict on trials that failed for the study while a lane still had them."""
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
        self._lanes: dict[int, _Lane] = {}
        self._deaths: dict[str, int] = {}
        self._stumbles: dict[str, str] = {}
        self._abandoned: set[str] = set()
        self._lost: str | None = None
        self.events: list[Event] = []

    # -- Tune's trials ---------------------------------------------------------------------------

    async def follow(self, trial: str, config: dict[str, Any], heard: int) -> list[Metrics]:
        """Records of a trial after the first ``heard``; the first call puts it in the queue."""
        async with self._news:
            if trial not in self._configs:
                self._configs[trial] = config
                self._records.setdefault(trial, [])
                if self._lost is None:
                    self._waiting.append(trial)
                    self._news.notify_all()
                else:
                    self._fail(trial, self._lost)
            await self._until(lambda: len(self._records[trial]) > heard)
            return self._records[trial][heard:]

    # -- lanes -----------------------------------------------------------------------------------

    async def take(self, lane: int, workers: str) -> dict[str, Any]:
        """The next trial for a lane: ``{"trial": config}``, or ``{"closed": True}``; neither: ask again.

        A lane whose workers died has others, who get the trial that it had, or, if that happened too often, the next.

        Args:
            lane: Number of the lane.
            workers: Name of this group of workers; what an earlier group asked for is void.
        """
        async with self._news:
            state = self._lanes.setdefault(lane, _Lane())
            if state.workers != workers:
                self._replace(lane, state, workers)
            await self._until(lambda: state.workers != workers or state.trial or self._waiting or self._closed)
            if state.workers != workers:
                return {}
            if state.trial is None and self._waiting:
                state.trial, state.has_begun = self._waiting.pop(0), False
            if state.trial is not None:
                return {"trial": self._configs[state.trial]}
            return {"closed": True} if self._closed else {}

    async def begin(self, lane: int, trial: str) -> None:
        """A lane has received a trial and begins with it: from now on a death of its workers counts."""
        self._lanes[lane].has_begun = True
        self._note(lane, "took", trial)

    async def offer(self, lane: int, trial: str, metrics: Metrics) -> None:
        """A record of the trial that a lane has; the last one frees the lane."""
        async with self._news:
            self._records.setdefault(trial, []).append(metrics)
            ended = metrics["kind"] != "stage"
            if ended:
                self._lanes[lane].trial = None
            self._note(lane, "end" if ended else "record", trial)
            self._news.notify_all()

    async def verdict(self, lane: int, trial: str, stage: int) -> dict[str, Any] | None:
        """The verdict on a stage; None: not yet."""
        async with self._news:
            await self._until(lambda: (trial, stage) in self._verdicts or trial in self._abandoned)
            found = ABANDONED if trial in self._abandoned else self._verdicts.get((trial, stage))
            if found is not None:
                self._note(lane, "verdict", trial)
            return found

    async def stumble(self, trial: str, reason: str) -> None:
        """Why the workers of a trial are about to die; the first reason is the one to keep."""
        self._stumbles.setdefault(trial, reason)

    # -- the study -------------------------------------------------------------------------------

    async def post(self, trial: str, stage: int, verdict: dict[str, Any]) -> None:
        """Publish a verdict; the first one for a stage stands."""
        async with self._news:
            self._verdicts.setdefault((trial, stage), verdict)
            self._news.notify_all()

    async def abandon(self, trial: str) -> None:
        """Nobody follows a trial any more: it leaves the queue, or ends after the stage that it is in."""
        async with self._news:
            self._abandoned.add(trial)
            if trial in self._waiting:
                self._waiting.remove(trial)
            self._news.notify_all()

    async def expect(self, lane: int) -> None:
        """A lane is about to start."""
        async with self._news:
            self._lanes.setdefault(lane, _Lane())
            self._lost = None

    async def lane_lost(self, lane: int, reason: str) -> None:
        """A lane is gone for good: its trial waits for another lane; without any, all that wait fail."""
        async with self._news:
            state = self._lanes.pop(lane, None)
            if state is not None and state.trial is not None:
                self._waiting.insert(0, state.trial)
            if not self._lanes:
                self._lost = reason
                for waiting in self._waiting:
                    self._fail(waiting, self._stumbles.get(waiting, reason))
                self._waiting.clear()
            self._news.notify_all()

    async def lost(self) -> str | None:
        """Why no lane is left, where none is."""
        return self._lost

    async def close(self) -> list[Event]:
        """No more trials: lanes that ask are told to end. Returns all events."""
        async with self._news:
            self._closed = True
            self._news.notify_all()
            return self.events

    # -- inside ----------------------------------------------------------------------------------

    def _replace(self, lane: int, state: "_Lane", workers: str) -> None:
        """Other workers than before ask for a lane."""
        state.workers, trial = workers, state.trial
        self._note(lane, "up")
        self._news.notify_all()
        if trial is None or not state.has_begun:
            return
        self._deaths[trial] = self._deaths.get(trial, 0) + 1
        state.has_begun = False
        if self._deaths[trial] > self._restarts:
            reason = self._stumbles.get(trial, "its workers died; see the logs in Ray's session folder")
            self._fail(trial, f"{reason} (its workers died {self._deaths[trial]} times)")
            state.trial = None

    def _fail(self, trial: str, reason: str) -> None:
        self._records.setdefault(trial, []).append(failed(trial, reason))
        self._news.notify_all()

    def _note(self, lane: int, what: str, trial: str = "") -> None:
        self.events.append(Event(time.time(), lane, what, trial))

    async def _until(self, ready: Callable[[], object]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await self._news.wait_for(lambda: bool(ready()))


@dataclass(slots=True)
class _Lane:
    """Who runs a lane, and what it has."""

    workers: str = ""
    trial: str | None = None
    has_begun: bool = False


def failed(trial: str, reason: str) -> Metrics:
    """The last record of a trial whose work failed."""
    record = {"kind": "failed", "trial": trial, "reason": reason}
    return {"kind": "failed", "loss_val": float("nan"), "record": json.dumps(record)}


def make_exchange(name: str, *, restarts: int) -> Any:
    """Start an exchange on the driver's node, outside every placement group."""
    actor, here = ray.remote(Exchange), ray.get_runtime_context().get_node_id()
    return actor.options(
        name=name,
        namespace=NAMESPACE,
        num_cpus=0,
        max_concurrency=1000,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=here, soft=False),
    ).remote(restarts=restarts)


def find_exchange(name: str) -> Any:
    """The exchange of a study, from another process.

    Raises:
        ValueError: If there is none (any more).
    """
    return ray.get_actor(name, namespace=NAMESPACE)
