"""Knobs of running on Ray, each an environment variable with a default, and what workers inherit."""

import os

HEALTH_CHECK_INTERVAL_S_ENV_VAR = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
DEFAULT_HEALTH_CHECK_INTERVAL_S: float = 0.1
"""How often Train polls its workers: how soon a dead one is noticed (2 s by Ray's default)."""

START_TIMEOUT_S_ENV_VAR = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
DEFAULT_START_TIMEOUT_S: float = 180.0
"""How long workers may take to start; on a busy machine of two cores a minute is not enough."""

DRIVER_MEMORY_BYTES = 400 * 2**20
"""A trial's Tune process asks for memory and no CPU, so that it never takes a worker's place."""


def worker_environment() -> dict[str, str]:
    """Environment of every process of a study; values that are set already win."""
    defaults = {
        "OMP_NUM_THREADS": "1",
        HEALTH_CHECK_INTERVAL_S_ENV_VAR: str(DEFAULT_HEALTH_CHECK_INTERVAL_S),
        START_TIMEOUT_S_ENV_VAR: str(DEFAULT_START_TIMEOUT_S),
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_METRICS_ENABLED": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "RAY_AIR_NEW_OUTPUT": "0",
        "TUNE_GLOBAL_CHECKPOINT_S": "3600",
        "MLFLOW_RUN_ID": "",
    }
    return {name: os.environ.get(name, value) for name, value in defaults.items()}
