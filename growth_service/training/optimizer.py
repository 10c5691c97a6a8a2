"""Optimiser and learning rate of a trial."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn, optim

from growth_service.errors import UserError
from growth_service.growth.transplant import parameter_groups


def make_optimizer(model: nn.Module, settings: dict[str, Any]) -> optim.Optimizer:
    """SGD with momentum or AdamW over decayed and undecayed parameters.

    Args:
        model: Whose parameters to train.
        settings: ``optimizer``, ``learning_rate``, ``momentum``, ``weight_decay`` of the job.

    Raises:
        UserError: If the optimiser is unknown.
    """
    groups = parameter_groups(model.named_parameters(), weight_decay=settings["weight_decay"])
    match settings["optimizer"]:
        case "sgd":
            return optim.SGD(groups, lr=settings["learning_rate"], momentum=settings["momentum"])
        case "adamw":
            return optim.AdamW(groups, lr=settings["learning_rate"])
        case other:
            raise UserError(f"unknown optimizer {other!r}: use sgd or adamw")


def learning_rate(progress: float, *, peak: float, warmup_share: float, floor_share: float) -> float:
    """Learning rate within one stage: linear warm-up, then half a cosine down to the floor.

    Each stage warms up again, grown or not, so that a comparison of schedules is no comparison of
    restarts. Source: Loshchilov and Hutter 2017, "SGDR" (arXiv:1608.03983), with warm-up.

    Args:
        progress: Share of the stage's steps done, in [0, 1].
        peak: Highest rate.
        warmup_share: Share of the stage for the warm-up, in [0, 1).
        floor_share: Last rate as a share of the peak.
    """
    if progress < warmup_share:
        return peak * (floor_share + (1 - floor_share) * progress / warmup_share)
    down = (progress - warmup_share) / (1 - warmup_share)
    return peak * (floor_share + (1 - floor_share) * 0.5 * (1 + math.cos(math.pi * min(down, 1.0))))


class Rates(NamedTuple):
    """Learning rates of one step."""

    old: float
    fresh: float
    """Of parameters that are new in this stage."""


def stage_rates(progress: float, settings: dict[str, Any], *, first: bool, scale: float = 1.0) -> Rates:
    """Rates within a stage, by the job's policy of warming up again.

    ``whole``: everything warms up at the start of each stage, grown or not, so that comparing schedules is no
    comparing of restarts. ``new``: only what is new in the stage does. ``none``: nothing after the first stage.

    Args:
        progress: Share of the stage's steps done, in [0, 1].
        settings: ``learning_rate``, ``warmup_share``, ``floor_share``, ``rewarm`` of the job.
        first: Whether it is the first stage, which always warms up.
        scale: Of the peak.
    """

    def rate(warmup_share: float) -> float:
        return learning_rate(
            progress,
            peak=settings["learning_rate"] * scale,
            warmup_share=warmup_share,
            floor_share=settings["floor_share"],
        )

    warm, steady = rate(settings["warmup_share"]), rate(0.0)
    match settings.get("rewarm", "whole"):
        case "none":
            return Rates(old=warm, fresh=warm) if first else Rates(old=steady, fresh=steady)
        case "new":
            return Rates(old=warm if first else steady, fresh=warm)
        case _:
            return Rates(old=warm, fresh=warm)


@contextmanager
def fresh_parameters(optimizer: optim.Optimizer, fresh: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, new parameters are in groups of their own, with the settings of those that they joined."""
    fresh = set(fresh)
    plain = list(optimizer.param_groups)
    for group in plain if fresh else ():
        moved = [p for p in group["params"] if p in fresh]
        if moved:
            named = "param_names" in group
            both = list(zip(group["params"], group["param_names"] if named else group["params"], strict=True))
            own = dict(group) | {"params": moved, "fresh": True}
            group["params"] = [p for p, _ in both if p not in fresh]
            if named:
                own["param_names"] = [n for p, n in both if p in fresh]
                group["param_names"] = [n for p, n in both if p not in fresh]
            own["home"] = group
            optimizer.param_groups.append(own)
    try:
        yield
    finally:
        for own in optimizer.param_groups[len(plain) :]:
            home = own["home"]
            home["params"] += own["params"]
            if "param_names" in home:
                home["param_names"] += own["param_names"]
        del optimizer.param_groups[len(plain) :]


def set_learning_rate(optimizer: optim.Optimizer, rates: Rates) -> None:
    """The only line that touches an optimiser's rate."""
    for group in optimizer.param_groups:
        group["lr"] = rates.fresh if group.get("fresh") else rates.old
