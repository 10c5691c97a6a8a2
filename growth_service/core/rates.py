"""The learning rate as a function of how much of a trial is done: pure, in shares of the peak.

Three shapes. ``restarts``: every stage warms up and decays by a cosine, so each ends annealed. ``wsd``: warm up,
stay, and decay over the last share of the budget (warmup-stable-decay, Hu et al. 2024, arXiv:2404.06395); until the
decay begins, trials of different budgets are the same trial, and growing happens at the full rate. ``cosine``: one
half cosine over the whole budget.
"""

import math
from typing import Literal, NamedTuple

from growth_service.errors import UserError

Shape = Literal["restarts", "wsd", "cosine"]
Rewarm = Literal["whole", "new", "none"]


class Window(NamedTuple):
    """The part of a trial's budget that a stage covers, both in [0, 1]."""

    start: float
    end: float


def rate_share(
    progress: float,
    *,
    shape: Shape,
    window: Window,
    warmup_share: float,
    floor_share: float,
    decay_share: float,
    warm: bool,
) -> float:
    """Learning rate as a share of the peak, at one moment of a stage.

    Args:
        progress: Share of the stage's steps done, in [0, 1].
        shape: Of the rate over the trial.
        window: Of the stage.
        warmup_share: Share of the stage over which a warm-up rises linearly from the floor, in [0, 1).
        floor_share: Lowest rate, in [0, 1].
        decay_share: Share of the budget over which ``wsd`` decays linearly, in (0, 1].
        warm: Whether this stage warms up.

    Raises:
        UserError: If the shape is unknown.
    """
    rising = progress / warmup_share if warm and progress < warmup_share else 1.0
    match shape:
        case "restarts":  # Loshchilov and Hutter 2017, "SGDR" (arXiv:1608.03983), with warm-up
            begun = warmup_share if warm else 0.0
            height = _half_cosine((progress - begun) / (1 - begun)) if progress >= begun else 1.0
        case "wsd":
            height = min(1.0, (1 - _done(progress, window)) / decay_share)
        case "cosine":
            height = _half_cosine(_done(progress, window))
        case other:
            raise UserError(f"unknown shape of the learning rate {other!r}: use restarts, wsd or cosine")
    return floor_share + (1 - floor_share) * height * rising


def decaying_window(shape: Shape, window: Window, *, decay_share: float) -> list[float]:
    """What of a stage's window its rates depend on: nothing where the rate is the same for every budget.

    Two stages that start from the same network and agree on this train alike.
    """
    if shape == "restarts" or (shape == "wsd" and window.end <= 1 - decay_share):
        return []
    return list(window)


def _done(progress: float, window: Window) -> float:
    return window.start + (window.end - window.start) * progress


def _half_cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(max(done, 0.0), 1.0)))
