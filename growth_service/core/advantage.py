"""What growing is worth against training on, predicted from forks that were recorded.

The advantage of a step is log(loss of training on / loss of growing first), both trained with all that is left of the
budget and annealed. It is predicted by a line for each kind of step, fitted by least squares on recorded forks
(``benchmarks/decision.py``; ``docs/benchmarks/decision.md`` says what was tried). It rises with the training targets
that each parameter of the grown network will see after the step. For steps of width the signal decides with it: the
advantage falls with the cosine between what training and held-out data ask of a new block (as long as they agree,
training on has more to gain), and rises with the gain that a block promises to first order. Where nobody looked, the
generalisation gap stands in.
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
"""Training targets per parameter after the step below which next to nothing was recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Where a network would be at the end of the budget, if it took a step now."""

    steps: float
    """Optimiser steps after it, until the budget is spent."""
    targets_per_param: float
    """Training targets after it, per parameter of the grown network."""
    gap: float
    """Share of the validation loss that the training loss is below it now."""
    predicted_gain: float | None = None
    """Largest gain that a new block promises to first order, as a share of the validation loss; None: nobody looked."""
    cosine: float | None = None
    """Largest cosine between the held-out gradient and the direction that training would take; None: nobody looked."""

    @property
    def seeing(self) -> bool:
        """Whether somebody looked."""
        return self.predicted_gain is not None and self.cosine is not None

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        """Of a line: one, a logarithm, and three shares within [0, 1]."""
        return (
            1.0,
            math.log(max(self.targets_per_param, 1e-9)),
            _share(self.gap),
            _share(self.predicted_gain or 0.0),
            _share(self.cosine or 0.0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A linear prediction and the spread of what it leaves."""

    weights: tuple[float, float, float, float, float]
    """Of one, log targets per parameter, gap, predicted gain, cosine."""
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
    "depth*2": Line(weights=(-0.068, 0.023, 0.0, 0.0, 0.0), sd=0.130),
    "stack*2": Line(weights=(-0.105, 0.034, 0.0, 0.0, 0.0), sd=0.166),
    "width*1.5": Line(weights=(0.066, 0.028, 0.0, 0.074, -0.241), sd=0.097),
    "width*2": Line(weights=(0.075, 0.042, 0.0, 0.175, -0.330), sd=0.107),
}
"""Fitted lines by step, as ``benchmarks/decision.py fit`` prints them."""
BLIND_LINES: dict[str, Line] = LINES | {
    "width*1.5": Line(weights=(-0.083, 0.034, 0.207, 0.0, 0.0), sd=0.149),
    "width*2": Line(weights=(-0.078, 0.041, 0.289, 0.0, 0.0), sd=0.184),
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


def could_pay(size: SizeAfter, *, left: int, targets_per_sample: int, targets_per_step: int) -> bool:
    """Whether a step can be considered with so many FLOPs left: enough steps and targets for its new parts.

    Args:
        size: The network after the step.
        left: FLOPs of the trial from the moment of the step on.
        targets_per_sample: Predictions in one sample.
        targets_per_step: Predictions in one global batch.
    """
    targets = _targets_after(size, left=left, targets_per_sample=targets_per_sample)
    return targets / targets_per_step >= LEAST_STEPS and targets / max(size.params, 1) >= LEAST_TARGETS


def _targets_after(size: SizeAfter, *, left: int, targets_per_sample: int) -> float:
    return max(0, left - size.flops) / max(size.flops_per_sample, 1) * targets_per_sample


def outlook(reading: Reading, size: SizeAfter) -> Outlook:
    """Where the network would be at the end of the budget after a step."""
    left = reading.budget_flops - reading.spent_flops
    targets = _targets_after(size, left=left, targets_per_sample=reading.targets_per_sample)
    loss = max(reading.loss_val, 1e-12)
    blocks = [c for c in reading.candidates if c.kind == "depth" and not math.isnan(c.gain)]
    return Outlook(
        steps=targets / reading.targets_per_step,
        targets_per_param=targets / max(size.params, 1),
        gap=(reading.loss_val - reading.loss_train) / loss,
        predicted_gain=max(c.gain for c in blocks) / loss if blocks else None,
        cosine=max(c.cosine for c in blocks) if blocks else None,
    )


def advantage(change: Change, at: Outlook) -> Advantage | None:
    """Predicted advantage of a step over training on; None where nothing like it was recorded."""
    if at.steps < LEAST_STEPS or at.targets_per_param < LEAST_TARGETS:
        return None
    line = line_for(change, seeing=at.seeing)
    if line is None:
        return None
    return Advantage(mean=sum(w * f for w, f in zip(line.weights, at.features, strict=True)), sd=line.sd)


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)
