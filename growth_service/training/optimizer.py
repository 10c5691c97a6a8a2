"""Optimiser and learning rate of a trial."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn, optim

from growth_service.core.rates import Window, rate_share
from growth_service.errors import UserError
from growth_service.growth.transplant import parameter_groups

DECAY_SHARE = 0.2
"""Share of the budget over which ``wsd`` decays, where a job says nothing else."""


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


class Rates(NamedTuple):
    """Learning rates of one step."""

    old: float
    fresh: float
    """Of parameters that are new in this stage."""


def stage_rates(progress: float, settings: dict[str, Any], *, first: bool, window: Window, scale: float = 1.0) -> Rates:
    """Rates within a stage, by the job's shape of the rate and its policy of warming up again.

    ``whole``: everything warms up at the start of each stage, grown or not, so that comparing schedules is no
    comparing of restarts. ``new``: only what is new in the stage does. ``none``: nothing after the first stage.

    Args:
        progress: Share of the stage's steps done, in [0, 1].
        settings: ``learning_rate``, ``rates``, ``warmup_share``, ``floor_share``, ``decay_share``, ``rewarm`` of the
            job.
        first: Whether it is the first stage, which always warms up.
        window: Part of the trial's budget that the stage covers.
        scale: Of the peak.
    """

    def rate(warm: bool) -> float:
        share = rate_share(
            progress,
            shape=settings.get("rates", "restarts"),
            window=window,
            warmup_share=settings["warmup_share"],
            floor_share=settings["floor_share"],
            decay_share=settings.get("decay_share", DECAY_SHARE),
            warm=warm,
        )
        return float(settings["learning_rate"] * scale * share)

    match settings.get("rewarm", "whole"):
        case "none":
            return Rates(old=rate(first), fresh=rate(first))
        case "new":
            return Rates(old=rate(first), fresh=rate(True))
        case _:
            return Rates(old=rate(True), fresh=rate(True))


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
