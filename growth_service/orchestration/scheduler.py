"""Tune's scheduler and callback of a study: they pass records on and never stop a trial by force."""

import json
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from growth_service.core.records import FinalRecord, StageRecord
from growth_service.orchestration import live


class SaturationScheduler(FIFOScheduler):  # type: ignore[misc]  # Ray's class is untyped
    """Judges every record and posts the verdict on the exchange.

    The answer to Tune is always CONTINUE: a trial that is pruned or saturated ends by itself, with
    its last checkpoint, and its lane takes the next one.
    """

    def __init__(self, study_id: str) -> None:
        super().__init__()
        self._study_id = study_id

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Hand the record to the live study."""
        take_in(self._study_id, result)
        return str(TrialScheduler.CONTINUE)

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """The last result comes here and not to ``on_trial_result``."""
        take_in(self._study_id, result)


class FailureListener(Callback):  # type: ignore[misc]  # Ray's class is untyped
    """Hears of trials whose work failed for good."""

    def __init__(self, study_id: str) -> None:
        self._study_id = study_id

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Record the failure; Tune names its cause only when the whole run is over."""
        live.study(self._study_id).hear_failure(trial.config["trial"]["trial"], live.UNEXPLAINED)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """A trial that ended without its final record failed silently."""
        name = trial.config["trial"]["trial"]
        study = live.study(self._study_id)
        if name not in study.done:
            take_in(self._study_id, trial.last_result or {})
        if name not in study.done:
            study.hear_failure(name, "it ended without a final record; see its log in Ray's session folder")


def take_in(study_id: str, result: dict[str, Any]) -> None:
    """Read the record out of a Tune result, if it holds one."""
    if "record" not in result:
        return
    data, study = json.loads(result["record"]), live.study(study_id)
    if result["kind"] == "failed":
        study.hear_failure(data["trial"], data["reason"])
    elif result["kind"] == "final":
        study.hear_final(FinalRecord.from_dict(data))
    else:
        study.hear_stage(StageRecord.from_dict(data))
