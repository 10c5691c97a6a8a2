"""Joint growth of depth, width and data: by what the rest of the budget buys, or by certificates alone."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from growth_service.core.policies import BudgetAware, SignalGuided
from growth_service.core.schedule import GrowthSchedule
from growth_service.core.steps import Axis, Inner
from growth_service.core.units import parse_quantity
from search_spaces.start import Factor, Start


def joint(
    start: Start,
    *,
    axes: tuple[Literal["depth", "stream", "data"], ...] = ("depth", "stream", "data"),
    width_factors: tuple[Factor, ...] = (1.5, 2.0),
    confidence: Annotated[float, Gt(0), Lt(1)] = 0.55,
    inner: Inner = "copy",
    exact: bool = True,
    look: bool = True,
    look_share: Annotated[float, Gt(0), Lt(1)] = 0.1,
    level: Annotated[float, Gt(0), Lt(0.5)] = 0.05,
    tolerance: str | float | None = None,
    data_factor: Annotated[float, Ge(1.1)] = 2.0,
    passes: Annotated[float, Gt(0)] = 1.0,
) -> GrowthSchedule:
    """Grow depth, width or data where that promises more than training on with the rest of the budget; else stop.

    What steps promise was fitted on networks that were trained at a steady rate (``training.rates: wsd``). Where the
    rate decays in every stage (``restarts``), certificates look as if the network were finished, and width is
    overrated.

    Args:
        start: Network and stages.
        axes: What may grow.
        width_factors: Width steps that are considered.
        confidence: Probability with which a step has to beat training on.
        inner: Inner weights of new blocks.
        exact: False: copy output projections too, as plain stacking does.
        look: Whether certificates may end the trial and call for data.
        look_share: Most that a look may cost, as a share of what was spent.
        level: Error level of each look over all candidates.
        tolerance: Smallest gain that keeps a trial going, in nats; None: max(0.01, 2 % of the loss).
        data_factor: Growth of the subset in a data step.
        passes: Passes over the subset after which more data is added.
    """
    order: tuple[Axis, ...] = axes
    policy = BudgetAware(
        axes=order,
        width_factors=width_factors,
        confidence=confidence,
        inner=inner,
        exact=exact,
        look=look,
        look_share=look_share,
        level=level,
        tolerance_nats=None if tolerance is None else parse_quantity(tolerance, dimension="nats"),
        data_factor=data_factor,
        passes=passes,
    )
    return start.schedule(policy)


def certified(
    start: Start,
    *,
    axes: tuple[Literal["depth", "width", "data"], ...] = ("depth", "width", "data"),
    level: Annotated[float, Gt(0), Lt(0.5)] = 0.05,
    tolerance: str | float | None = None,
    units: Annotated[int, Ge(1)] = 8,
    data_factor: Annotated[float, Ge(1.1)] = 2.0,
    inner: Inner = "copy",
    jumpboard: bool = True,
) -> GrowthSchedule:
    """Grow where a certificate says that a gain above ``tolerance`` is certain and transfers; stop where none is left.

    Args:
        start: Network and stages.
        axes: What may grow.
        level: Error level of each look over all candidates.
        tolerance: Smallest gain worth a step, in nats (``"0.1 nats"``); None: max(0.01, 2 % of the loss).
        units: Hidden units in a width step.
        data_factor: Growth of the subset in a data step.
        inner: Inner weights of new blocks.
        jumpboard: Start a new block from one line-searched step.
    """
    order: tuple[Axis, ...] = axes
    policy = SignalGuided(
        axes=order,
        level=level,
        tolerance_nats=None if tolerance is None else parse_quantity(tolerance, dimension="nats"),
        units=units,
        data_factor=data_factor,
        inner=inner,
        jumpboard=jumpboard,
    )
    return start.schedule(policy)


def certified_space(trial: Any) -> dict[str, Any]:
    """Define-by-run space over :func:`certified`: an Optuna trial in, arguments of the builder out.

    Only what is asked for is sampled: the data factor matters only where training starts on a part of the data.
    """
    share = trial.suggest_categorical("data_share", [0.25, 0.5, 1.0])
    arguments: dict[str, Any] = {
        "data_share": share,
        "tolerance": trial.suggest_float("tolerance", 0.02, 0.3, log=True),
        "inner": trial.suggest_categorical("inner", ["random", "copy"]),
        "units": trial.suggest_categorical("units", [8, 16]),
    }
    if share < 1:
        arguments["data_factor"] = trial.suggest_categorical("data_factor", [2.0, 4.0])
    return {"use": "certified"} | arguments


def joint_space(trial: Any) -> dict[str, Any]:
    """Define-by-run space over :func:`joint`: how sure a step has to be, which widths it may take, what it copies."""
    arguments: dict[str, Any] = {
        "confidence": trial.suggest_float("confidence", 0.3, 0.9),
        "inner": trial.suggest_categorical("inner", ["random", "copy"]),
        "data_share": trial.suggest_categorical("data_share", [0.25, 0.5, 1.0]),
    }
    axes = trial.suggest_categorical("axes", ["depth", "stream", "both"])
    arguments["axes"] = ["depth", "stream", "data"] if axes == "both" else [axes, "data"]
    if axes != "depth":
        arguments["width_factors"] = [trial.suggest_categorical("width_factor", [1.25, 1.5, 2.0])]
    return {"use": "joint"} | arguments
