"""Spaces of schedules: define-by-run functions, and mappings in a job file."""

from collections.abc import Callable, Mapping
from typing import Any

from growth_service.errors import UserError

Space = Callable[[Any], dict[str, Any]]
_RANGE = {"low", "high", "log", "step"}


def space_from_mapping(mapping: Mapping[str, Any], *, where: str) -> Space:
    """The space of a mapping: a list is a choice, ``{low: ..., high: ...}`` a range, anything else is fixed.

    Args:
        mapping: Arguments of a schedule builder by name, and ``use``. Ranges of whole numbers stay whole; ``log: true``
            and ``step`` as in Optuna. A choice of lists is a list of lists.
        where: Names the place in errors.

    Returns:
        Define-by-run: an Optuna trial in, an entry of a schedule out.

    Raises:
        UserError: If it names no builder, or a range is none.
    """
    if not isinstance(mapping.get("use"), str):
        raise UserError(f"{where}: a space needs use: the name of a schedule builder")
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            _check_range(value, where=f"{where}.{name}")
        elif isinstance(value, list) and not value:
            raise UserError(f"{where}.{name}: a choice needs at least one value")

    def suggest(trial: Any) -> dict[str, Any]:
        return {name: _suggested(trial, name, value) for name, value in mapping.items()}

    return suggest


def grid_of(mapping: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The choices of a mapping by name, for a search of all combinations.

    Raises:
        UserError: If it has ranges: those have no end of values.
    """
    ranges = [name for name, value in mapping.items() if isinstance(value, Mapping)]
    if ranges:
        raise UserError(
            f"search.suggest: a grid needs choices, but {', '.join(ranges)} is a range: list its values, or use "
            "sampler tpe or random"
        )
    return {name: list(range(len(value))) for name, value in mapping.items() if isinstance(value, list)}


def _check_range(value: Mapping[str, Any], *, where: str) -> None:
    low, high = value.get("low"), value.get("high")
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (low, high))
    if not numbers or set(value) - _RANGE or low >= high:  # type: ignore[operator]
        raise UserError(
            f"{where}: a range is {{low: ..., high: ...}} with low below high, and log or step where wanted; got "
            f"{dict(value)}"
        )


def _suggested(trial: Any, name: str, value: Any) -> Any:
    if isinstance(value, list):
        return value[trial.suggest_categorical(name, list(range(len(value))))]  # by index: Optuna takes scalars only
    if not isinstance(value, Mapping):
        return value
    bounds = dict(value)
    low, high = bounds.pop("low"), bounds.pop("high")
    whole = isinstance(low, int) and isinstance(high, int)
    return (trial.suggest_int if whole else trial.suggest_float)(name, low, high, **bounds)
