"""What growing is worth against training on, predicted from forks that were recorded.

The advantage of a step is log(loss of training on / loss of growing first), both trained with all that is left of the
budget and annealed. It is predicted by a line for each kind of step, fitted by least squares on recorded forks
(``benchmarks/decision.py``; ``docs/benchmarks/decision.md`` says what was tried). It rises with the training targets
that each parameter of the grown network will have seen at the end; for steps of width also with the gain that
certificates predict for a new block, or, where nobody looked, with the generalisation gap.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from growth_service.core.decisions import Reading, SizeAfter
from growth_service.core.steps import Change, Deepen, Widen

LEAST_STEPS = 200
"""Optimiser steps that have to be left after a step of growth: new parts learn nothing in fewer, and no fork had so
few."""
LEAST_TARGETS = 0.05
"""Training targets per parameter at the end below which nothing was recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Where a network would be at the end of the budget, if it took a step now."""

    steps: float
    """Optimiser steps that it will have seen, those before the step too."""
    steps_after: float
    """Those of them that come after the step."""
    targets_per_param: float
    """Training targets that it will have seen, per parameter."""
    gap: float
    """Share of the validation loss that the training loss is below it now."""
    predicted_gain: float | None = None
    """Largest gain that a new block promises to first order, as a share of the validation loss; None: nobody looked."""

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        """Of a line: one, two logarithms, and two shares within [0, 1]."""
        return (
            1.0,
            math.log(max(self.steps, 1.0)),
            math.log(max(self.targets_per_param, 1e-9)),
            _share(self.gap),
            _share(self.predicted_gain or 0.0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A linear prediction and the spread of what it leaves."""

    weights: tuple[float, float, float, float, float]
    """Of one, log steps, log targets per parameter, gap, predicted gain."""
    sd: float
    """Mean absolute error on workloads that it was not fitted on, as the standard deviation of a normal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantage:
    """Predicted logarithm of the ratio of losses, training on over growing."""

    mean: float
    sd: float

    def lower(self, confidence: float) -> float:
        """What it is above with this probability, were its errors normal."""
        return self.mean - NormalDist().inv_cdf(confidence) * self.sd


LINES: dict[str, Line] = {
    "depth*2": Line(weights=(-0.069, 0.0, 0.021, 0.0, 0.0), sd=0.110),
    "stack*2": Line(weights=(-0.121, 0.0, 0.031, 0.0, 0.0), sd=0.165),
    "width*1.5": Line(weights=(-0.147, 0.0, 0.033, 0.0, 0.196), sd=0.094),
    "width*2": Line(weights=(-0.175, 0.0, 0.037, 0.0, 0.285), sd=0.124),
}
"""Fitted lines by step, as ``benchmarks/decision.py fit`` prints them."""
BLIND_LINES: dict[str, Line] = LINES | {
    "width*1.5": Line(weights=(-0.068, 0.0, 0.024, 0.175, 0.0), sd=0.119),
    "width*2": Line(weights=(-0.083, 0.0, 0.029, 0.274, 0.0), sd=0.154),
}
"""The same where nobody looked."""


def line_for(change: Change, *, seeing: bool) -> Line | None:
    """The line of a step: that of the recorded step of its kind whose factor is nearest; None for other kinds."""
    lines = LINES if seeing else BLIND_LINES
    match change:
        case Deepen(exact=exact):
            return lines["depth*2" if exact else "stack*2"]
        case Widen(times=times):
            return lines["width*1.5" if times < math.sqrt(3) else "width*2"]
        case _:
            return None


def outlook(reading: Reading, size: SizeAfter) -> Outlook:
    """Where the network would be at the end of the budget after a step."""
    left = max(0, reading.budget_flops - reading.spent_flops - size.flops)
    after = left / max(size.flops_per_sample, 1) * reading.targets_per_sample
    targets = reading.targets_seen + after
    loss = max(reading.loss_val, 1e-12)
    gains = [c.gain for c in reading.candidates if c.kind == "depth" and not math.isnan(c.gain)]
    return Outlook(
        steps=targets / reading.targets_per_step,
        steps_after=after / reading.targets_per_step,
        targets_per_param=targets / max(size.params, 1),
        gap=(reading.loss_val - reading.loss_train) / loss,
        predicted_gain=max(gains) / loss if gains else None,
    )


def advantage(change: Change, at: Outlook) -> Advantage | None:
    """Predicted advantage of a step over training on; None where nothing like it was recorded."""
    if at.steps_after < LEAST_STEPS or at.targets_per_param < LEAST_TARGETS:
        return None
    line = line_for(change, seeing=at.predicted_gain is not None)
    if line is None:
        return None
    return Advantage(mean=sum(w * f for w, f in zip(line.weights, at.features, strict=True)), sd=line.sd)


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)
