"""How Optuna samples a space of schedules. Knows no Ray."""

import json
import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import optuna

from growth_service.core.streams import stream_seed
from growth_service.errors import UserError
from growth_service.orchestration.plan import suggested_trial
from growth_service.spec import JobSpec, SuggestSpec
from search_spaces import space
from search_spaces.spaces import grid_of

logger = logging.getLogger(__name__)
optuna.logging.set_verbosity(optuna.logging.WARNING)  # it tells of each study that it makes
REHEARSALS = 16
"""Draws from a space that are resolved before anything starts."""


def sampler_of(suggest: SuggestSpec, *, wave_size: int) -> optuna.samplers.BaseSampler:
    """The sampler that a job asks for.

    Raises:
        UserError: If a grid is asked for where there is none, or for more trials than it has.
    """
    match suggest.sampler:
        case "random":
            return optuna.samplers.RandomSampler(seed=suggest.seed)
        case "grid":
            if isinstance(suggest.space, str):
                raise UserError("search.suggest: sampler grid needs the space as a mapping of choices, not a function")
            choices = grid_of(suggest.space)
            size = math.prod(len(values) for values in choices.values())
            if suggest.trials > size:
                raise UserError(f"search.suggest.trials {suggest.trials} is more than the {size} points of the grid")
            return optuna.samplers.GridSampler(choices, seed=suggest.seed)
        case _:
            return optuna.samplers.TPESampler(seed=suggest.seed, n_startup_trials=wave_size)


def rehearse_space(job: JobSpec) -> None:
    """Draw from the job's space and resolve what comes: a space that yields illegal schedules shows here.

    Raises:
        UserError: Naming the argument that is wrong.
    """
    suggest = job.search.suggest
    if suggest is None:
        return
    drawing = space(suggest.space)
    sampler_of(suggest, wave_size=1)
    study = optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=stream_seed(suggest.seed, "rehearsal") % 2**32)
    )
    for number in range(min(REHEARSALS, 4 * suggest.trials)):
        arguments = _drawn(drawing, study.ask(), suggest.space)
        suggested_trial(job, index=number, arguments=arguments)


def _drawn(drawing: Any, trial: optuna.Trial, name: Any) -> dict[str, Any]:
    try:
        arguments = drawing(trial)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"search.suggest.space: {name} failed ({type(error).__name__}: {error})") from error
    return as_json(arguments, name=name)


class Known(NamedTuple):
    """A point of the space whose objectives are known from an earlier study."""

    drawn: dict[str, Any]
    """``{"params": what was drawn, by name, "arguments": the schedule entry that came of it}``."""
    values: list[float]


def known_points(suggest: SuggestSpec, points: Sequence[dict[str, Any]]) -> list[Known]:
    """Points of earlier studies, with the objectives of this one.

    Args:
        suggest: What is searched for.
        points: ``tracking.mlflow_reader.EarlierPoint`` as JSON.
    """
    return [Known(p["drawn"], [float(p[objective]) for objective in suggest.objectives]) for p in points]


def fitting(suggest: SuggestSpec, known: Sequence[Known]) -> list[optuna.trial.FrozenTrial]:
    """The known points as trials of the space as it is now.

    A point whose values are outside the space, or would give another schedule entry now, is left out.
    """
    drawing, found = space(suggest.space), []
    for point in known:
        trial = optuna.trial.FixedTrial(point.drawn["params"])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a value outside its range is a warning there
                arguments = as_json(drawing(trial), name=suggest.space)
        except Exception as error:  # noqa: BLE001  # the space is the user's own
            logger.info("An earlier suggestion %s does not fit the space: %s", point.drawn, error)
            continue
        if arguments == point.drawn["arguments"]:
            values, kinds = trial.params, trial.distributions
            found.append(optuna.trial.create_trial(params=values, distributions=kinds, values=point.values))
    return found


def as_json(arguments: Any, *, name: Any) -> dict[str, Any]:
    """A suggestion as the study's journal gives it back.

    Raises:
        UserError: If it is no mapping with ``use``, or has values that JSON cannot hold.
    """
    if not isinstance(arguments, dict) or not isinstance(arguments.get("use"), str):
        raise UserError(f"search.suggest.space: {name} must return a mapping with use, got {arguments!r}")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(arguments))
    except (TypeError, ValueError) as error:
        raise UserError(f"search.suggest.space: {name} returns values that are not plain: {error}") from error
    return plain
