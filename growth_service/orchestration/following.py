"""The door between Ray Tune and the lanes: a Tune function that hands a trial in and passes its records on."""

from typing import Any

import ray
from ray import tune

from growth_service.orchestration.exchange import find_exchange


def follow_trial(config: dict[str, Any]) -> None:
    """Tune trainable: one trial, run by a lane.

    It holds no state: started again, it hears all records from the first one.

    Args:
        config: ``trial`` (a TrialConfig as JSON) and ``exchange`` (its name).
    """
    exchange, trial, heard = find_exchange(config["exchange"]), config["trial"], 0
    while True:
        for metrics in ray.get(exchange.follow.remote(trial["trial"], trial, heard)):
            heard += 1
            tune.report(metrics)
            if metrics["kind"] != "stage":
                return
