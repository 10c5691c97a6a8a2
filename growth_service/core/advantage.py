"""What growing is worth against training on, predicted from forks that were recorded.

The advantage of a step is log(loss of training on / loss of growing first), both trained with all that is left of the
budget and annealed. It is predicted by a line for each kind of step, fitted by least squares on recorded forks
(``benchmarks/decision.py``; ``docs/benchmarks/decision.md`` says what was tried): it rises with the optimiser steps
that the grown network will have seen at the end, with its training targets per parameter, and with the
generalisation gap where the step is one of width.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from growth_service.core.decisions import Reading, SizeAfter
from growth_service.core.steps import Change, Deepen, Widen

LARGEST_GAP = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Where a network would be at the end of the budget, if it took a step now."""

    steps: float
    """Optimiser steps that it will have seen, those before the step too."""
    targets_per_param: float
    """Training targets that it will have seen, per parameter."""
    gap: float
    """Share of the validation loss that the training loss is below it now."""

    @property
    def features(self) -> tuple[float, float, float, float]:
        """Of the line: one, two logarithms, and the gap within [0, 1]."""
        gap = min(max(self.gap, 0.0), LARGEST_GAP)
        return (1.0, math.log(max(self.steps, 1.0)), math.log(max(self.targets_per_param, 1e-9)), gap)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A linear prediction and the spread of what it leaves."""

    weights: tuple[float, float, float, float]
    """Of one, log steps, log targets per parameter, gap."""
    sd: float
    """Root mean square of its errors on workloads that it was not fitted on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantage:
    """Predicted logarithm of the ratio of losses, training on over growing."""

    mean: float
    sd: float

    def lower(self, confidence: float) -> float:
        """What it is above with this probability, were its errors normal."""
        return self.mean - NormalDist().inv_cdf(confidence) * self.sd


LINES: dict[str, Line] = {
    "depth*2": Line(weights=(-0.130, 0.000, 0.032, 0.0), sd=0.08),
    "stack*2": Line(weights=(-0.170, 0.000, 0.040, 0.0), sd=0.09),
    "width*1.5": Line(weights=(-0.202, 0.022, 0.014, 0.107), sd=0.06),
    "width*2": Line(weights=(-0.270, 0.029, 0.020, 0.220), sd=0.07),
}
"""Fitted lines by step, as ``benchmarks/decision.py fit`` prints them."""


def line_for(change: Change) -> Line | None:
    """The line of a step: that of the recorded step of its kind whose factor is nearest; None for other kinds."""
    match change:
        case Deepen(exact=exact):
            return LINES["depth*2" if exact else "stack*2"]
        case Widen(times=times):
            return LINES["width*1.5" if times < math.sqrt(3) else "width*2"]
        case _:
            return None


def outlook(reading: Reading, size: SizeAfter) -> Outlook:
    """Where the network would be at the end of the budget after a step."""
    left = max(0, reading.budget_flops - reading.spent_flops - size.flops)
    targets = reading.targets_seen + left / max(size.flops_per_sample, 1) * reading.targets_per_sample
    gap = (reading.loss_val - reading.loss_train) / reading.loss_val if reading.loss_val > 0 else 0.0
    return Outlook(
        steps=targets / reading.targets_per_step,
        targets_per_param=targets / max(size.params, 1),
        gap=gap,
    )


def advantage(change: Change, at: Outlook) -> Advantage | None:
    """Predicted advantage of a step over training on; None where no such step was recorded."""
    line = line_for(change)
    if line is None:
        return None
    return Advantage(mean=sum(w * f for w, f in zip(line.weights, at.features, strict=True)), sd=line.sd)
