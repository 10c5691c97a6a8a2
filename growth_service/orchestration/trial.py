"""The only door between Ray Tune and Ray Train: a Tune function that runs one Train run.

All stages of a trial are one Train run, so its workers are started once.
"""

from typing import Any

import ray.train
from ray.train.torch import TorchConfig, TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

from growth_service.orchestration.worker import train_loop

COLLECTIVE_TIMEOUT_S = 6 * 3600
"""Ranks wait for rank 0 while it waits for a verdict, or for a stage that another trial runs; Ray notices dead ones."""


def run_train(config: dict[str, Any]) -> None:
    """Tune trainable: the Train run of one trial.

    Args:
        config: ``trial`` (a TrialConfig as JSON), ``board``, ``storage`` (Train's own files),
            ``resources`` (the job's section as JSON).
    """
    resources = config["resources"]
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"trial": config["trial"], "board": config["board"]},
        torch_config=TorchConfig(backend="gloo", timeout_s=COLLECTIVE_TIMEOUT_S),
        scaling_config=ray.train.ScalingConfig(
            num_workers=resources["workers"], resources_per_worker={"CPU": resources["cpus_per_worker"]}
        ),
        run_config=ray.train.RunConfig(
            name=f"train-{config['trial']['trial']}-{config['attempt']}",
            storage_path=config["storage"],
            callbacks=[TuneReportCallback()],
            failure_config=ray.train.FailureConfig(
                max_failures=resources["max_worker_restarts"], controller_failure_limit=2
            ),
        ),
    )
    trainer.fit()
