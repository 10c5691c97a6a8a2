"""Learning curves that nobody trained, with what makes real ones hard to judge early.

A loss falls as a power of compute to a floor; some trials grow, which costs at first and lowers the floor; the rate
decays at the end, which takes off a share that no earlier loss shows; and every loss is noisy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHARES = (1 / 64, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Ranges of what trials of a study may be like."""

    num_trials: int = 12
    shares: tuple[float, ...] = SHARES
    """Of the budget, one a stage."""
    floor: tuple[float, float] = (0.1, 1.5)
    """Nats, of the study; trials differ by up to 30 % of it."""
    exponent: tuple[float, float] = (0.1, 0.7)
    excess: tuple[float, float] = (0.2, 2.0)
    """Loss above the floor at the full budget, over the floor."""
    grows: float = 0.5
    """Share of trials that grow, once."""
    anneal: tuple[float, float] = (0.0, 0.25)
    """Share of the loss that the decay at the end takes off; the same for all trials up to a tenth of it."""
    noise: tuple[float, float] = (0.002, 0.02)
    """Relative standard deviation of one loss."""


def synthetic_trials(rng: np.random.Generator, scenario: Scenario) -> NDArray[np.float64]:
    """Losses of the trials of one study after each stage. ``[trials, stages]``, in nats."""
    ends = np.cumsum(scenario.shares)
    floor, noise, anneal = (rng.uniform(*r) for r in (scenario.floor, scenario.noise, scenario.anneal))
    losses = np.empty((scenario.num_trials, len(ends)))
    for trial in range(scenario.num_trials):
        losses[trial] = _curve(rng, scenario, ends, floor * rng.uniform(0.85, 1.15))
        losses[trial, -1] *= 1 - anneal * rng.uniform(0.9, 1.1)
    return losses * np.exp(noise * rng.standard_normal(losses.shape))


def _curve(
    rng: np.random.Generator, scenario: Scenario, ends: NDArray[np.float64], floor: float
) -> NDArray[np.float64]:
    """One curve without noise and decay."""
    exponent = rng.uniform(*scenario.exponent)
    excess = floor * rng.uniform(*scenario.excess)
    curve = floor + excess * ends**-exponent
    if rng.random() < scenario.grows:
        at = int(rng.integers(0, len(ends) - 1))
        lower = floor * rng.uniform(0.6, 1.0)
        steeper = exponent * rng.uniform(0.8, 1.5)
        scale = (curve[at] - lower) * ends[at] ** steeper * rng.uniform(0.95, 1.15)
        curve[at + 1 :] = lower + scale * ends[at + 1 :] ** -steeper
    return np.asarray(np.minimum(curve, 5.0 * floor + excess), dtype=np.float64)
