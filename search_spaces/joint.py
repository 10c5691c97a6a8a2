"""Joint growth of depth, width and data, guided by certificates."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from growth_service.core.policies import SignalGuided
from growth_service.core.schedule import GrowthSchedule, InitialSize
from growth_service.core.steps import Axis, Inner
from growth_service.core.units import parse_quantity
from search_spaces.baselines import Share, Shares, Sizes


def joint(
    *,
    name: str,
    num_stages: int,
    shares: Shares = None,
    blocks: Sizes,
    hidden: Sizes,
    widths: Sizes | None = None,
    data_share: Share = 1.0,
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
        name: Of the trial.
        num_stages: Looks are taken after each stage but the last.
        shares: Of the budget, one a stage.
        blocks: Initial residual blocks of each group.
        hidden: Initial hidden units of each group.
        widths: Initial channels of the stream in each group; None: as the model of the job says.
        data_share: Initial share of the training split.
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
    size = InitialSize(blocks=blocks, hidden=hidden, widths=widths, data_share=data_share)
    return GrowthSchedule(name=name, initial=size, policy=policy, num_stages=num_stages, shares=shares)


def joint_space(trial: Any) -> dict[str, Any]:
    """Define-by-run space over joint schedules: an Optuna trial in, arguments of :func:`joint` out.

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
    return {"use": "joint"} | arguments
