r"""How much loss a new block could remove, to first order.

A block :math:`z \to z + W\phi(z)` with :math:`W = 0` is inserted after a module whose output
:math:`z` is the residual stream. With :math:`g` the gradient of the per-sample loss with
respect to the stream, summed over the positions :math:`p` of one sample,

.. math:: G = E\sum_p g_p \phi_p^T, \quad \Sigma = E\sum_p \phi_p\phi_p^T, \quad
          S = \mathrm{tr}(G\,\Sigma^{+}G^T)

is the squared norm of the gradient projected on what the block can express: the network is
first-order saturated at this site exactly if :math:`S = 0`. Source: the cross-gradient
criterion of Liu et al. 2026, "Quantifying Depth Sufficiency in Residual Neural Networks"
(arXiv:2608.14664); the formula for a zero output projection is derived there from least squares.

Shape legend: D = width of the stream, K = number of features (with the constant one).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
"""Double precision; single where numbers that were measured so are kept, at half the memory."""

_RCOND = 1e-10  # eigenvalues below this share of the largest are taken for rounding of zero
_FEW_FEATURES = 160
_SAFE_RIDGE = 1e-8  # share of the mean eigenvalue from which a Cholesky factor does not fail in double precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Whitener:
    r"""A square root of the inverse of a (ridged) feature second moment.

    ``inv_sqrt`` is any :math:`Q` with :math:`QQ^T = (\Sigma + \lambda I)^{-1}`, or the
    pseudo-inverse where :math:`\lambda = 0` and features are dependent or dead. ``[K, R]`` where all
    rows of the projection share their features; ``[D, K, R]``, one a row, where each has its own.
    """

    inv_sqrt: FloatArray
    ridge_lambda: float
    """Added to the diagonal (the mean over rows, where each has its own)."""
    rank: int
    """Directions kept: all features, less where they are dependent and there is no ridge."""
    effective_dimension: float
    """Trace of Sigma (Sigma + lambda)^-1, in [0, rank]: the features that the ridge leaves."""

    def held_in(self, precision: np.dtype[Any]) -> "Whitener":
        """The same in another precision."""
        return replace(self, inv_sqrt=self.inv_sqrt.astype(precision, order="C", copy=False))

    def whiten(self, cross_DK: FloatArray) -> FloatArray:
        """G Q. ``[D, K] -> [D, R]``."""
        if self.inv_sqrt.ndim == 2:
            found: FloatArray = cross_DK @ self.inv_sqrt
            return found
        whitened: FloatArray = np.einsum("dk,dkr->dr", cross_DK, self.inv_sqrt)
        return whitened

    def back(self, whitened_DR: FloatArray) -> FloatArray:
        """W Q^T, so that ``back(whiten(G))`` is G Sigma^-1. ``[D, R] -> [D, K]``."""
        found: FloatArray
        if self.inv_sqrt.ndim == 2:
            found = whitened_DR @ self.inv_sqrt.T
        else:
            found = np.einsum("dr,dkr->dk", whitened_DR, self.inv_sqrt)
        return found


def whitener(sigma: FloatArray, *, ridge: float) -> Whitener:
    """Invert the square root of a second moment, safely where it is singular.

    Args:
        sigma: Symmetric positive semi-definite second moment of the features. ``[K, K]``, or
            ``[D, K, K]`` where each row of the projection has features of its own.
        ridge: Share of the mean diagonal that is added to it; 0 gives the pseudo-inverse.

    Returns:
        The whitener. All zero features give rank 0 and a zero matrix: nothing is expressible.
    """
    sigma = np.asarray(sigma, dtype=np.float64)
    if sigma.ndim == 3:
        rows = [whitener(row_KK, ridge=ridge) for row_KK in sigma]
        return Whitener(
            inv_sqrt=np.stack([r.inv_sqrt for r in rows]),
            ridge_lambda=float(np.mean([r.ridge_lambda for r in rows])),
            rank=sum(r.rank for r in rows),
            effective_dimension=sum(r.effective_dimension for r in rows),
        )
    num_features = sigma.shape[0]
    trace = float(np.trace(sigma)) if num_features else 0.0
    if trace <= 0:
        return Whitener(inv_sqrt=np.zeros(sigma.shape), ridge_lambda=0.0, rank=0, effective_dimension=0.0)
    lam = ridge * trace / num_features
    if ridge >= _SAFE_RIDGE and (lower_KK := _cholesky(sigma + lam * np.eye(num_features))) is not None:
        root = _invert_lower(lower_KK).T
        left = num_features - lam * float(np.square(root).sum())
        return Whitener(inv_sqrt=root, ridge_lambda=lam, rank=num_features, effective_dimension=left)
    eigen_K, basis_KK = np.linalg.eigh((sigma + sigma.T) / 2)
    eigen_K = np.maximum(eigen_K, 0.0)
    keep_K = eigen_K + lam > _RCOND * float(eigen_K.max())
    inverse_K = np.zeros(num_features)
    inverse_K[keep_K] = 1.0 / (eigen_K[keep_K] + lam)
    return Whitener(
        inv_sqrt=(basis_KK * np.sqrt(inverse_K)) @ basis_KK.T,
        ridge_lambda=lam,
        rank=int(keep_K.sum()),
        effective_dimension=float((eigen_K * inverse_K).sum()),
    )


def _cholesky(sigma_KK: FloatArray) -> FloatArray | None:
    """A triangular root, ten times as fast as eigenvectors; None where sums in single precision left it indefinite."""
    try:
        return np.linalg.cholesky(sigma_KK)
    except np.linalg.LinAlgError:
        return None


def _invert_lower(lower_KK: FloatArray) -> FloatArray:
    """Inverse of a lower triangular matrix by halves: nearly all of it matrix products."""
    size = lower_KK.shape[0]
    if size <= 48:
        small: FloatArray = np.asarray(np.linalg.inv(lower_KK), dtype=np.float64)
        return small
    half = size // 2
    first, last = _invert_lower(lower_KK[:half, :half]), _invert_lower(lower_KK[half:, half:])
    out = np.zeros_like(lower_KK)
    out[:half, :half], out[half:, half:] = first, last
    out[half:, :half] = -last @ (lower_KK[half:, :half] @ first)
    return out


def partial_out(sigma_JJ: FloatArray, *, num_new: int, ridge: float) -> tuple[FloatArray, FloatArray]:
    r"""Remove from new features what existing ones at the same place express already.

    With joint features :math:`[\phi_n; \phi_o]`, :math:`\phi_\perp = \phi_n - \Sigma_{no}\Sigma_{oo}^{+}\phi_o`
    and :math:`G_\perp = G_n - G_o\Sigma_{oo}^{+}\Sigma_{on}`: the score of the rest is what growing adds to
    *training on*. Source: Frisch and Waugh 1933 (Econometrica 1), Lovell 1963; in growing networks,
    Verbockhaven et al. 2024, "Growing Tiny Networks" (arXiv:2405.19816).

    Args:
        sigma_JJ: Second moment of the joint features, the new ones first. ``[J, J]``.
        num_new: How many of them are new, K.
        ridge: Of the existing features' second moment, as in :func:`whitener`.

    Returns:
        The map M with :math:`\phi_\perp = M^T\phi`, ``[J, K]`` (so :math:`G_\perp = G M`), and the second
        moment of the rest, ``[K, K]``.
    """
    old = whitener(sigma_JJ[num_new:, num_new:], ridge=ridge)
    onto_KO = old.back(old.whiten(sigma_JJ[:num_new, num_new:]))
    keep_JK = np.concatenate([np.eye(num_new), -onto_KO.T])
    rest_KK = keep_JK.T @ sigma_JJ @ keep_JK
    eigen_K, basis_KK = np.linalg.eigh((rest_KK + rest_KK.T) / 2)
    real_KR = basis_KK[:, eigen_K > _RCOND * float(np.trace(sigma_JJ[:num_new, :num_new]))]  # the others are rounding
    if real_KR.shape[1] == num_new:
        return keep_JK, (rest_KK + rest_KK.T) / 2
    onto_KK = real_KR @ real_KR.T
    return keep_JK @ onto_KK, onto_KK @ rest_KK @ onto_KK


def saturation_score(cross_DK: FloatArray, whitening: Whitener) -> float:
    """Squared norm of the projected gradient, the plug-in score S.

    Args:
        cross_DK: Cross-gradient G, in loss units per unit of stream times feature. ``[D, K]``.
        whitening: Of the second moment of the same features.

    Returns:
        S >= 0, in squared loss units per squared unit of the stream. 0.0: saturated.
    """
    return float(np.square(whitening.whiten(cross_DK)).sum())


def gradmax_score(cross_DK: FloatArray) -> float:
    """Squared Frobenius norm of the cross-gradient: un-whitened, so it changes with the scale of the features.

    Reported beside S for comparison. Source: Evci et al. 2022, "GradMax" (arXiv:2201.05125).
    """
    return float(np.square(cross_DK).sum())


def descent_direction(cross_DK: FloatArray, whitening: Whitener) -> FloatArray:
    """The steepest direction for the output projection: -G Sigma^-1. ``[D, K]``."""
    return -whitening.back(whitening.whiten(cross_DK))


def predicted_gain(score: float, *, stream_norm: float, r_max: float, loss_nats: float) -> float:
    r"""Loss that a step of ordinary size could remove, to first order.

    A step of relative size :math:`r = \|\delta z\|/\|z\|` along the projected direction lowers
    the loss by :math:`r\kappa` with :math:`\kappa = \|z\|\sqrt{S}`, the scale-free score.

    Args:
        score: S, or a limit of it; negative estimates count as zero.
        stream_norm: Root mean square over samples of the norm of z (all positions of a sample).
        r_max: Relative size of an ordinary block of this network, in (0, 1).
        loss_nats: The present loss: a gain is capped at it, nothing removes more.

    Returns:
        Nats, in ``[0, loss_nats]``.
    """
    return float(min(r_max * kappa(score, stream_norm=stream_norm), max(loss_nats, 0.0)))


def kappa(score: float, *, stream_norm: float) -> float:
    """Scale-free score in nats per unit relative step: ||z|| sqrt(max(S, 0))."""
    return stream_norm * math.sqrt(max(score, 0.0))


def pool_inflation(half_a: FloatArray, half_b: FloatArray, *, ridge: float) -> float:
    r"""Factor by which a second moment estimated from a small pool inflates scores.

    Whitening with an estimated :math:`\hat\Sigma` multiplies scores by about
    :math:`E\,\mathrm{tr}(\hat\Sigma^{-1}\Sigma)/K > 1`, which is :math:`1 + c/n_{pool}` to first
    order. Two halves of the pool measure it: whiten with one, look at the other, and about half the
    excess remains for the whole pool: with e the excess of a half, 1 + e / (2 + e), exact for Gaussian
    features without ridge. (Derived here, in place of the Gaussian formula
    :math:`n/(n-K-1)`, since positions of one image are not independent samples.)

    Args:
        half_a: Second moment on one half of the pool. ``[K, K]`` or ``[D, K, K]``.
        half_b: The same on the other half.
        ridge: As in :func:`whitener`.

    Returns:
        The factor, >= 1. 1.0 where there are no features.
    """
    excess = []
    both = ((half_a, half_b), (half_b, half_a))
    for fit, other in both if half_a.shape[-1] <= _FEW_FEATURES else both[:1]:  # many features average by themselves
        metric = whitener(np.asarray(fit, dtype=np.float64), ridge=ridge).held_in(other.dtype)
        if metric.effective_dimension <= 0:
            return 1.0
        seen = float(((other @ metric.inv_sqrt) * metric.inv_sqrt).sum())  # the trace of (fit + lambda)^-1 other
        excess.append(seen / metric.effective_dimension - 1.0)
    half = max(0.0, float(np.mean(excess)))
    return 1.0 + half / (2.0 + half)


@dataclass(frozen=True, kw_only=True, slots=True)
class Covariance:
    """Is the gradient covariance near diagonal? If so, width makes weak signals visible."""

    off_diagonal_ratio: float
    """Share of ||C||_F^2 off the diagonal, debiased for the sample size, in [0, 1]."""
    effective_rank: float
    """r_eff = (tr C)^2 / ||C||_F^2, from 1 (one direction) to D (all alike)."""
    mean_abs_correlation: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientMoments:
    """Sums over independent units of activation gradients g (of a unit: summed over its positions)."""

    num: int
    first_D: FloatArray
    """Sum of g_i."""
    second_DD: FloatArray
    """Sum of g_i g_j."""
    third_DD: FloatArray
    """Sum of g_i^2 g_j."""
    fourth_DD: FloatArray
    """Sum of g_i^2 g_j^2."""

    @classmethod
    def of(cls, g_ND: FloatArray) -> "GradientMoments":
        """Of rows of gradients, one a unit."""
        squares_ND = np.square(g_ND)
        return cls(
            num=len(g_ND),
            first_D=g_ND.sum(axis=0),
            second_DD=g_ND.T @ g_ND,
            third_DD=squares_ND.T @ g_ND,
            fourth_DD=squares_ND.T @ squares_ND,
        )


def covariance_diagnostic(moments: GradientMoments) -> Covariance:
    r"""Debiased off-diagonal ratio, effective rank and mean correlation of gradients.

    Each squared off-diagonal entry of the sample covariance carries its own sampling variance
    :math:`V_{ij}/n`, with :math:`V_{ij} = E[\bar g_i^2\bar g_j^2] - C_{ij}^2` of centred gradients; its unbiased
    estimate is subtracted.
    Source: Schaefer and Strimmer 2005 (Stat. Appl. Genet. Mol. Biol. 4, 32), appendix A.

    Args:
        moments: Of at least 2 independent units.

    Returns:
        The three figures; zeros (rank 0) where all gradients are equal.
    """
    nothing = Covariance(off_diagonal_ratio=0.0, effective_rank=0.0, mean_abs_correlation=0.0)
    num = moments.num
    if num < 2:
        return nothing
    mean_D, second_DD = moments.first_D / num, moments.second_DD / num
    centred_DD = second_DD - np.outer(mean_D, mean_D)
    cov_DD = centred_DD * num / (num - 1)
    diag_D = np.clip(np.diag(cov_DD), 0.0, None)
    if float(diag_D.sum()) <= 1e-13 * float(np.trace(second_DD)):
        return nothing
    fourth_DD = _centred_fourth(moments, mean_D)
    noise_DD = (num / (num - 1)) ** 2 / (num - 1) * (fourth_DD - np.square(centred_DD))
    off = ~np.eye(cov_DD.shape[0], dtype=bool)
    off_sq = max(0.0, float((np.square(cov_DD) - noise_DD)[off].sum()))
    total_sq = off_sq + float(np.square(diag_D).sum())
    scale_D = np.sqrt(np.where(diag_D > 0, diag_D, 1.0))
    corr_DD = cov_DD / np.outer(scale_D, scale_D)
    return Covariance(
        off_diagonal_ratio=off_sq / total_sq,
        effective_rank=float(diag_D.sum()) ** 2 / total_sq,
        mean_abs_correlation=float(np.abs(corr_DD[off]).mean()) if off.any() else 0.0,
    )


def _centred_fourth(moments: GradientMoments, mean_D: FloatArray) -> FloatArray:
    """E[(g_i - m_i)^2 (g_j - m_j)^2] from moments about zero, by expanding the product."""
    num = moments.num
    second_DD, third_DD = moments.second_DD / num, moments.third_DD / num
    squares_D = np.diag(second_DD)
    product_DD, mean_sq_D = np.outer(mean_D, mean_D), np.square(mean_D)
    mixed_DD = third_DD * mean_D[None, :]
    found: FloatArray = (
        moments.fourth_DD / num
        - 2 * (mixed_DD + mixed_DD.T)
        + np.outer(squares_D, mean_sq_D)
        + np.outer(mean_sq_D, squares_D)
        + 4 * product_DD * second_DD
        - 3 * np.square(product_DD)
    )
    return found
