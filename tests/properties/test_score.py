"""The score: zero where nothing is expressible, blind to how features and stream are written.

Shape legend: N = units, D = width of the stream, K = features. One position a unit: what sums
over positions do is in tests/reference.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth_service.core.score import (
    covariance_diagnostic,
    descent_direction,
    kappa,
    pool_inflation,
    predicted_gain,
    saturation_score,
    whitener,
)

SEEDS = st.integers(0, 2**32 - 1)
RIDGES = st.sampled_from([0.0, 1e-3, 0.1, 1.0])
POSITIVE = st.floats(1e-3, 1e3)


@st.composite
def probes(draw):
    """g_ND and phi_NK: 20 units or more, of a few features that are well conditioned."""
    rng = np.random.default_rng(draw(SEEDS))
    n, d, k = draw(st.integers(20, 40)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    phi_NK = rng.standard_normal((n, k)) + rng.uniform(-1, 1, k)
    return rng.standard_normal((n, d)) + phi_NK @ rng.standard_normal((k, d)), phi_NK


def moments(probe):
    g_ND, phi_NK = probe
    return g_ND.T @ phi_NK / len(g_ND), phi_NK.T @ phi_NK / len(phi_NK)


def score(probe, ridge=0.0):
    cross_DK, sigma_KK = moments(probe)
    return saturation_score(cross_DK, whitener(sigma_KK, ridge=ridge))


# --- the whitener ---------------------------------------------------------------------------------


@given(probes(), RIDGES)
def test_the_whitener_squares_to_the_inverse_of_the_ridged_moment(probe, ridge):
    sigma_KK = moments(probe)[1]
    lam = ridge * np.diag(sigma_KK).mean()
    w = whitener(sigma_KK, ridge=ridge)
    product_KK = w.inv_sqrt_KK @ w.inv_sqrt_KK @ (sigma_KK + lam * np.eye(len(sigma_KK)))
    # Condition numbers here stay below 1e4: 1e-9 is 1e4 * 2^-53 with room.
    np.testing.assert_allclose(product_KK, np.eye(len(sigma_KK)), atol=1e-9)


@given(probes(), RIDGES)
def test_the_whitener_is_symmetric(probe, ridge):
    q_KK = whitener(moments(probe)[1], ridge=ridge).inv_sqrt_KK
    np.testing.assert_allclose(q_KK, q_KK.T, rtol=1e-12, atol=1e-12 * np.abs(q_KK).max())


@given(probes(), RIDGES)
def test_the_ridge_is_a_share_of_the_mean_diagonal(probe, ridge):
    sigma_KK = moments(probe)[1]
    assert whitener(sigma_KK, ridge=ridge).ridge_lambda == pytest.approx(ridge * np.diag(sigma_KK).mean())


@given(probes(), RIDGES)
def test_the_effective_dimension_is_between_zero_and_the_rank(probe, ridge):
    w = whitener(moments(probe)[1], ridge=ridge)
    assert 0 < w.effective_dimension <= w.rank + 1e-9


@pytest.mark.parametrize(("ridge", "dimension"), [(0.0, 2.0), (1.0, 3 / 5 + 1 / 3)])
def test_the_effective_dimension_counts_each_direction_by_what_the_ridge_leaves(ridge, dimension):
    # Eigenvalues 3 and 1, lambda = ridge * 2: 3/(3 + 2) + 1/(1 + 2).
    assert whitener(np.diag([3.0, 1.0]), ridge=ridge).effective_dimension == pytest.approx(dimension)


def test_a_known_moment_is_whitened_by_one_over_the_root():
    np.testing.assert_allclose(whitener(np.diag([4.0, 0.25]), ridge=0.0).inv_sqrt_KK, np.diag([0.5, 2.0]), atol=1e-15)


def test_dead_features_leave_the_rank_of_the_living():
    w = whitener(np.diag([4.0, 0.0, 1.0]), ridge=0.0)
    assert (w.rank, w.effective_dimension) == (2, 2.0)


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_features_that_are_all_zero_express_nothing(ridge):
    w = whitener(np.zeros((3, 3)), ridge=ridge)
    assert (w.rank, w.effective_dimension, w.ridge_lambda) == (0, 0.0, 0.0)
    assert not w.inv_sqrt_KK.any()


def test_rounding_below_zero_is_taken_for_zero():
    w = whitener(np.diag([1.0, -1e-14]), ridge=0.0)
    np.testing.assert_array_equal(w.inv_sqrt_KK, np.diag([1.0, 0.0]))


def test_a_weak_feature_is_not_taken_for_rounding():
    # Features of one network differ by factors of 1e4: squares by 1e8.
    assert whitener(np.diag([1.0, 1e-8]), ridge=0.0).rank == 2


@given(probes(), st.sampled_from([1e-3, 0.1]))
def test_with_a_ridge_all_directions_are_kept(probe, ridge):
    sigma_KK = moments(probe)[1]
    doubled_KK = np.block([[sigma_KK, sigma_KK], [sigma_KK, sigma_KK]])
    assert whitener(doubled_KK, ridge=ridge).rank == len(doubled_KK)


def test_no_features_at_all_have_rank_zero():
    assert whitener(np.zeros((0, 0)), ridge=1e-3).rank == 0


# --- the score ------------------------------------------------------------------------------------


@given(probes(), RIDGES)
def test_the_score_is_between_zero_and_the_gradient_energy(probe, ridge):
    energy = np.square(probe[0]).sum() / len(probe[0])
    assert 0 <= score(probe, ridge) <= energy * (1 + 1e-9)


@given(probes(), RIDGES)
def test_a_zero_cross_gradient_is_saturated_exactly(probe, ridge):
    cross_DK, sigma_KK = moments(probe)
    assert saturation_score(np.zeros_like(cross_DK), whitener(sigma_KK, ridge=ridge)) == 0.0


@given(probes())
def test_a_gradient_that_is_linear_in_the_features_is_reached_in_full(probe):
    phi_NK = probe[1]
    g_ND = phi_NK @ np.ones((phi_NK.shape[1], 3))
    assert score((g_ND, phi_NK)) == pytest.approx(np.square(g_ND).sum() / len(g_ND), rel=1e-9)


@given(probes())
def test_a_gradient_orthogonal_to_the_features_is_saturated(probe):
    g_ND, phi_NK = probe
    rest_ND = g_ND - phi_NK @ np.linalg.lstsq(phi_NK, g_ND, rcond=None)[0]
    # Projected off once in float64: 1e-16 of the energy, squared.
    assert score((rest_ND, phi_NK)) <= 1e-24 * np.square(g_ND).sum()


@given(probes())
def test_more_features_never_lower_the_score(probe):
    g_ND, phi_NK = probe
    assert score((g_ND, phi_NK[:, :-1] if phi_NK.shape[1] > 1 else phi_NK)) <= score(probe) * (1 + 1e-9)


@given(probes(), RIDGES, RIDGES)
def test_a_larger_ridge_never_raises_the_score(probe, one, other):
    assert score(probe, max(one, other)) <= score(probe, min(one, other)) * (1 + 1e-9)


@given(probes(), SEEDS)
def test_the_score_is_blind_to_how_features_are_mixed(probe, seed):
    g_ND, phi_NK = probe
    k = phi_NK.shape[1]
    mix_KK = np.random.default_rng(seed).standard_normal((k, k)) * 0.3 + 2 * np.eye(k)
    # Mixing squares its condition number (below 1e3 here) into that of Sigma: 1e-8.
    assert score((g_ND, phi_NK @ mix_KK.T)) == pytest.approx(score(probe), rel=1e-8)


@given(probes(), RIDGES, SEEDS)
def test_rotated_features_have_the_same_ridged_score(probe, ridge, seed):
    g_ND, phi_NK = probe
    k = phi_NK.shape[1]
    turn_KK = np.linalg.qr(np.random.default_rng(seed).standard_normal((k, k)))[0]
    assert score((g_ND, phi_NK @ turn_KK), ridge) == pytest.approx(score(probe, ridge), rel=1e-9)


@given(probes(), RIDGES, POSITIVE)
def test_the_score_is_blind_to_the_scale_of_features(probe, ridge, scale):
    g_ND, phi_NK = probe
    assert score((g_ND, scale * phi_NK), ridge) == pytest.approx(score(probe, ridge), rel=1e-9)


@given(probes(), RIDGES)
def test_a_repeated_feature_adds_nothing_without_a_ridge(probe, ridge):
    g_ND, phi_NK = probe
    doubled = (g_ND, np.concatenate([phi_NK, phi_NK[:, :1]], axis=1))
    assert score(doubled) == pytest.approx(score(probe), rel=1e-9)


@given(probes(), RIDGES, POSITIVE)
def test_the_score_grows_with_the_square_of_the_loss_scale(probe, ridge, scale):
    assert score((scale * probe[0], probe[1]), ridge) == pytest.approx(scale**2 * score(probe, ridge), rel=1e-9)


@given(probes(), RIDGES)
def test_the_descent_direction_falls_at_the_rate_of_the_score(probe, ridge):
    cross_DK, sigma_KK = moments(probe)
    w = whitener(sigma_KK, ridge=ridge)
    assert (cross_DK * descent_direction(cross_DK, w)).sum() == pytest.approx(-saturation_score(cross_DK, w), rel=1e-9)


@given(probes())
def test_the_descent_direction_is_minus_the_cross_gradient_over_the_moment(probe):
    cross_DK, sigma_KK = moments(probe)
    wanted_DK = -np.linalg.solve(sigma_KK, cross_DK.T).T
    found_DK = descent_direction(cross_DK, whitener(sigma_KK, ridge=0.0))
    np.testing.assert_allclose(found_DK, wanted_DK, rtol=1e-8, atol=1e-8 * np.abs(wanted_DK).max())


# --- gains in nats --------------------------------------------------------------------------------


@given(POSITIVE, POSITIVE, POSITIVE)
def test_kappa_is_blind_to_the_scale_of_the_stream(s, norm, c):
    assert kappa(s / c**2, stream_norm=norm * c) == pytest.approx(kappa(s, stream_norm=norm), rel=1e-12)


def test_kappa_is_the_stream_norm_times_the_root_of_the_score():
    assert kappa(9.0, stream_norm=2.0) == 6.0


@pytest.mark.parametrize("score_value", [0.0, -1.0])
def test_a_score_of_zero_or_below_promises_nothing(score_value):
    assert kappa(score_value, stream_norm=5.0) == 0.0
    assert predicted_gain(score_value, stream_norm=5.0, r_max=0.1, loss_nats=1.0) == 0.0


def test_a_gain_is_the_relative_step_times_kappa():
    assert predicted_gain(9.0, stream_norm=2.0, r_max=0.125, loss_nats=1.0) == 0.75


def test_a_gain_is_capped_at_the_loss():
    assert predicted_gain(9.0, stream_norm=2.0, r_max=0.125, loss_nats=0.5) == 0.5


@given(st.floats(-10, 10), POSITIVE, st.floats(0.01, 0.99), st.floats(-1, 10))
def test_a_gain_is_between_zero_and_the_loss(s, norm, r_max, loss):
    assert 0.0 <= predicted_gain(s, stream_norm=norm, r_max=r_max, loss_nats=loss) <= max(loss, 0.0)


@given(POSITIVE, st.floats(1.0, 10.0), POSITIVE)
def test_a_larger_score_never_promises_less(s, factor, norm):
    def gain(value):
        return predicted_gain(value, stream_norm=norm, r_max=0.1, loss_nats=2.0)

    assert gain(s) <= gain(s * factor)


# --- the pool -------------------------------------------------------------------------------------


def halves(rng, root_KK, pool):
    x_NK = rng.standard_normal((pool, len(root_KK))) @ root_KK.T
    return tuple(part.T @ part / len(part) for part in np.split(x_NK, 2))


@given(probes(), RIDGES)
def test_equal_halves_show_no_inflation(probe, ridge):
    sigma_KK = moments(probe)[1]
    assert pool_inflation(sigma_KK, sigma_KK, ridge=ridge) == pytest.approx(1.0, abs=1e-9)


@given(SEEDS, st.integers(1, 6), RIDGES)
def test_inflation_is_at_least_one_and_blind_to_which_half_is_which(seed, k, ridge):
    a_KK, b_KK = halves(np.random.default_rng(seed), np.eye(k), 40)
    found = pool_inflation(a_KK, b_KK, ridge=ridge)
    assert found >= 1.0
    assert found == pytest.approx(pool_inflation(b_KK, a_KK, ridge=ridge), rel=1e-12)


def test_features_that_are_all_zero_are_not_inflated():
    assert pool_inflation(np.zeros((3, 3)), np.zeros((3, 3)), ridge=1e-3) == 1.0


def test_halves_of_known_moments_give_half_of_the_mean_excess():
    # tr(A^-1 B)/2 = (2 + 4)/2 = 3 and tr(B^-1 A)/2 = (1/2 + 1/4)/2 = 3/8: mean excess e = 0.6875.
    # Half of it to first order; e/(2 + e) = 0.256 would be right to all orders for Gaussian features.
    assert 1.25 < pool_inflation(np.diag([1.0, 1.0]), np.diag([2.0, 4.0]), ridge=0.0) <= 1.0 + 0.6875 / 2 + 1e-12


def test_inflation_is_a_share_of_the_features_that_the_ridge_leaves():
    # A = I with lambda 1: tr(B/2) = 2 over an effective dimension of 1. B = 2 I with lambda 2: tr(A/4) = 1/2
    # over 1. Mean excess e = 1/4; over the number of features instead, there would be none.
    assert 1.11 < pool_inflation(np.eye(2), 2 * np.eye(2), ridge=1.0) <= 1.125 + 1e-12


# Seen with 400 pools each (k = 20): predicted / true inflation 1.37/1.27 at 100, 1.132/1.118 at 200,
# 1.059/1.056 at 400, the same for ridge 1e-3. Gaussian theory agrees: half of the excess on a half is
# (k+1)/(n-2k-2), the true excess (k+1)/(n-k-1), so the factor is 7.6 %, 1.4 % and 0.3 % too large. The
# bounds are that second-order error plus 4 standard errors of the means over 150 pools (0.4 % at n = 100).
@pytest.mark.parametrize("ridge", [0.0, 1e-3])
@pytest.mark.parametrize(("pool", "bound"), [(100, 0.10), (200, 0.03), (400, 0.01)])
def test_two_halves_predict_the_inflation_of_the_whole_pool(pool, bound, ridge):
    rng, k = np.random.default_rng(pool), 20
    root_KK = np.linalg.qr(rng.standard_normal((k, k)))[0] * np.sqrt(np.logspace(0, -2, k))
    sigma_KK = root_KK @ root_KK.T
    exact = whitener(sigma_KK, ridge=ridge).effective_dimension
    true, predicted = [], []
    for _ in range(150):
        a_KK, b_KK = halves(rng, root_KK, pool)
        q_KK = whitener((a_KK + b_KK) / 2, ridge=ridge).inv_sqrt_KK
        true.append((q_KK @ q_KK * sigma_KK).sum() / exact)
        predicted.append(pool_inflation(a_KK, b_KK, ridge=ridge))
    assert abs(np.mean(predicted) / np.mean(true) - 1) < bound


# --- the covariance of gradients ------------------------------------------------------------------


@st.composite
def gradients(draw):
    rng = np.random.default_rng(draw(SEEDS))
    n, d = draw(st.integers(20, 60)), draw(st.integers(1, 8))
    return rng.standard_normal((n, d)) @ rng.standard_normal((d, d)) + rng.standard_normal(d)


@given(gradients(), POSITIVE)
def test_covariance_figures_are_blind_to_the_loss_scale(g_ND, scale):
    before, after = covariance_diagnostic(g_ND), covariance_diagnostic(scale * g_ND)
    for name in ("off_diagonal_ratio", "effective_rank", "mean_abs_correlation"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-8, abs=1e-9)


@given(gradients(), st.floats(-100, 100))
def test_covariance_figures_are_blind_to_a_common_gradient(g_ND, shift):
    before, after = covariance_diagnostic(g_ND), covariance_diagnostic(g_ND + shift)
    assert after.effective_rank == pytest.approx(before.effective_rank, rel=1e-6)


@given(gradients())
def test_covariance_figures_stay_in_their_ranges(g_ND):
    found = covariance_diagnostic(g_ND)
    assert 0.0 <= found.off_diagonal_ratio <= 1.0
    assert found.effective_rank <= g_ND.shape[1] * (1 + 1e-9)
    assert 0.0 <= found.mean_abs_correlation <= 1.0 + 1e-12


def test_independent_gradients_are_near_diagonal_even_from_few_samples():
    # 50 samples of 64 independent coordinates: the raw ratio would be about 63/50/(1 + 63/50) = 0.56.
    rng = np.random.default_rng(0)
    ratios = [covariance_diagnostic(rng.standard_normal((50, 64))).off_diagonal_ratio for _ in range(30)]
    # The debiased sum of 4032 squares has a spread of about sqrt(2 * 4032)/50 = 1.8 against a diagonal of 64.
    assert np.mean(ratios) < 0.04


def test_equally_correlated_gradients_have_their_known_figures():
    rng, d, rho = np.random.default_rng(0), 8, 0.5
    g_ND = math.sqrt(1 - rho) * rng.standard_normal((4000, d)) + math.sqrt(rho) * rng.standard_normal((4000, 1))
    found = covariance_diagnostic(g_ND)
    # Truth 7/4/(1 + 7/4), 64/(8 + 56/4) and 1/2; a correlation of 4000 samples has a spread of 0.012.
    assert found.off_diagonal_ratio == pytest.approx(7 / 11, abs=0.03)
    assert found.effective_rank == pytest.approx(64 / 22, abs=0.15)
    assert found.mean_abs_correlation == pytest.approx(0.5, abs=0.03)


def test_unequal_variances_lower_the_effective_rank_but_not_the_ratio():
    # Truth (4 + 1 + 1)^2/(16 + 1 + 1) = 2 with a spread of about 2 * sqrt(2/4000).
    g_ND = np.random.default_rng(0).standard_normal((4000, 3)) * [2.0, 1.0, 1.0]
    found = covariance_diagnostic(g_ND)
    assert found.effective_rank == pytest.approx(2.0, abs=0.15)
    assert found.off_diagonal_ratio < 0.01


def test_gradients_in_one_direction_have_rank_one():
    t_N = np.random.default_rng(0).standard_normal(2000)
    # The debiasing takes V/n = 2/2000 of each square: 0.1 %.
    assert covariance_diagnostic(np.outer(t_N, [1.0, -2.0, 3.0])).effective_rank == pytest.approx(1.0, abs=3e-3)


@pytest.mark.parametrize("g_ND", [np.outer([1.0, -1.0] * 10, [1.0, 2.0, 3.0]), np.array([[1.0, 2.0], [3.0, 4.0]])])
def test_the_effective_rank_is_at_least_one(g_ND):
    assert covariance_diagnostic(g_ND).effective_rank >= 1.0 - 1e-12


def test_one_coordinate_is_diagonal_of_rank_one():
    found = covariance_diagnostic(np.arange(5.0)[:, None])
    assert (found.off_diagonal_ratio, found.effective_rank, found.mean_abs_correlation) == (0.0, 1.0, 0.0)


def test_a_dead_coordinate_has_no_correlation():
    g_ND = np.random.default_rng(0).standard_normal((50, 1)) * [1.0, 1.0, 0.0]
    # Of the six ordered pairs two are fully correlated.
    assert covariance_diagnostic(g_ND).mean_abs_correlation == pytest.approx(1 / 3)


def test_equal_gradients_have_rank_zero():
    found = covariance_diagnostic(np.full((8, 3), 0.25))
    assert (found.off_diagonal_ratio, found.effective_rank, found.mean_abs_correlation) == (0.0, 0.0, 0.0)


def test_equal_gradients_have_rank_zero_though_their_mean_is_rounded():
    assert covariance_diagnostic(np.full((10, 3), 0.1)).effective_rank == 0.0
