r"""What a finite probe sample can and cannot say about a saturation score.

The plug-in score is biased upwards by :math:`\mathrm{tr}(C)/n`: a naive probe never reports
saturation. Here :math:`\psi_i = \mathrm{vec}(G_i Q)` is the whitened cross-gradient of one
independent unit (an image, a sequence; never one token of several), all estimates come from
the Gram matrix :math:`H_{ij} = \langle\psi_i,\psi_j\rangle`, and

.. math:: T = \frac{\|\sum_i\psi_i\|^2 - \sum_i\|\psi_i\|^2}{n(n-1)}

is unbiased for the ridged score. Sources: U-statistics for high-dimensional means, Chen and Qin
2010, "A two-sample test for high-dimensional data" (Annals of Statistics 38); the upper limit is
derived from the bound Var T <= 4 S lmax(C)/n + 2||C||_F^2/n^2 by solving for S.

Shape legend: N = independent units, M = numbers per unit.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from growth_service.core.score import FloatArray

ENOUGH_EXCEEDANCES = 20
"""Sign flips as large as the observation after which a p-value is settled."""

_ORDERS = 48

Verdict = Literal["useful", "saturated", "no_transferable_gain", "undetermined"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UStatistic:
    """Debiased score and everything that its limits need.

    Rows are independent units, or means over equal chunks of them: a chunk mean has the same
    expectation and 1/size of the covariance, so every formula holds with rows in place of units.
    """

    value: float
    """T: unbiased for the ridged score; may be negative."""
    num_rows: int
    num_samples: int
    """Independent units behind the rows."""
    cov_frobenius_sq: float
    """H2 = mean over i != j of H_ij^2: ||C||_F^2 of a row where S = 0."""
    cov_trace: float
    """tr C of one unit: the bias of the plug-in score times the number of units."""
    cov_largest: float
    """Upper estimate of the largest eigenvalue of a row's C: the least of three, see :func:`u_statistic`."""
    first_order_variance: float
    """v1, the linear part of the variance: Var_i(h_i) less the share that noise alone gives it.

    That share is the mean square of H_ij - h_i - h_j + T over n - 1. (H2/(n-1) in its place also
    subtracts signal, and the lower limit then covers 0.89 in place of 0.95 at a strong one.)
    """

    @property
    def noise_sd(self) -> float:
        """Standard deviation of T where there is no signal: the noise floor."""
        return math.sqrt(2 * self.cov_frobenius_sq / (self.num_rows * (self.num_rows - 1)))

    @property
    def standard_error(self) -> float:
        """Standard deviation of T at the present signal."""
        return math.sqrt(4 * self.first_order_variance / self.num_rows + self.noise_sd**2)

    @property
    def snr(self) -> float:
        """Signal over noise floor; 0.0 where every unit has zero gradient."""
        return self.value / self.noise_sd if self.noise_sd > 0 else 0.0

    @property
    def effective_rank(self) -> float:
        """r_eff = (tr C)^2 / ||C||_F^2 of the whitened cross-gradients; 0.0 where all vanish."""
        trace = self.cov_trace * self.num_rows / self.num_samples
        return trace**2 / self.cov_frobenius_sq if self.cov_frobenius_sq > 0 else 0.0

    def lower_limit(self, level: float) -> float:
        """One-sided lower confidence limit of S at ``1 - level``.

        The least S under which a value this high is no surprise: the linear part of the variance is
        taken at that S, not at the value (a score interval; the same inversion as the upper limit's).
        """
        z = self._quantile(level)
        if self.value <= 0:
            return self.value - z * self.standard_error
        slope = 4 * self.first_order_variance / self.num_rows / self.value
        half = z * z * slope / 2
        return self.value + half - math.sqrt(half * half + 2 * half * self.value + (z * self.noise_sd) ** 2)

    def upper_limit(self, level: float) -> float:
        """One-sided upper confidence limit of S at ``1 - level``; conservative, never negative.

        A negative T counts as zero: a lucky draw below zero must not certify saturation.
        """
        n, z2 = self.num_rows, self._quantile(level) ** 2
        value = max(self.value, 0.0)
        a = 4 * z2 * self.cov_largest / n
        b = 2 * z2 * self.cov_frobenius_sq / n**2
        return value + a / 2 + math.sqrt(a * a / 4 + a * value + b)

    def _quantile(self, level: float) -> float:
        """Of Student's t with one degree less than rows: variances are estimated from that many."""
        if not 0 < level < 0.5:
            raise ValueError(f"level {level} must be in (0, 0.5)")
        return student_quantile(1 - level, degrees=self.num_rows - 1)


