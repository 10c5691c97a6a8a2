"""Optimiser and learning rate of a trial."""

import math
from typing import Any

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


def set_learning_rate(optimizer: optim.Optimizer, value: float) -> None:
    """The only line that touches an optimiser's rate."""
    for group in optimizer.param_groups:
        group["lr"] = value
