"""Growth schedules and spaces as data and small functions.

The library ships mechanisms; what is grown when is picked here. A job file names a builder
(``use: joint``) and its arguments; :func:`resolve` turns the entry into a value. A builder takes a
:class:`~search_spaces.start.Start`, from the keys that all entries have, and annotated arguments of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from growth_service.core.schedule import GrowthSchedule
from growth_service.errors import GrowthError, UserError
from growth_service.spec import JobSpec, ScheduleEntry, SearchSpec, call_checked
from search_spaces.baselines import (
    compound,
    data_only,
    depth_only,
    fixed,
    one_shot_late,
    scratch,
    stacking,
    width_only,
)
from search_spaces.joint import certified, certified_space, joint, joint_space
from search_spaces.loading import found
from search_spaces.spaces import Space, space_from_mapping
from search_spaces.start import Share, Sizes, Start
from search_spaces.triggered import ag_plateau, plateau, random_site, tokens_per_param

_BUILDERS: tuple[Callable[..., GrowthSchedule], ...] = (
    scratch,
    depth_only,
    width_only,
    data_only,
    compound,
    one_shot_late,
    stacking,
    fixed,
    plateau,
    ag_plateau,
    tokens_per_param,
    random_site,
    certified,
    joint,
)
BUILDERS: dict[str, Callable[..., GrowthSchedule]] = {builder.__name__: builder for builder in _BUILDERS}
"""Schedule builders that ``use:`` may name."""

SPACES: dict[str, Callable[[Any], dict[str, Any]]] = {"joint_space": joint_space, "certified_space": certified_space}
"""Define-by-run spaces that ``suggest.space`` may name: Optuna trial in, schedule entry out."""


def resolve(entry: ScheduleEntry, *, search: SearchSpec, where: str = "schedule") -> GrowthSchedule:
    """Build the schedule of one entry of a job file, on the stages of its search.

    Raises:
        UserError: If the builder is unknown or an argument is wrong; names what is allowed.
    """
    builder = found(BUILDERS, entry.use, where=where, what="schedule builder")
    where = f"{where} ({entry.use})"

    def start(*, blocks: Sizes, hidden: Sizes, widths: Sizes | None = None, data_share: Share | None = None) -> Start:
        return Start(
            name=entry.name,
            num_stages=search.num_stages,
            shares=search.shares,
            blocks=blocks,
            hidden=hidden,
            widths=widths,
            data_share=data_share,
        )

    try:
        schedule = call_checked(builder, entry.arguments, first=start, where=where)
    except GrowthError:
        raise
    except Exception as error:
        raise UserError(f"{where}: it failed ({type(error).__name__}: {error})") from error
    if not isinstance(schedule, GrowthSchedule):
        raise UserError(f"{where}: {entry.use} must return a GrowthSchedule, got a {type(schedule).__name__}")
    if schedule.num_stages != search.num_stages:
        raise UserError(
            f"{where}: its schedule has {schedule.num_stages} stages, search.stages says {search.num_stages}"
        )
    return replace(schedule, name=entry.name)


def listed_schedules(job: JobSpec) -> list[GrowthSchedule]:
    """All schedules that a job lists, in order.

    Raises:
        UserError: As :func:`resolve`.
    """
    return [
        resolve(entry, search=job.search, where=f"search.schedules.{i}") for i, entry in enumerate(job.search.schedules)
    ]


def space(asked: str | Mapping[str, Any]) -> Space:
    """The space that a job asks for: a name, ``package.module:function``, or a mapping.

    Raises:
        UserError: If it is unknown, cannot be imported, or is no space.
    """
    if isinstance(asked, str):
        return found(SPACES, asked, where="search.suggest.space", what="space")
    return space_from_mapping(asked, where="search.suggest.space")
