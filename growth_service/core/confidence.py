r"""Limits of a mean that hold for every sample size, however often one looks.

Losses are bounded by truncation, so nothing here assumes a normal law. A limit for one fixed
sample is that of Maurer and Pontil 2009, "Empirical Bernstein Bounds and Sample Variance
Penalization" (arXiv:0907.3740); limits that hold at all sample sizes at once are those of
Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting"
(J. R. Stat. Soc. B 86, arXiv:2010.09686). For rounds of decisions on one sample the error level
is spent over the rounds.

Shape legend: N = independent samples.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from growth_service.core.score import FloatArray

LARGEST_BET = 0.5
"""c, the cap of the bets of :func:`confidence_sequence`; 1/2 as in the source."""


def empirical_bernstein_upper(differences_N: FloatArray, *, low: float, high: float, level: float) -> float:
    r"""Upper limit of a mean from one sample of fixed size.

    .. math:: \bar D + \sqrt{\frac{2 v \ln(2/\delta)}{n}} + \frac{7 (high - low)\ln(2/\delta)}{3(n-1)}

    with the sample variance :math:`v` (denominator n - 1). Conservative: the true mean is above it
    far less often than ``level``. Source: Maurer and Pontil 2009 (arXiv:0907.3740), theorem 4, for
    [0, 1], rescaled.

    Args:
        differences_N: Independent values in ``[low, high]``, in any unit. ``[N]``, N >= 2.
        low: Smallest possible value (not: smallest seen).
        high: Largest possible value.
        level: delta, the probability that the mean is above the limit, in (0, 1).

    Returns:
        The limit in the unit of the values; above ``high`` where the sample is too small to say anything.

    Raises:
        ValueError: If there are fewer than 2 values, one is outside the range, or the level is.
    """
    values_N = _checked(differences_N, low=low, high=high, level=level, smallest=2)
    n = len(values_N)
    log_term = math.log(2 / level)
    spread = math.sqrt(2 * float(values_N.var(ddof=1)) * log_term / n)
    return float(values_N.mean()) + spread + 7 * (high - low) * log_term / (3 * (n - 1))


class ConfidenceSequence(NamedTuple):
    """Limits of a mean after each sample; all hold at once with probability ``1 - level``."""

    centre_N: FloatArray
    """Weighted mean of the values so far: the middle of the interval."""
    radius_N: FloatArray
    """Half its width."""
    lower_N: FloatArray
    """Centre less radius, but not below the smallest possible value."""
    upper_N: FloatArray
    """Centre plus radius, but not above the largest possible value."""


def confidence_sequence(values_N: FloatArray, *, low: float, high: float, level: float) -> ConfidenceSequence:
    r"""Limits of a mean that may be looked at after every sample (any-time valid).

    With x the values rescaled to [0, 1] and bets :math:`\lambda_t` known before x_t is seen,

    .. math:: \frac{\sum_i\lambda_i x_i}{\sum_i\lambda_i} \pm
              \frac{\ln(2/\alpha) + \sum_i v_i\,\psi(\lambda_i)}{\sum_i\lambda_i},\quad
              v_i = 4(x_i - \hat\mu_{i-1})^2,\quad \psi(\lambda) = \frac{-\ln(1-\lambda)-\lambda}{4},

    .. math:: \lambda_t = \min\Big(\sqrt{\frac{2\ln(2/\alpha)}{\hat\sigma^2_{t-1}\,t\ln(1+t)}},\ c\Big),\quad
              \hat\mu_t = \frac{1/2+\sum_{i\le t} x_i}{t+1},\quad
              \hat\sigma^2_t = \frac{1/4+\sum_{i\le t}(x_i-\hat\mu_i)^2}{t+1}.

    Either limit alone holds with probability ``1 - level / 2``. Source: the predictable plug-in
    empirical-Bernstein confidence sequence, theorem 2 of Waudby-Smith and Ramdas 2024
    (arXiv:2010.09686); the exponential supermartingale under it is that of Howard et al. 2021,
    "Time-uniform, nonparametric, nonasymptotic confidence sequences" (Annals of Statistics 49,
    arXiv:1810.08240).

    Args:
        values_N: Values with one common mean, in the order of looking, in ``[low, high]``. ``[N]``, N >= 1.
        low: Smallest possible value.
        high: Largest possible value.
        level: alpha, the probability that the mean is ever outside, in (0, 1).

    Returns:
        One interval a sample. The first ones are all of ``[low, high]``: nothing is known yet.

    Raises:
        ValueError: If there is no value, one is outside the range, or the level is.
    """
    values_N = _checked(values_N, low=low, high=high, level=level, smallest=1)
    x_N = (values_N - low) / (high - low)
    t_N = np.arange(1, x_N.shape[0] + 1)
    mean_N = (0.5 + np.cumsum(x_N)) / (t_N + 1)
    variance_N = (0.25 + np.cumsum(np.square(x_N - mean_N))) / (t_N + 1)
    mean_before_N = np.concatenate([[0.5], mean_N[:-1]])
    variance_before_N = np.concatenate([[0.25], variance_N[:-1]])
    log_term = math.log(2 / level)
    bet_N = np.minimum(np.sqrt(2 * log_term / (variance_before_N * t_N * np.log1p(t_N))), LARGEST_BET)
    cost_N = 4 * np.square(x_N - mean_before_N) * (-np.log1p(-bet_N) - bet_N) / 4
    total_N = np.cumsum(bet_N)
    centre_N = low + (high - low) * np.cumsum(bet_N * x_N) / total_N
    radius_N = (high - low) * (log_term + np.cumsum(cost_N)) / total_N
    return ConfidenceSequence(
        centre_N=centre_N,
        radius_N=radius_N,
        lower_N=np.maximum(centre_N - radius_N, low),
        upper_N=np.minimum(centre_N + radius_N, high),
    )


def spend(level: float, *, look: int) -> float:
    r"""Error level of one look out of any number: :math:`level\cdot 6/(\pi^2(look+1)^2)`.

    All looks together spend ``level``, since :math:`\sum_{j\ge1} 1/j^2 = \pi^2/6`. For looks at a growing
    probe sample and for rounds of accepting or rejecting on one validation sample alike.

    Args:
        level: Error level over all looks, in (0, 1).
        look: Looks taken before; 0 is the first.

    Returns:
        In (0, level); 61 % of it at the first look.

    Raises:
        ValueError: If the level is outside its range or ``look`` is negative.
    """
    _check_level(level)
    if look < 0:
        raise ValueError(f"look {look} must be 0 or more: the first look is look 0")
    return level * 6 / (math.pi**2 * (look + 1) ** 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Is a grown network certainly better than the old one, on samples neither was trained on?"""

    accepted: bool
    """True where ``upper`` is below zero."""
    mean: float
    """Mean change of the loss, new less old, in nats after truncation."""
    upper: float
    """Upper limit of its expectation for this sample size, at ``level``."""
    anytime_upper: float
    """The same, valid also where the sample was looked at before it was complete; usually larger."""
    level: float
    """Error level of this round, after spending."""
    num_samples: int
    num_truncated: int
    """Differences beyond the bound: what they exceed it by is outside the certificate."""
    reason: str