def u_statistic(gram_NN: FloatArray, *, num_samples: int | None = None, plug_in: float | None = None) -> UStatistic:
    r"""Estimate S without bias, with its variance, from the Gram matrix of rows.

    The largest eigenvalue of C is bounded from above by three estimates, and the least is taken: the
    sample's own (inflated by tr(C)/N where rows are few), and the Schatten norms
    :math:`(\mathrm{tr}\,C^p)^{1/p}` for p = 4 and 6 from closed walks over p different rows, with a standard
    error on top. (Derived here; the walks are those of Kong and Valiant 2017, arXiv:1602.00061.)

    Args:
        gram_NN: H_ij, inner products of the rows' whitened cross-gradients. ``[N, N]``, N >= 4.
        num_samples: Independent units behind the rows; None: each row is one.
        plug_in: The exact plug-in score of the rows' mean, where the Gram matrix is sketched: it takes
            the place of the sketched one, so that a sketch blurs the noise and never the signal.

    Returns:
        The statistic. An all-zero Gram matrix gives zeros: exactly saturated.

    Raises:
        ValueError: If there are fewer than 4 rows.
    """
    n = gram_NN.shape[0]
    if n < 4:
        raise ValueError(f"a certificate needs at least 4 independent units, got {n}: probe more samples")
    diag_N = np.diag(gram_NN)
    off_NN = gram_NN - np.diag(diag_N)
    rows_N = off_NN.sum(axis=1)
    h2 = float(np.square(off_NN).sum()) / (n * (n - 1))
    h_N = rows_N / (n - 1)
    value = float(rows_N.sum()) / (n * (n - 1))
    degenerate_NN = off_NN - h_N[:, None] - h_N[None, :] + value
    np.fill_diagonal(degenerate_NN, 0.0)
    degenerate_sq = float(np.square(degenerate_NN).sum()) / (n * (n - 1))
    mean_row_N = gram_NN.mean(axis=1)
    centred_NN = gram_NN - mean_row_N[:, None] - mean_row_N[None, :] + gram_NN.mean()
    correction = 0.0 if plug_in is None else (plug_in - float(gram_NN.mean())) * n / (n - 1)
    return UStatistic(
        value=value + correction,
        num_rows=n,
        num_samples=num_samples or n,
        cov_frobenius_sq=h2,
        cov_trace=float(np.trace(centred_NN)) / (n - 1) * (num_samples or n) / n,
        cov_largest=min(
            max(0.0, float(np.linalg.eigvalsh(centred_NN)[-1])) / (n - 1),
            _schatten_four(degenerate_NN, frobenius_sq=degenerate_sq),
            _schatten_six(degenerate_NN, frobenius_sq=degenerate_sq),
        ),
        first_order_variance=max(0.0, float(np.var(h_N, ddof=1)) - degenerate_sq / (n - 1)),
    )


def _schatten_four(off_NN: FloatArray, *, frobenius_sq: float) -> float:
    """Upper estimate of (tr C^4)^(1/4), from closed walks i-j-k-l-i over different rows.

    The mean over walks is unbiased for tr C^4; each of n^4 / 8 different cycles has a product of variance
    about ||C||_F^8 where many directions are alike, so a standard error of ||C||_F^4 sqrt(8 / n^4) is added.
    """
    n = off_NN.shape[0]
    squares_NN = np.square(off_NN)
    two_NN = off_NN @ off_NN
    walks = float(np.square(two_NN).sum())  # all walks of length 4
    walks -= 2 * float(np.square(squares_NN.sum(axis=1)).sum())  # less those through one row twice
    walks += float(np.square(squares_NN).sum())  # counted twice above
    distinct = n * (n - 1) * (n - 2) * (n - 3)
    spread = frobenius_sq**2 * math.sqrt(8 / distinct)
    return float((max(walks / distinct, 0.0) + spread) ** 0.25)


def _schatten_six(off_NN: FloatArray, *, frobenius_sq: float) -> float:
    """Upper estimate of (tr C^6)^(1/6), from closed walks over six rows in rising order; inf below six rows.

    Orders are counted once each in 48 fixed permutations of the rows, since all 6! orders of C(n, 6) sixes would be
    too many. The standard error is that of as many independent products of variance ||C||_F^12.
    """
    n = off_NN.shape[0]
    sixes = math.comb(n, 6)
    if not sixes:
        return math.inf
    rng = np.random.default_rng(0)
    first_N = np.argsort(np.square(off_NN).sum(axis=1), kind="stable")  # so that the order of rows does not matter
    order_RN = np.stack([first_N[rng.permutation(n)] for _ in range(_ORDERS)])
    mixed_RNN = off_NN[order_RN[:, :, None], order_RN[:, None, :]]
    rising_RNN = np.triu(mixed_RNN, k=1)
    three_RNN = rising_RNN @ rising_RNN @ rising_RNN
    five_RNN = three_RNN @ rising_RNN @ rising_RNN
    walks = float(np.einsum("rij,rji->", five_RNN, mixed_RNN)) / (_ORDERS * sixes)
    spread = frobenius_sq**3 / math.sqrt(_ORDERS * sixes)
    return float((max(walks, 0.0) + spread) ** (1 / 6))


