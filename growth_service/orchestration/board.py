"""The decision board: where the scheduler's verdicts wait for the trials that ask for them.

Stopping a trial from outside would leave its Train workers' resources reserved; a trial that
reads its verdict and returns ends like any other, with its last checkpoint and nothing leaked.
"""

import contextlib
import logging
import time
from typing import Any

import ray

from growth_service.orchestration.runtime import BOARD_TIMEOUT_S

NAMESPACE = "growth"
_POLL_S = (0.02, 0.5)
logger = logging.getLogger(__name__)


class DecisionBoard:
    """Verdicts by (trial, stage). Lives in a small actor that the driver makes and owns."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[str, int], dict[str, Any]] = {}

    def post(self, trial: str, stage: int, verdict: dict[str, Any]) -> None:
        """Publish a verdict; the first one for a stage stands."""
        self._verdicts.setdefault((trial, stage), verdict)

    def ask(self, trial: str, stage: int) -> dict[str, Any] | None:
        """The verdict, or None while the scheduler has not decided."""
        return self._verdicts.get((trial, stage))


def make_board(name: str) -> Any:
    """Start the board in the driver, outside every placement group."""
    actor = ray.remote(DecisionBoard)
    return actor.options(name=name, namespace=NAMESPACE, num_cpus=0, scheduling_strategy="DEFAULT").remote()


def await_verdict(name: str, *, trial: str, stage: int) -> dict[str, Any] | None:
    """Wait for the verdict on a stage, as long as the board lives.

    Returns:
        The verdict; None where the board cannot be reached: the trial then goes on by itself.
    """
    pause = _POLL_S[0]
    try:
        board = ray.get_actor(name, namespace=NAMESPACE)
        while True:
            verdict: dict[str, Any] | None = ray.get(board.ask.remote(trial, stage), timeout=BOARD_TIMEOUT_S)
            if verdict is not None:
                return verdict
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_S[1])
    except (ValueError, ray.exceptions.RayError) as error:
        logger.warning("Going on with trial %s after stage %d without a verdict, since the decision board is gone: %s",
                       trial, stage, error)  # fmt: skip
        return None


def close_board(board: Any) -> None:
    """End the board's process."""
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(board)
