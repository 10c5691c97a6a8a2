"""Lanes: long-lived groups of Train workers that run one trial after another.

Starting the workers of a Train run takes 10 to 20 seconds, as long as a short trial trains. A study therefore starts
as many groups as trials may run at once, and each takes its trials from the exchange. A group whose workers die is
started again by Train and goes on with the trial that it had, from its last stage.
"""

import contextlib
import logging
import threading
import time
from pathlib import Path
from typing import Any

import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

from growth_service.orchestration.profile import Event
from growth_service.orchestration.worker import lane_loop
from growth_service.spec import ResourcesSpec

COLLECTIVE_TIMEOUT_S = 6 * 3600
"""Ranks wait for rank 0 while it waits for a stage that another trial runs; Ray notices dead ones."""
CLOSING_S = 20.0
"""How long a lane may take to end once no trial is left."""
STARTS = 3
"""How often the Train run of a lane is started before the lane is given up."""
ANSWER_S = 30.0
"""How long the exchange may take to answer before it counts as gone."""
logger = logging.getLogger(__name__)


class Lanes:
    """The lanes of a study, started one by one as trials need them.

    Args:
        study_id: Also the name of its exchange.
        exchange: Its handle.
        most: Lanes at once.
        deaths: Worker deaths that a lane survives in all.
        resources: Workers of a lane.
        storage: Folder of Train's own files.
    """

    def __init__(
        self, study_id: str, exchange: Any, *, most: int, deaths: int, resources: ResourcesSpec, storage: Path
    ) -> None:
        self._study_id, self._exchange, self._most, self._deaths = study_id, exchange, most, deaths
        self._resources, self._storage = resources, storage
        self._threads: list[threading.Thread] = []
        self._closing = False

    def __len__(self) -> int:
        return len(self._threads)

    def want(self, trials: int) -> None:
        """Have a lane for each of so many trials, as far as they may run at once."""
        while len(self._threads) < min(trials, self._most):
            lane = len(self._threads)
            ray.get(self._exchange.expect.remote(lane))
            thread = threading.Thread(target=self._run, args=(lane,), name=f"lane-{lane}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def gone(self) -> str | None:
        """Why no trial can run any more, where none can: then trials that fail have not failed by themselves."""
        try:
            lost: str | None = ray.get(self._exchange.lost.remote(), timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            return f"the exchange between trials and workers is gone ({last_line(error)})"
        return lost

    def close(self) -> list[Event]:
        """End all lanes; what they did."""
        events: list[Event] = ray.get(self._exchange.close.remote())
        self._join()
        return events

    def abort(self) -> None:
        """End the exchange, and with it the lanes, after the stages that they are in."""
        self._closing = True
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._exchange)
        self._join()

    def _join(self) -> None:
        self._closing, deadline = True, time.monotonic() + CLOSING_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("%s did not end within %.0f s; it ends with this process", thread.name, CLOSING_S)

    def _run(self, lane: int) -> None:
        reason = ""
        for start in range(STARTS):
            try:
                self._trainer(lane, start).fit()
                return
            except Exception as error:  # noqa: BLE001  # whatever ends a lane, the trials that wait must hear of it
                reason = f"the workers cannot be started or kept: {last_line(error)}"
                if self._closing:
                    return
                logger.warning("Lane %d ended, start %d of %d: %s", lane, start + 1, STARTS, error)
        with contextlib.suppress(ray.exceptions.RayError):  # the study was interrupted, and its exchange is gone
            ray.get(self._exchange.lane_lost.remote(lane, reason))

    def _trainer(self, lane: int, start: int) -> TorchTrainer:
        return TorchTrainer(
            lane_loop,
            train_loop_config={"exchange": self._study_id, "lane": lane},
            torch_config=TorchConfig(backend="gloo", timeout_s=COLLECTIVE_TIMEOUT_S),
            scaling_config=ray.train.ScalingConfig(
                num_workers=self._resources.workers, resources_per_worker={"CPU": self._resources.cpus_per_worker}
            ),
            run_config=ray.train.RunConfig(
                name=f"{self._study_id}-lane-{lane}-{start}",
                storage_path=str(self._storage.resolve()),
                failure_config=ray.train.FailureConfig(max_failures=self._deaths, controller_failure_limit=2),
            ),
        )


def last_line(error: object) -> str:
    """The exception's own last line, without the traceback around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "Exception" in line]
    return (telling or lines or [type(error).__name__])[-1][:500]