def order_excess(gram_NN: FloatArray, stat: UStatistic) -> float:
    """Standard errors by which neighbouring rows agree more than rows in general; about N(0, 1) in random order.

    Rows are sums over consecutive samples, so that sorted samples (by class, by source) make
    neighbours alike, and pairs within a row, which the estimate leaves out, more alike still.
    """
    n = gram_NN.shape[0]
    spread = math.sqrt(stat.cov_frobenius_sq / (n - 1))
    neighbours = float(np.diag(gram_NN, k=1).mean())
    overall = float(gram_NN.sum() - np.trace(gram_NN)) / (n * (n - 1))
    return (neighbours - overall) / spread if spread > 0 else 0.0


class PValue(NamedTuple):
    """A Monte Carlo p-value and the resamples it took."""

    value: float
    resamples: int


def wild_bootstrap_p_value(gram_NN: FloatArray, *, max_resamples: int, seed: int) -> PValue:
    """p-value for S = 0 by random sign flips of the units (wild bootstrap).

    Valid under heavy tails and unequal variances, where the normal limit is far too small at
    the levels that a multiplicity correction asks for. Flipping stops early once
    ``ENOUGH_EXCEEDANCES`` draws were as large as the observed one: by then p is clearly not small.
    Source: sequential Monte Carlo p-values, Besag and Clifford 1991 (Biometrika 78).

    Args:
        gram_NN: H_ij. ``[N, N]``.
        max_resamples: B; use at least ``20 * number of candidates / level``.
        seed: Of the sign flips.

    Returns:
        In ``[1/(B+1), 1]``; 1.0 where every inner product is zero.
    """
    n = gram_NN.shape[0]
    off_NN = gram_NN - np.diag(np.diag(gram_NN))
    if not np.isfinite(off_NN).all():
        return PValue(1.0, 0)
    observed = float(off_NN.sum()) - 1e-12 * float(np.abs(off_NN).sum())  # rounding must not break a tie
    rng = np.random.default_rng(seed)
    exceed, done = 0, 0
    while done < max_resamples:
        size = min(256, max_resamples - done)
        signs_BN = rng.integers(0, 2, size=(size, n)) * 2.0 - 1.0
        as_large_B = ((signs_BN @ off_NN) * signs_BN).sum(axis=1) >= observed
        reached = np.flatnonzero(np.cumsum(as_large_B) + exceed >= ENOUGH_EXCEEDANCES)
        if reached.size:
            return PValue(ENOUGH_EXCEEDANCES / (done + int(reached[0]) + 1), done + size)
        exceed += int(as_large_B.sum())
        done += size
    return PValue((1 + exceed) / (max_resamples + 1), done)


def chaos_tail_bound(snr: float) -> float:
    r"""Upper bound of the sign-flip p-value from the signal-to-noise ratio alone.

    Given the data, a sign-flipped T* is a Rademacher chaos of degree 2 with standard deviation
    equal to the noise floor, so :math:`P(T^* \ge t\,sd_0) \le e^{-t/e}` for :math:`t \ge 2e`.
    Source: O'Donnell 2014, "Analysis of Boolean Functions", theorem 9.23.

    Returns:
        In (0, 1]; 1.0 below ``2 e``, where the bound says nothing.
    """
    return math.exp(-snr / math.e) if snr >= 2 * math.e else 1.0


