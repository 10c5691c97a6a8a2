r"""What the next FLOP should buy - depth, width, data, a longer look or nothing - and what would change that.

One pure function from measured evidence to an action with its reason and its *unlock*: how many
probe samples, training samples or channels would settle what is open. The order of questions:
is every place saturated, does nothing transfer, is something useful, else is it worth looking longer?
(A long module, so that the table reads in one piece.)

Sources: the decision table follows the test-risk decomposition of Cheng et al. 2026 (arXiv:2605.08297) and the
saturation criterion of Liu et al. 2026 (arXiv:2608.14664); the number of probe samples is derived from the
variance bound of :mod:`growth_service.core.certificate`.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

from growth_service.core.certificate import Verdict

Action = Literal["grow_depth", "widen", "add_data", "probe_more", "train_on", "stop"]

ENOUGH_REALISABLE = 0.5
"""eta from which a block is grown: at least half of the first-order gain survives the sampling noise."""
SMALL_COSINE = 0.5
"""Cosine under which training and held-out gradients point apart: a step along the training direction keeps less
than half of the slope that the held-out data shows. (With independent samples the squared cosine is about eta,
so this is the stricter of the two: it speaks where the network has overfitted its sample.)"""
MAX_PROBE_FACTOR = 64
"""Largest growth of the probe sample that is still called a longer look: six doublings."""
MOST_SAMPLES = 10**15
"""More probe samples than this are none: the estimate lies at the tolerance."""
NEAR_DIAGONAL_SHARE = 0.5
"""Effective rank over channels times features from which the gradient covariance counts as near diagonal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateEvidence:
    """What was measured of one candidate; gains in nats."""

    kind: Literal["depth", "width", "stream"]
    path: str
    """Site of a new block, or path of the block that would get new units."""
    verdict: Verdict
    gain: float
    """Predicted gain of the debiased score."""
    gain_lower: float
    """Its lower limit at level / number of candidates; 0 or less: the score is not certainly positive."""
    gain_upper: float
    """Its upper limit at the level."""
    noise_gain: float
    """Predicted gain of a score one noise standard deviation above zero."""
    transfer_gain: float
    """Held-out gain of the direction that training would take, expected."""
    transfer_upper: float
    """Its upper limit; infinite where no training samples were given."""
    eta: float
    """Share of the gain realisable with the training samples there are, in [0, 1]."""
    half_gain_samples: float
    """Training samples at which eta is one half; infinite where the score is not positive."""
    cosine: float
    """Agreement of training and held-out gradients, in [-1, 1]."""
    snr: float
    """Score over its noise floor."""
    effective_rank: float
    """r_eff of the covariance of whitened cross-gradients, from 1 to ``width * features``."""
    s_train_gain: float
    """Gain predicted on the training objective itself: exact, no sampling error."""
    width: int
    """Channels of the residual stream."""
    features: int
    """Features of the probed block."""
    added_flops: int
    """Forward and backward FLOPs per training sample that the step adds."""
    wide_gain: float | None = None
    """Debiased gain of a much wider probe block; None: not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What is known about a network when the next step is chosen."""

    tolerance_nats: float
    """Smallest gain worth a step."""
    level: float
    """Error level of the limits, in (0, 0.5)."""
    loss_train: float
    loss_heldout: float
    num_probe: int
    """Independent probe samples behind the limits."""
    max_probe: int | None
    """Further probe samples that exist beside those; None: unknown."""
    num_train: int
    """Training samples behind the training direction; 0: none were given, so transfer is unknown."""
    more_train_available: bool
    """Is there training data that is not in use?"""
    candidates: tuple[CandidateEvidence, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlock:
    """What would settle or change the advice; None where a number does not apply or is not known."""

    words: str
    probe_samples: int | None = None
    """Probe samples in all (not: in addition) that would decide at the present estimates."""
    train_samples: int | None = None
    """Training samples in all at which half of the first-order gain is realisable."""
    width: int | None = None
    """Channels of the stream at which the affordable probe samples would decide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One action with its reason in words and numbers."""

    action: Action
    target: str | None
    """Path of the candidate that the action is about; None where it is about the whole network."""
    reason: str
    unlock: Unlock

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def advise(evidence: Evidence) -> Advice:
    """What to do next with a network, from its certificates.

    ==============================================  =================================================
    every candidate saturated                       widen if a wide probe block still gains, else stop;
                                                    data if the held-out loss is far above the training loss
    what training would learn transfers nowhere     data if a held-out gain is certain, else stop
    a useful candidate, realisable and aligned      grow the best transferable gain per FLOP
    a useful candidate, not realisable or aligned   data if there is any, else train on
    anything else                                   probe more if that can decide, else train on
    ==============================================  =================================================

    Args:
        evidence: Certificates of all candidates, and what else could be had. Their order does not matter.

    Returns:
        The advice. Ties between candidates go to the first path in alphabetical order.
    """
    found = sorted(evidence.candidates, key=lambda c: (c.path, c.kind, repr(c)))
    if not found:
        return Advice(
            action="train_on",
            target=None,
            reason="no site was probed",
            unlock=Unlock(words="probe the places where a block could go"),
        )
    open_ = [c for c in found if c.verdict != "saturated"]
    if not open_:
        return _all_saturated(evidence, found)
    moving = [c for c in open_ if evidence.num_train == 0 or c.transfer_upper >= evidence.tolerance_nats]
    if not moving:
        return _nothing_transfers(evidence, found, open_)
    useful = [c for c in found if c.verdict == "useful"]
    if useful:
        return _some_useful(evidence, useful)
    return _undetermined(evidence, moving)


def _all_saturated(evidence: Evidence, found: Sequence[CandidateEvidence]) -> Advice:
    """No block of this family helps: a larger family, the gap to the training loss, or the end."""
    tol = evidence.tolerance_nats
    highest = max(found, key=lambda c: c.gain_upper)
    finding = (
        f"at all {len(found)} candidates the predicted gain is below the tolerance of {tol:.3g} nats "
        f"(largest upper limit {highest.gain_upper:.3g} at {highest.path})"
    )
    wide_gain, widest = _widest(found)
    if wide_gain > tol:
        return Advice(
            action="widen",
            target=widest.path,
            reason=f"the block family is too small: {finding}, but a much wider probe block at {widest.path} would "
            f"gain {wide_gain:.3g} nats where {widest.features} features gain {widest.gain:.3g}",
            unlock=Unlock(words=f"a certificate of blocks with more than {widest.features} features"),
        )
    gap = evidence.loss_heldout - evidence.loss_train
    losses = f"held-out loss {evidence.loss_heldout:.4g}, training loss {evidence.loss_train:.4g}"
    if gap <= tol:
        beyond = "curvature, a wider stream and other block families are not excluded"
        checked = "" if math.isfinite(wide_gain) else "; a much wider probe block was not measured and would tell"
        fitted = _training_objective(evidence, found)
        return Advice(
            action="stop",
            target=None,
            reason=f"saturated: {finding}, and no gap between the losses is left to close ({losses}); {fitted}",
            unlock=Unlock(words=f"first-order saturated under this protocol: {beyond}{checked}"),
        )
    if evidence.more_train_available:
        return Advice(
            action="add_data",
            target=None,
            reason=f"saturated: {finding}, and what is left is a gap of {gap:.3g} nats ({losses}) that "
            "more training samples can close and a block cannot",
            unlock=Unlock(words=f"training samples until the gap is at most {tol:.3g} nats"),
        )
    return Advice(
        action="stop",
        target=None,
        reason=f"saturated: {finding}; the gap of {gap:.3g} nats ({losses}) asks for data and none is left",
        unlock=Unlock(words="new training samples, or regularisation, to close the gap"),
    )


def _nothing_transfers(
    evidence: Evidence, found: Sequence[CandidateEvidence], open_: Sequence[CandidateEvidence]
) -> Advice:
    """What training would learn does not help held-out samples: data where these hold a certain gain, else stop."""
    tol = evidence.tolerance_nats
    leading = max(open_, key=lambda c: c.transfer_upper)
    finding = (
        f"no transferable gain: at all {len(found)} candidates what training would learn moves the held-out loss "
        f"by less than the tolerance of {tol:.3g} nats (largest upper limit {leading.transfer_upper:.3g} at "
        f"{leading.path})"
    )
    certain = max(found, key=lambda c: c.gain_lower)
    if certain.gain_lower > tol:
        samples = _training_samples(certain)
        held_out = f"held-out samples hold a gain of at least {certain.gain_lower:.3g} nats at {certain.path}"
        unlock = Unlock(train_samples=samples, words=_training_samples_in_words(samples, certain, evidence))
        if evidence.more_train_available:
            return Advice(
                action="add_data",
                target=certain.path,
                reason=f"{finding}, while {held_out}: samples that the network has not seen would teach it",
                unlock=unlock,
            )
        return Advice(
            action="stop", target=None, reason=f"{finding}; {held_out}, but no training data is left", unlock=unlock
        )
    needed = [n for c in open_ if c.gain > tol and (n := _probe_samples(c, evidence)) is not None]
    samples = min(needed, default=None)
    unlocking = "a held-out gain that is certain above the tolerance would call for data"
    if samples is not None:
        unlocking += f": about {samples} probe samples would show it"
    wide_gain, widest = _widest(found)
    if wide_gain > tol:
        unlocking += (
            f"; a much wider probe block would gain {wide_gain:.3g} nats at {widest.path}: were all candidates "
        )
        unlocking += "certainly saturated, this would call for width"
    return Advice(
        action="stop",
        target=None,
        reason=f"{finding}, and no gain on held-out samples is certain above it (largest lower limit "
        f"{certain.gain_lower:.3g} at {certain.path}); {_training_objective(evidence, found)}",
        unlock=Unlock(probe_samples=samples, words=unlocking),
    )


def _some_useful(evidence: Evidence, useful: Sequence[CandidateEvidence]) -> Advice:
    """A gain is certain: grow the best per FLOP, or data where training could not realise it."""
    tol, is_known = evidence.tolerance_nats, evidence.num_train > 0

    def worth(c: CandidateEvidence) -> float:
        return (c.transfer_gain if is_known else c.gain) / max(c.added_flops, 1)

    transferable = [
        c for c in useful if (c.transfer_gain if is_known else c.gain) > 0 and not (is_known and c.transfer_upper < tol)
    ]
    best = max(transferable or useful, key=worth)
    moved = f"transferable {best.transfer_gain:.3g}" if is_known else "transfer unknown without training samples"
    finding = (
        f"useful at {best.path}: predicted gain at least {best.gain_lower:.3g} nats > tolerance {tol:.3g}, {moved}, "
        f"best per FLOP of {len(useful)} useful candidates"
    )
    doubt = None
    if is_known and best.eta < ENOUGH_REALISABLE:
        doubt = f"only {best.eta:.0%} of it is realisable with {evidence.num_train} training samples"
    elif not transferable:
        doubt = f"training would not move towards it (upper limit of what transfers {best.transfer_upper:.3g} nats)"
    elif is_known and best.cosine < SMALL_COSINE:
        doubt = f"training and held-out gradients point apart (cosine {best.cosine:.2f})"
    if doubt is None:
        return Advice(
            action="grow_depth" if best.kind == "depth" else "widen",  # units, or channels of the stream
            target=best.path,
            reason=finding,
            unlock=Unlock(words="nothing: the gain is certain, and training can realise it"),
        )
    samples = _training_samples(best)
    unlock = Unlock(train_samples=samples, words=_training_samples_in_words(samples, best, evidence))
    if evidence.more_train_available:
        return Advice(
            action="add_data", target=best.path, reason=f"{finding}, but {doubt}: add data first", unlock=unlock
        )
    return Advice(
        action="train_on",
        target=None,
        reason=f"{finding}, but {doubt} and no training data is left: train on as it is",
        unlock=unlock,
    )


def _undetermined(evidence: Evidence, undecided: Sequence[CandidateEvidence]) -> Advice:
    """Limits on both sides of the tolerance: look longer where that decides, else train on."""
    tol = evidence.tolerance_nats
    needed = [(_probe_samples(c, evidence), c) for c in undecided]
    reachable = [(n, c) for n, c in needed if n is not None]
    above = [(n, c) for n, c in reachable if c.gain > tol]
    if above:  # one useful candidate decides
        samples, deciding = min(above, key=lambda pair: pair[0])
    elif len(reachable) == len(needed):  # all have to fall below the tolerance
        samples, deciding = max(reachable, key=lambda pair: pair[0])
    else:
        samples, deciding = None, next(c for n, c in needed if n is None)
    finding = (
        f"undetermined at {deciding.path}: the predicted gain of {deciding.gain:.3g} nats has limits "
        f"{deciding.gain_lower:.3g} and {deciding.gain_upper:.3g} around the tolerance of {tol:.3g} "
        f"(signal to noise {deciding.snr:.2g} with {evidence.num_probe} probe samples)"
    )
    if samples is None:
        return Advice(
            action="train_on",
            target=None,
            reason=f"{finding}, and an estimate at the tolerance itself is decided by no number of samples: train on",
            unlock=Unlock(words="another tolerance, or a signal that changes with training"),
        )
    affordable = MAX_PROBE_FACTOR * evidence.num_probe
    limit = f"{MAX_PROBE_FACTOR} times the present ones"
    if evidence.max_probe is not None and evidence.num_probe + evidence.max_probe < affordable:
        affordable = evidence.num_probe + evidence.max_probe
        limit = f"the {affordable} that exist"
    if samples <= affordable:
        side = "above" if deciding.gain > tol else "below"
        return Advice(
            action="probe_more",
            target=deciding.path,
            reason=f"{finding}; about {samples} probe samples in all would settle that it is {side}",
            unlock=Unlock(probe_samples=samples, words=f"about {samples} probe samples in all"),
        )
    return Advice(
        action="train_on",
        target=None,
        reason=f"{finding}; about {samples} probe samples would decide, more than {limit}: train on",
        unlock=_out_of_reach(deciding, samples=samples, affordable=affordable),
    )


def _out_of_reach(deciding: CandidateEvidence, *, samples: int, affordable: int) -> Unlock:
    r"""The width at which the affordable samples would decide, where the covariance is near diagonal.

    The signal-to-noise ratio is :math:`(n/\sqrt 2)(S/\mathrm{tr}\,C)\sqrt{r_{eff}}`, with :math:`r_{eff}` about k
    times that of the activation gradients. Where their covariance is near diagonal it grows like the width d at
    equal signal per channel, so a factor m in samples is worth a factor :math:`m^2` in width; with correlated channels
    it stays, and width buys nothing.
    """
    full_rank = deciding.width * deciding.features
    rank = f"effective rank {deciding.effective_rank:.3g} of {full_rank}"
    if deciding.effective_rank < NEAR_DIAGONAL_SHARE * full_rank:
        return Unlock(
            probe_samples=samples,
            words=f"about {samples} probe samples; width would not help, the gradient covariance is far from "
            f"diagonal ({rank})",
        )
    width = math.ceil(deciding.width * (samples / affordable) ** 2)
    return Unlock(
        probe_samples=samples,
        width=width,
        words=f"about {samples} probe samples, or {affordable} at a stream of {width} channels: the gradient "
        f"covariance is near diagonal ({rank}), so the signal to noise grows like the root of the width",
    )


def required_probe_samples(
    *,
    gain: float,
    gain_lower: float,
    gain_upper: float,
    noise_gain: float,
    tolerance_nats: float,
    level: float,
    num_candidates: int,
    num_probe: int,
) -> int | None:
    r"""Probe samples at which the limits of a gain would decide against the tolerance.

    A gain is :math:`c\sqrt S`, so squared gains are scores in other units. With :math:`g` the squared gain of the
    point estimate, :math:`\tau` the squared tolerance and :math:`s` the squared noise gain (the standard deviation
    of the squared gain where there is no signal, which falls like 1/n), the limits of
    :class:`~growth_service.core.certificate.UStatistic` lie at distances w from g with

    .. math:: w_{up}^2 = a\,(g + w_{up}) + b,\qquad w_{low}^2 = A + B,

    where :math:`b = z^2 s^2` and :math:`B = z_J^2 s^2` fall like :math:`1/n^2` (noise alone), and a and A like 1/n
    (noise times signal); z and z_J are the normal quantiles of the level and of level / candidates. At the present
    n the limits give a and A. A lower limit of zero hides A; the variance bound behind the upper limit then
    gives :math:`A = a\,g\,(z_J/z)^2`, and at least what the hidden limit implies. With m times the samples and
    :math:`W = |g - \tau|` the distance to bridge:

    .. math:: g < \tau:\ W^2 = \frac{a\tau}{m} + \frac{b}{m^2},\qquad g > \tau:\ W^2 = \frac Am + \frac B{m^2},

    both solved by :math:`m = (q + \sqrt{q^2 + 4 W^2 r}) / (2 W^2)` for q/m + r/m^2. (Derived here. The point estimate
    is taken to stay where it is, and the p-value to follow the lower limit. Limits by Student's quantiles, from few
    rows, make the answer a little too large.)

    Args:
        gain: Predicted gain of the debiased score, nats; negative counts as zero.
        gain_lower: Its lower limit at level / candidates; 0 or less where the score is not certainly positive.
        gain_upper: Its upper limit at the level, >= gain. (Where it was capped at the loss the answer is too small.)
        noise_gain: Predicted gain of a score one noise standard deviation above zero, >= 0.
        tolerance_nats: The tolerance, > 0.
        level: Error level, in (0, 0.5).
        num_candidates: Candidates looked at together, >= 1.
        num_probe: Samples behind these limits, >= 1.

    Returns:
        Samples in all, at least ``num_probe``; None where no number decides: a gain at the tolerance itself (or
        so close to it that more than ``MOST_SAMPLES`` would be needed).

    Raises:
        ValueError: If the level is outside its range.
    """
    if not 0 < level < 0.5:
        raise ValueError(f"level {level} must be in (0, 0.5)")
    z, z_each = (NormalDist().inv_cdf(1 - p) for p in (level, level / num_candidates))
    g, tau, noise = max(gain, 0.0) ** 2, tolerance_nats**2, noise_gain**2
    distance_sq = (g - tau) ** 2
    if distance_sq == 0:
        return None
    above = gain_upper**2
    a = max(0.0, ((above - g) ** 2 - (z * noise) ** 2) / above) if above > 0 else 0.0
    if g < tau:
        linear, square = a * tau, (z * noise) ** 2
    else:
        square = (z_each * noise) ** 2
        bridged_sq = (g - max(gain_lower, 0.0) ** 2) ** 2
        linear = max(0.0, bridged_sq - square)
        if gain_lower <= 0:
            linear = max(linear, a * g * (z_each / z) ** 2)
    factor = (linear + math.sqrt(linear**2 + 4 * distance_sq * square)) / (2 * distance_sq)
    wanted = num_probe * factor
    return max(num_probe, math.ceil(wanted * (1 - 1e-12))) if wanted <= MOST_SAMPLES else None


def _probe_samples(c: CandidateEvidence, evidence: Evidence) -> int | None:
    """More samples than there are now, as the candidate is not decided yet."""
    samples = required_probe_samples(
        gain=c.gain,
        gain_lower=c.gain_lower,
        gain_upper=c.gain_upper,
        noise_gain=c.noise_gain,
        tolerance_nats=evidence.tolerance_nats,
        level=evidence.level,
        num_candidates=len(evidence.candidates),
        num_probe=evidence.num_probe,
    )
    return None if samples is None else max(samples, evidence.num_probe + 1)


def _widest(found: Sequence[CandidateEvidence]) -> tuple[float, CandidateEvidence]:
    """Largest gain of a wide probe block and where; minus infinity where none was measured."""
    return max(((-math.inf if c.wide_gain is None else c.wide_gain, c) for c in found), key=lambda pair: pair[0])


def _training_objective(evidence: Evidence, found: Sequence[CandidateEvidence]) -> str:
    """What a block could still do on the training samples alone."""
    steepest = max(found, key=lambda c: c.s_train_gain)
    if steepest.s_train_gain > evidence.tolerance_nats:
        return f"a block could still fit {steepest.s_train_gain:.3g} nats of the training sample at {steepest.path}"
    return "the training objective is saturated too"


def _training_samples_in_words(samples: int | None, c: CandidateEvidence, evidence: Evidence) -> str:
    if samples is None:
        return f"training samples that the network has not fitted yet, until the cosine reaches {SMALL_COSINE:g}"
    now = f"about {samples} training samples in all (now {evidence.num_train})"
    return f"{now}: half of the gain at {c.path} is then realisable"


def _training_samples(c: CandidateEvidence) -> int | None:
    """Training samples at which eta reaches one half; None where it is not below that, so not what is missing."""
    if c.eta >= ENOUGH_REALISABLE or not math.isfinite(c.half_gain_samples):
        return None
    return math.ceil(c.half_gain_samples)