def accept_growth(
    old_losses_N: FloatArray, new_losses_N: FloatArray, *, bound: float, level: float, round_index: int = 0
) -> Acceptance:
    """Accept a grow step where the loss is certain to have fallen, from paired samples.

    The limit is :func:`empirical_bernstein_upper` of the paired differences new - old, truncated
    at ``+- bound``, at the level that :func:`spend` leaves for this round. Pairing removes what both
    networks find hard alike: an unpaired bound on losses of a few nats would certify nothing.

    Args:
        old_losses_N: Losses of the old network, one a sample, in nats. ``[N]``, N >= 2.
        new_losses_N: Losses of the new network on the same samples in the same order. ``[N]``.
        bound: Largest difference that counts, in nats, > 0; the logarithm of the number of
            classes plus 3 leaves hardly any out.
        level: Error level over all rounds on this sample, in (0, 0.5).
        round_index: Accept or reject rounds on this sample before this one.

    Returns:
        The answer with its numbers. A difference that is not a number counts as ``+bound``, the worst.

    Raises:
        ValueError: If the samples are not paired, too few, or bound or level are outside their range.
    """
    if old_losses_N.shape != new_losses_N.shape:
        raise ValueError(
            f"paired losses need equal shapes, got {old_losses_N.shape} of the old network and "
            f"{new_losses_N.shape} of the new one: evaluate both on the same samples"
        )
    if not bound > 0:
        raise ValueError(f"bound {bound} must be above 0 nats")
    if not 0 < level < 0.5:
        raise ValueError(f"level {level} must be in (0, 0.5)")
    with np.errstate(invalid="ignore"):  # inf - inf: not a number, the worst
        raw_N = np.asarray(new_losses_N, dtype=np.float64) - np.asarray(old_losses_N, dtype=np.float64)
    change_N = np.where(np.isnan(raw_N), bound, np.clip(raw_N, -bound, bound))
    spent = spend(level, look=round_index)
    upper = empirical_bernstein_upper(change_N, low=-bound, high=bound, level=spent)
    sequence = confidence_sequence(change_N, low=-bound, high=bound, level=2 * spent)  # one side of it: spent
    n, mean, accepted = change_N.shape[0], float(change_N.mean()), upper < 0
    num_truncated = n - int((np.abs(raw_N) <= bound).sum())
    cut = f", {num_truncated} of them truncated" if num_truncated else ""
    side = "below" if accepted else "not below"
    reason = (
        f"{'accepted' if accepted else 'not accepted'}: the loss changed by {mean:+.3g} nats over {n} paired "
        f"samples{cut}, and its upper limit {upper:+.3g} at level {spent:.3g} (round {round_index}) is {side} 0"
    )
    return Acceptance(
        accepted=accepted,
        mean=mean,
        upper=upper,
        anytime_upper=float(sequence.upper_N[-1]),
        level=spent,
        num_samples=n,
        num_truncated=num_truncated,
        reason=reason,
    )


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level {level} must be in (0, 1)")


def _checked(values_N: FloatArray, *, low: float, high: float, level: float, smallest: int) -> FloatArray:
    """The values in double precision, if they keep what the limits assume."""
    _check_level(level)
    if not low < high:
        raise ValueError(f"the range [{low}, {high}] is empty: low must be below high")
    values_N = np.asarray(values_N, dtype=np.float64)
    if values_N.ndim != 1 or values_N.shape[0] < smallest:
        raise ValueError(f"limits need a vector of at least {smallest} values, got shape {values_N.shape}")
    inside_N = (values_N >= low) & (values_N <= high)
    if not inside_N.all():
        raise ValueError(f"value {values_N[~inside_N][0]} is outside [{low}, {high}]: truncate the values first")
    return values_N