def significance(gram_NN: FloatArray, stat: UStatistic, *, threshold: float, max_resamples: int, seed: int) -> PValue:
    """p-value for S = 0: the analytic bound where it settles the matter, else sign flips.

    Args:
        gram_NN: H_ij. ``[N, N]``.
        stat: Its statistic.
        threshold: The p-value that will be compared with, level / number of candidates.
        max_resamples: Of :func:`wild_bootstrap_p_value`.
        seed: Of the sign flips.
    """
    bound = chaos_tail_bound(stat.snr)
    if bound < threshold:
        return PValue(bound, 0)
    return wild_bootstrap_p_value(gram_NN, max_resamples=max_resamples, seed=seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """What following the *training* direction removes from the held-out loss."""

    value: float
    """X_n = <G_train, G_heldout>_Sigma^-1 / sqrt(S_train); unbiased, may be negative."""
    lower: float
    upper: float
    """One-sided Student limits at the level asked for."""


def transfer(projections_N: FloatArray, *, train_score: float, level: float) -> Transfer:
    """Limits of the transfer score from one number per held-out sample.

    Args:
        projections_N: x_i = <G_train Q, psi_i>, the held-out loss decrease rate of sample i
            along the training direction. ``[N]``, N >= 2.
        train_score: S on the training samples (plug-in), which normalises the direction.
        level: One-sided error of each limit.

    Returns:
        In units of sqrt(S). Zeros where the training gradient is zero: training goes nowhere.
    """
    if projections_N.shape[0] < 2:
        raise ValueError(f"limits need at least 2 held-out samples, got {projections_N.shape[0]}")
    if train_score <= 0:
        return Transfer(value=0.0, lower=0.0, upper=0.0)
    scaled_N = projections_N / math.sqrt(train_score)
    n = scaled_N.shape[0]
    mean = float(scaled_N.mean())
    half = student_quantile(1 - level, degrees=n - 1) * float(scaled_N.std(ddof=1)) / math.sqrt(n)
    return Transfer(value=mean, lower=mean - half, upper=mean + half)


def realisable_share(score: float, *, cov_trace: float, num_train: int) -> float:
    """Share eta of the first-order gain that ``num_train`` training samples can realise.

    eta = S / (S + tr(C)/M); half of it at M* = tr(C)/S samples. 0.0 where S <= 0.
    """
    score = max(score, 0.0)
    return score / (score + cov_trace / num_train) if score > 0 else 0.0


def half_gain_samples(score: float, *, cov_trace: float) -> float:
    """M* = tr(C)/S: training samples at which half the gain is realisable; inf where S <= 0."""
    return cov_trace / score if score > 0 else math.inf


def student_quantile(p: float, *, degrees: int) -> float:
    """Quantile of Student's t by the Cornish-Fisher expansion around the normal.

    Error below 1 % for 5 degrees of freedom and p <= 0.99, below 1e-5 from 50 on.
    Source: Abramowitz and Stegun 26.7.5.
    """
    z = NormalDist().inv_cdf(p)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    g4 = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + g1 / degrees + g2 / degrees**2 + g3 / degrees**3 + g4 / degrees**4


@dataclass(frozen=True, kw_only=True, slots=True)
class Gains:
    """Predicted gains of one candidate in nats: the score and its limits times step size."""

    lower: float
    upper: float
    transfer_upper: float
    p_value: float


def candidate_verdict(gains: Gains, *, tolerance: float, level: float, num_candidates: int) -> Verdict:
    """Judge one candidate; ``gains`` are at the levels that :func:`network_verdict` states.

    Args:
        gains: Lower limit at level / number of candidates, upper limits at level.
        tolerance: Smallest loss decrease worth having, in nats.
        level: Error level over the whole network.
        num_candidates: How many places and blocks are looked at together.

    Returns:
        ``useful`` where a gain above the tolerance is certain; ``saturated`` where no direction
        can give it; ``no_transferable_gain`` where only the direction that training takes
        cannot; else ``undetermined``.
    """
    if gains.lower > tolerance and gains.p_value < level / num_candidates:
        return "useful"
    if gains.upper < tolerance:
        return "saturated"
    if gains.transfer_upper < tolerance:
        return "no_transferable_gain"
    return "undetermined"


def network_verdict(verdicts: list[Verdict]) -> Verdict:
    """Combine verdicts of candidates into one of the network.

    ``useful`` needs one of many (each candidate was tested at level / number of candidates,
    Bonferroni); ``saturated`` and ``no_transferable_gain`` need all (an intersection-union test:
    each at the full level, no correction). No candidate at all is ``undetermined``.
    """
    if "useful" in verdicts:
        return "useful"
    if verdicts and all(v == "saturated" for v in verdicts):
        return "saturated"
    if verdicts and all(v in ("saturated", "no_transferable_gain") for v in verdicts):
        return "no_transferable_gain"
    return "undetermined"


def certificate_flops(*, num_rows: int, numbers: int, features: int, num_resamples: int) -> int:
    """FLOPs of turning rows into a certificate: triangular factors, Gram matrix, sign flips.

    2 per multiply-accumulate; each of the three factors (second moment and its two halves) with its
    inverse counted as 7/3 K^3, the other half's product with it as 2 K^3; the eigenvalues of the Gram
    matrix as 4/3 N^3, its square and the walks over six rows as 2 N^3 each (Golub and Van Loan, "Matrix
    Computations", sec. 3.1, 8.3).
    """
    whitening = 7 * features**3 + 2 * 2 * features**3
    gram = 2 * num_rows**2 * numbers + 4 * num_rows**3 // 3 + 2 * (1 + 4 * _ORDERS) * num_rows**3
    bootstrap = 2 * num_resamples * num_rows**2
    return whitening + gram + bootstrap
