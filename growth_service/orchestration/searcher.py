"""Which trial starts next: the listed schedules in order, then Optuna's suggestions in waves.

A suggestion depends on the results of whole earlier waves only, told in their order, and is
written into the study's journal before its trial starts; a resumed study asks the sampler the
same questions again and gets the same answers.
"""

from collections.abc import Sequence
from typing import Any

import optuna
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from growth_service.errors import WorkFailedError
from growth_service.orchestration import live
from growth_service.orchestration.sampling import Known, as_json, fitting, sampler_of
from growth_service.spec import JobSpec
from search_spaces import space
from search_spaces.spaces import Space

_METRICS = {"loss": "loss_val", "flops": "flops"}
_ENTRY = "schedule_entry"
_STUDY = "growth"


def _whole(space: Space) -> Space:
    """The same space, its entry under one key: Ray adds whatever was drawn to what a space returns."""
    return lambda trial: {_ENTRY: space(trial)}


class WaveSuggester:
    """Optuna's define-by-run search, asked and told in waves."""

    def __init__(self, job: JobSpec, *, wave_size: int, known: Sequence[Known] = ()) -> None:
        suggest = job.search.suggest
        assert suggest is not None
        self._wave_size, self._name = wave_size, suggest.space
        names, drawing = [_METRICS[o] for o in suggest.objectives], _whole(space(suggest.space))
        sampler = sampler_of(suggest, wave_size=wave_size)
        storage = optuna.storages.InMemoryStorage()
        self._study = optuna.create_study(
            storage=storage, study_name=_STUDY, sampler=sampler, directions=["minimize"] * len(names)
        )
        self._study.add_trials(fitting(suggest, known))
        self._first = len(self._study.trials)
        self._inner = OptunaSearch(
            space=drawing,
            metric=names if len(names) > 1 else names[0],
            mode=["min"] * len(names) if len(names) > 1 else "min",
            sampler=sampler,
            storage=storage,
            study_name=_STUDY,
        )
        self._asked: list[dict[str, Any]] = []
        self._told = 0
        self._results: dict[int, dict[str, float]] = {}

    def drawn(self, number: int) -> dict[str, Any]:
        """What the sampler drew for suggestion ``number``: its values by name, and what came of them."""
        return {"params": dict(self._study.trials[self._first + number].params), "arguments": self._asked[number]}

    def tell(self, number: int, loss: float, flops: float = 0.0) -> None:
        """Note loss and compute of suggestion ``number`` (an infinite loss for a failed trial)."""
        self._results[number] = {"loss_val": loss, "flops": flops}

    def ask(self, number: int) -> dict[str, Any] | None:
        """Arguments of suggestion ``number``; None while an earlier wave is unfinished."""
        start_of_wave = number - number % self._wave_size
        if any(k not in self._results for k in range(start_of_wave)):
            return None
        while self._told < start_of_wave:
            result = self._results[self._told]
            self._inner.on_trial_complete(str(self._told), result=result, error=result["loss_val"] == float("inf"))
            self._told += 1
        while len(self._asked) <= number:
            config = self._inner.suggest(str(len(self._asked)))
            assert isinstance(config, dict)
            self._asked.append(as_json(config[_ENTRY], name=self._name))
        return self._asked[number]


class StudySearcher(Searcher):  # type: ignore[misc]  # Ray's class is untyped
    """Tune's view of the study's list; all state is in the live study of this process."""

    def __init__(self, study_id: str) -> None:
        super().__init__(metric="loss_val", mode="min")
        self._study_id = study_id
        self._names: dict[str, str] = {}

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Metric and mode are ours; there is no Tune space to convert."""
        return True

    def suggest(self, trial_id: str) -> Any:
        """The next trial's configuration, None to wait, FINISHED at the end."""
        study = live.study(self._study_id)
        found = study.next_trial()
        if found is None:
            return Searcher.FINISHED if study.all_started else None
        name, config = found
        self._names[trial_id] = name
        return config

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Results reach the study through the scheduler."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the study's folder is the only state."""

    def restore(self, checkpoint_path: str) -> None:
        """Never used: a study resumes from its folder."""
        raise WorkFailedError("a study resumes from its own folder (growth run --resume), not from Tune's files")
