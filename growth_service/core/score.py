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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

_RCOND = 1e-10  # eigenvalues below this share of the largest are taken for rounding of zero


@dataclass(frozen=True, kw_only=True, slots=True)
class Whitener:
    r"""The inverse square root of a (ridged) feature second moment.

    ``inv_sqrt_KK`` is :math:`Q = (\Sigma + \lambda I)^{-1/2}`, a pseudo-inverse where
    :math:`\lambda = 0` and features are dependent or dead.
    """

    inv_sqrt_KK: FloatArray
    ridge_lambda: float
    rank: int
    """Directions kept: K, less where features are dependent and there is no ridge."""
    effective_dimension: float
    """Trace of Sigma (Sigma + lambda)^-1, in [0, rank]: the features that the ridge leaves."""


def whitener(sigma_KK: FloatArray, *, ridge: float) -> Whitener:
    """Invert the square root of a second moment, safely where it is singular.

    Args:
        sigma_KK: Symmetric positive semi-definite second moment of the features. ``[K, K]``.
        ridge: Share of the mean diagonal that is added to it; 0 gives the pseudo-inverse.

    Returns:
        The whitener. All zero features give rank 0 and a zero matrix: nothing is expressible.
    """
    sigma_KK = np.asarray(sigma_KK, dtype=np.float64)
    num_features = sigma_KK.shape[0]
    if num_features == 0:
        return Whitener(inv_sqrt_KK=np.zeros((0, 0)), ridge_lambda=0.0, rank=0, effective_dimension=0.0)
    lam = ridge * float(np.trace(sigma_KK)) / num_features
    eigen_K, basis_KK = np.linalg.eigh((sigma_KK + sigma_KK.T) / 2)
    eigen_K = np.clip(eigen_K, 0.0, None)
    largest = float(eigen_K.max(initial=0.0))
    keep_K = (eigen_K + lam > _RCOND * largest) if largest > 0 else np.zeros(num_features, bool)
    inverse_K = np.zeros(num_features)
    inverse_K[keep_K] = 1.0 / (eigen_K[keep_K] + lam)
    return Whitener(
        inv_sqrt_KK=(basis_KK * np.sqrt(inverse_K)) @ basis_KK.T,
        ridge_lambda=lam,
        rank=int(keep_K.sum()),
        effective_dimension=float((eigen_K * inverse_K).sum()),
    )


def saturation_score(cross_DK: FloatArray, whitening: Whitener) -> float:
    """Squared norm of the projected gradient, the plug-in score S.

    Args:
        cross_DK: Cross-gradient G, in loss units per unit of stream times feature. ``[D, K]``.
        whitening: Of the second moment of the same features.

    Returns:
        S >= 0, in squared loss units per squared unit of the stream. 0.0: saturated.
    """
    return float(np.square(cross_DK @ whitening.inv_sqrt_KK).sum())


def descent_direction(cross_DK: FloatArray, whitening: Whitener) -> FloatArray:
    """The steepest direction for the output projection: -G Sigma^-1. ``[D, K]``."""
    q_KK = whitening.inv_sqrt_KK
    return -(cross_DK @ q_KK) @ q_KK


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


def pool_inflation(half_a_KK: FloatArray, half_b_KK: FloatArray, *, ridge: float) -> float:
    r"""Factor by which a second moment estimated from a small pool inflates scores.

    Whitening with an estimated :math:`\hat\Sigma` multiplies scores by about
    :math:`E\,\mathrm{tr}(\hat\Sigma^{-1}\Sigma)/K > 1`, which is :math:`1 + c/n_{pool}` to first
    order. Two halves of the pool measure it: whiten with one, look at the other, and about half the
    excess remains for the whole pool: with e the excess of a half, 1 + e / (2 + e), exact for Gaussian
    features without ridge. (Derived here, in place of the Gaussian formula
    :math:`n/(n-K-1)`, since positions of one image are not independent samples.)

    Args:
        half_a_KK: Second moment on one half of the pool. ``[K, K]``.
        half_b_KK: The same on the other half. ``[K, K]``.
        ridge: As in :func:`whitener`.

    Returns:
        The factor, >= 1. 1.0 where there are no features.
    """
    excess = []
    for fit_KK, other_KK in ((half_a_KK, half_b_KK), (half_b_KK, half_a_KK)):
        w = whitener(fit_KK, ridge=ridge)
        if w.effective_dimension <= 0:
            return 1.0
        inverse_KK = w.inv_sqrt_KK @ w.inv_sqrt_KK
        excess.append(float((inverse_KK * other_KK).sum()) / w.effective_dimension - 1.0)
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


def covariance_diagnostic(g_ND: FloatArray) -> Covariance:
    r"""Debiased off-diagonal ratio, effective rank and mean correlation of gradients.

    Each squared off-diagonal entry of the sample covariance carries its own sampling variance
    :math:`V_{ij}/n`, with :math:`V_{ij} = E[g_i^2g_j^2] - C_{ij}^2`; its unbiased estimate is subtracted.
    Source: Schaefer and Strimmer 2005 (Stat. Appl. Genet. Mol. Biol. 4, 32), appendix A.

    Args:
        g_ND: Activation gradients, one row an independent unit. ``[N, D]``, N >= 2.

    Returns:
        The three figures; zeros (rank 0) where all gradients are equal.
    """
    centred_ND = g_ND - g_ND.mean(axis=0)
    num = g_ND.shape[0]
    cov_DD = centred_ND.T @ centred_ND / (num - 1)
    diag_D = np.diag(cov_DD)
    if float(diag_D.sum()) <= 1e-28 * float(np.square(g_ND).mean()):
        return Covariance(off_diagonal_ratio=0.0, effective_rank=0.0, mean_abs_correlation=0.0)
    squares_ND = np.square(centred_ND)
    products_DD = centred_ND.T @ centred_ND
    noise_DD = num / (num - 1) ** 3 * (squares_ND.T @ squares_ND - np.square(products_DD) / num)
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
