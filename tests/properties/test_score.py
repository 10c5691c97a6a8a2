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
    GradientMoments,
    covariance_diagnostic,
    descent_direction,
    gradmax_score,
    kappa,
    partial_out,
    pool_inflation,
    predicted_gain,
    saturation_score,
    whitener,
)

SEEDS = st.integers(0, 2**32 - 1)
RIDGES = st.sampled_from([0.0, 1e-9, 1e-8, 1e-3, 0.1, 1.0])  # eigenvectors below 1e-8, a triangular root from there
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
    product_KK = w.inv_sqrt @ w.inv_sqrt.T @ (sigma_KK + lam * np.eye(len(sigma_KK)))
    # Condition numbers here stay below 1e4: 1e-9 is 1e4 * 2^-53 with room.
    np.testing.assert_allclose(product_KK, np.eye(len(sigma_KK)), atol=1e-9)


@given(probes(), RIDGES)
def test_whitened_features_have_the_unit_moment_but_for_the_ridge(probe, ridge):
    sigma_KK = moments(probe)[1]
    w = whitener(sigma_KK, ridge=ridge)
    ridged_KK = sigma_KK + w.ridge_lambda * np.eye(len(sigma_KK))
    np.testing.assert_allclose(w.inv_sqrt.T @ ridged_KK @ w.inv_sqrt, np.eye(len(sigma_KK)), atol=1e-9)


@given(probes(), st.sampled_from([0.0, 1e-9]))
def test_the_whitener_from_eigenvectors_is_symmetric(probe, ridge):
    q_KK = whitener(moments(probe)[1], ridge=ridge).inv_sqrt
    np.testing.assert_allclose(q_KK, q_KK.T, rtol=1e-12, atol=1e-12 * np.abs(q_KK).max())


@pytest.mark.parametrize("k", [47, 48, 49, 97, 130, 193])
def test_a_moment_of_many_features_is_inverted_by_halves(k):
    # Odd and even halves, one level and two. Condition about 1e3/1e-2.
    rng = np.random.default_rng(k)
    x_NK = rng.standard_normal((3 * k, k)) * np.logspace(0, -1, k)
    sigma_KK = x_NK.T @ x_NK / len(x_NK)
    w = whitener(sigma_KK, ridge=1e-2)
    ridged_KK = sigma_KK + w.ridge_lambda * np.eye(k)
    np.testing.assert_allclose(w.inv_sqrt @ w.inv_sqrt.T @ ridged_KK, np.eye(k), atol=1e-10)
    np.testing.assert_array_equal(w.inv_sqrt, np.triu(w.inv_sqrt))
    assert w.effective_dimension == pytest.approx(np.trace(np.linalg.solve(ridged_KK, sigma_KK)), rel=1e-10)


def test_without_a_ridge_a_pseudo_inverse_is_taken_of_dependent_features():
    rng = np.random.default_rng(0)
    x_NK = rng.standard_normal((40, 3)) @ rng.standard_normal((3, 6))
    sigma_KK = x_NK.T @ x_NK / 40
    w = whitener(sigma_KK, ridge=0.0)
    assert (w.rank, w.effective_dimension) == (3, pytest.approx(3.0))
    np.testing.assert_allclose(
        w.inv_sqrt @ w.inv_sqrt.T, np.linalg.pinv(sigma_KK, rcond=1e-10, hermitian=True), rtol=1e-8, atol=1e-8
    )


@given(probes(), RIDGES, SEEDS)
def test_back_of_whitened_is_the_cross_gradient_over_the_moment(probe, ridge, seed):
    sigma_KK = moments(probe)[1]
    w = whitener(sigma_KK, ridge=ridge)
    some_DK = np.random.default_rng(seed).standard_normal((3, len(sigma_KK)))
    wanted_DK = np.linalg.solve(sigma_KK + w.ridge_lambda * np.eye(len(sigma_KK)), some_DK.T).T
    np.testing.assert_allclose(
        w.back(w.whiten(some_DK)), wanted_DK, rtol=1e-8, atol=1e-8 * max(np.abs(wanted_DK).max(), 1)
    )


@st.composite
def gates(draw):
    """cross_DK and sigma_DKK: each of the D rows has K features of its own."""
    rng = np.random.default_rng(draw(SEEDS))
    d, k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    phi_NDK = rng.standard_normal((20, d, k)) * rng.uniform(0.3, 3.0, (d, k))
    return rng.standard_normal((d, k)), np.einsum("ndk,ndl->dkl", phi_NDK, phi_NDK) / 20


@given(gates(), RIDGES)
def test_rows_with_features_of_their_own_are_whitened_one_by_one(gate, ridge):
    cross_DK, sigma_DKK = gate
    w, rows = whitener(sigma_DKK, ridge=ridge), [whitener(s, ridge=ridge) for s in sigma_DKK]
    assert w.inv_sqrt.shape == sigma_DKK.shape
    assert w.rank == sum(r.rank for r in rows)
    assert w.effective_dimension == pytest.approx(sum(r.effective_dimension for r in rows), rel=1e-12)
    assert w.ridge_lambda == pytest.approx(np.mean([r.ridge_lambda for r in rows]), rel=1e-12, abs=1e-300)
    each = [(cross_DK[i : i + 1], r) for i, r in enumerate(rows)]
    assert saturation_score(cross_DK, w) == pytest.approx(sum(saturation_score(*e) for e in each), rel=1e-12)
    np.testing.assert_allclose(
        descent_direction(cross_DK, w), np.concatenate([descent_direction(*e) for e in each]), rtol=1e-12
    )


@given(gates(), RIDGES)
def test_rows_of_equal_features_are_whitened_as_shared_ones(gate, ridge):
    cross_DK, sigma_DKK = gate
    shared, own = whitener(sigma_DKK[0], ridge=ridge), whitener(np.repeat(sigma_DKK[:1], len(cross_DK), 0), ridge=ridge)
    assert saturation_score(cross_DK, own) == pytest.approx(saturation_score(cross_DK, shared), rel=1e-12)
    assert own.effective_dimension == pytest.approx(len(cross_DK) * shared.effective_dimension, rel=1e-12)


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
    np.testing.assert_allclose(whitener(np.diag([4.0, 0.25]), ridge=0.0).inv_sqrt, np.diag([0.5, 2.0]), atol=1e-15)


def test_dead_features_leave_the_rank_of_the_living():
    w = whitener(np.diag([4.0, 0.0, 1.0]), ridge=0.0)
    assert (w.rank, w.effective_dimension) == (2, 2.0)


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_features_that_are_all_zero_express_nothing(ridge):
    w = whitener(np.zeros((3, 3)), ridge=ridge)
    assert (w.rank, w.effective_dimension, w.ridge_lambda) == (0, 0.0, 0.0)
    assert not w.inv_sqrt.any()


def test_rounding_below_zero_is_taken_for_zero():
    w = whitener(np.diag([1.0, -1e-14]), ridge=0.0)
    np.testing.assert_array_equal(w.inv_sqrt, np.diag([1.0, 0.0]))


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


@given(probes(), POSITIVE)
def test_the_gradmax_score_changes_with_the_scale_of_features_and_the_score_does_not(probe, scale):
    g_ND, phi_NK = probe
    one, other = moments(probe), moments((g_ND, scale * phi_NK))
    assert gradmax_score(other[0]) == pytest.approx(scale**2 * gradmax_score(one[0]), rel=1e-12)


def test_the_gradmax_score_is_the_squared_norm_of_the_cross_gradient():
    assert gradmax_score(np.array([[3.0, 0.0], [0.0, -4.0]])) == 25.0


# --- existing features ----------------------------------------------------------------------------


@st.composite
def joint(draw):
    """cross_DJ, sigma_JJ, num_new: correlated new and existing features, the new ones first."""
    rng = np.random.default_rng(draw(SEEDS))
    new, old, d = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 3))
    phi_NJ = rng.standard_normal((40, new + old)) @ (np.eye(new + old) + 0.5 * rng.standard_normal((new + old,) * 2))
    g_ND = rng.standard_normal((40, d)) + phi_NJ @ rng.standard_normal((new + old, d))
    return g_ND.T @ phi_NJ / 40, phi_NJ.T @ phi_NJ / 40, new


@given(joint())
def test_what_is_left_of_new_features_is_uncorrelated_with_the_existing_ones(found):
    _, sigma_JJ, num_new = found
    keep_JK, rest_KK = partial_out(sigma_JJ, num_new=num_new, ridge=0.0)
    np.testing.assert_allclose(sigma_JJ[num_new:] @ keep_JK, 0.0, atol=1e-9 * np.abs(sigma_JJ).max())
    np.testing.assert_array_equal(keep_JK[:num_new], np.eye(num_new))
    np.testing.assert_array_equal(rest_KK, rest_KK.T)


@given(joint(), RIDGES)
def test_the_moment_of_the_rest_is_that_of_the_mapped_features(found, ridge):
    _, sigma_JJ, num_new = found
    keep_JK, rest_KK = partial_out(sigma_JJ, num_new=num_new, ridge=ridge)
    np.testing.assert_allclose(rest_KK, keep_JK.T @ sigma_JJ @ keep_JK, rtol=1e-9, atol=1e-12 * np.abs(sigma_JJ).max())
    assert np.linalg.eigvalsh(rest_KK)[0] > -1e-9 * np.abs(sigma_JJ).max()
    assert np.trace(rest_KK) <= np.trace(sigma_JJ[:num_new, :num_new]) * (1 + 1e-9)


@given(joint())
def test_the_rest_adds_what_the_joint_features_reach_beyond_the_existing_ones(found):
    cross_DJ, sigma_JJ, num_new = found
    keep_JK, rest_KK = partial_out(sigma_JJ, num_new=num_new, ridge=0.0)
    rest = saturation_score(cross_DJ @ keep_JK, whitener(rest_KK, ridge=0.0))
    both = saturation_score(cross_DJ, whitener(sigma_JJ, ridge=0.0))
    old = saturation_score(cross_DJ[:, num_new:], whitener(sigma_JJ[num_new:, num_new:], ridge=0.0))
    # Condition numbers below 1e6 here, of a score that is a difference: 1e-7 of the larger.
    assert rest == pytest.approx(both - old, rel=1e-7, abs=1e-7 * both)


@given(joint(), RIDGES)
def test_without_existing_features_nothing_is_taken_off(found, ridge):
    _, sigma_JJ, _ = found
    keep_JK, rest_KK = partial_out(sigma_JJ, num_new=len(sigma_JJ), ridge=ridge)
    np.testing.assert_array_equal(keep_JK, np.eye(len(sigma_JJ)))
    np.testing.assert_allclose(rest_KK, sigma_JJ, rtol=1e-12)


def test_copies_of_existing_features_leave_nothing_not_even_rounding():
    sigma_KK = np.array([[2.0, 0.5], [0.5, 1.0]])
    keep_JK, rest_KK = partial_out(np.block([[sigma_KK, sigma_KK], [sigma_KK, sigma_KK]]), num_new=2, ridge=0.0)
    np.testing.assert_array_equal(keep_JK, np.zeros((4, 2)))
    np.testing.assert_array_equal(rest_KK, np.zeros((2, 2)))


def test_of_a_copy_and_a_feature_of_its_own_the_second_is_left():
    own_NJ = np.random.default_rng(0).normal(size=(50, 3))
    joint_NJ = np.stack(
        [own_NJ[:, 0], own_NJ[:, 1], own_NJ[:, 0], own_NJ[:, 2]], axis=1
    )  # new: a copy and one of its own
    keep_JK, rest_KK = partial_out(joint_NJ.T @ joint_NJ / 50, num_new=2, ridge=0.0)
    old_NJ = joint_NJ[:, 2:]
    left_N = own_NJ[:, 1] - old_NJ @ np.linalg.lstsq(old_NJ, own_NJ[:, 1])[0]
    np.testing.assert_allclose(joint_NJ @ keep_JK, np.stack([np.zeros(50), left_N], axis=1), atol=1e-12)
    np.testing.assert_allclose(rest_KK, np.diag([0.0, float(np.square(left_N).mean())]), atol=1e-12)


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


def test_halves_of_known_moments_give_about_half_of_the_mean_excess():
    # tr(A^-1 B)/2 = (2 + 4)/2 = 3 and tr(B^-1 A)/2 = (1/2 + 1/4)/2 = 3/8: mean excess e = 0.6875, e/(2 + e) for the
    # whole pool.
    found = pool_inflation(np.diag([1.0, 1.0]), np.diag([2.0, 4.0]), ridge=0.0)
    assert found == pytest.approx(1 + 0.6875 / 2.6875, rel=1e-12)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_inflation_is_a_share_of_the_features_that_the_ridge_leaves(shape):
    # A = I with lambda 1: tr(B/2) = 2 over an effective dimension of 1. B = 2 I with lambda 2: tr(A/4) = 1/2
    # over 1. Mean excess e = 1/4; over the number of features instead, there would be none.
    a, b = (np.broadcast_to(m, (*shape, 2, 2)) for m in (np.eye(2), 2 * np.eye(2)))
    assert pool_inflation(a, b, ridge=1.0) == pytest.approx(1 + 0.25 / 2.25, rel=1e-12)


@given(gates(), RIDGES)
def test_the_inflation_of_rows_with_features_of_their_own_is_over_all_of_them(gate, ridge):
    a_DKK, b_DKK = gate[1], gate[1] + np.eye(gate[1].shape[-1])
    excess = []
    for fit_DKK, held_DKK in ((a_DKK, b_DKK), (b_DKK, a_DKK)):
        inverses = [np.linalg.inv(f + ridge * np.diag(f).mean() * np.eye(len(f))) for f in fit_DKK]
        reached = sum(np.trace(i @ h) for i, h in zip(inverses, held_DKK, strict=True))
        excess.append(reached / sum(np.trace(i @ f) for i, f in zip(inverses, fit_DKK, strict=True)) - 1)
    e = max(0.0, np.mean(excess))
    assert pool_inflation(a_DKK, b_DKK, ridge=ridge) == pytest.approx(1 + e / (2 + e), rel=1e-9)


@pytest.mark.parametrize(("k", "excess"), [(160, (1.0 - 0.5) / 2), (161, 1.0)])
def test_above_160_features_one_half_is_enough(k, excess):
    # B = 2 A: an excess of 1 seen from A, of -1/2 seen from B.
    found = pool_inflation(np.eye(k), 2 * np.eye(k), ridge=0.0)
    assert found == pytest.approx(1 + excess / (2 + excess), rel=1e-12)


def test_a_half_that_looks_too_large_does_not_deflate_scores():
    # B = A/2 looks like an excess of -1/2 where only one half is looked at.
    assert pool_inflation(np.eye(161), 0.5 * np.eye(161), ridge=0.0) == 1.0


# Exact for Gaussian features without a ridge: with e = (k+1)/(n/2-k-1) the excess of a half, e/(2 + e) is (k+1)/(n-k-1),
# that of the whole. The bounds are 4 standard errors of the mean difference over 150 pools (1.3, 0.82 and 0.50 %).
@pytest.mark.parametrize("ridge", [0.0, 1e-3])
@pytest.mark.parametrize(("pool", "bound"), [(100, 0.013), (200, 0.0085), (400, 0.0055)])
def test_two_halves_predict_the_inflation_of_the_whole_pool(pool, bound, ridge):
    rng, k = np.random.default_rng(pool), 20
    root_KK = np.linalg.qr(rng.standard_normal((k, k)))[0] * np.sqrt(np.logspace(0, -2, k))
    sigma_KK = root_KK @ root_KK.T
    exact = whitener(sigma_KK, ridge=ridge).effective_dimension
    true, predicted = [], []
    for _ in range(150):
        a_KK, b_KK = halves(rng, root_KK, pool)
        q_KK = whitener((a_KK + b_KK) / 2, ridge=ridge).inv_sqrt
        true.append((q_KK @ q_KK.T * sigma_KK).sum() / exact)
        predicted.append(pool_inflation(a_KK, b_KK, ridge=ridge))
    assert abs(np.mean(predicted) / np.mean(true) - 1) < bound


# --- the covariance of gradients ------------------------------------------------------------------


def covariance(g_ND):
    return covariance_diagnostic(GradientMoments.of(g_ND))


def test_moments_of_known_gradients():
    found = GradientMoments.of(np.array([[1.0, 2.0], [3.0, -1.0]]))
    np.testing.assert_array_equal(found.first_D, [4.0, 1.0])
    np.testing.assert_array_equal(found.second_DD, [[10.0, -1.0], [-1.0, 5.0]])
    np.testing.assert_array_equal(found.third_DD, [[28.0, -7.0], [7.0, 7.0]])  # of g_i^2 g_j: 1 * 2 + 9 * -1
    np.testing.assert_array_equal(found.fourth_DD, [[82.0, 13.0], [13.0, 17.0]])


@pytest.mark.parametrize("num", [0, 1])
def test_fewer_than_two_gradients_have_no_covariance(num):
    found = covariance(np.ones((num, 3)))
    assert (found.off_diagonal_ratio, found.effective_rank, found.mean_abs_correlation) == (0.0, 0.0, 0.0)


@st.composite
def gradients(draw):
    rng = np.random.default_rng(draw(SEEDS))
    n, d = draw(st.integers(20, 60)), draw(st.integers(1, 8))
    return rng.standard_normal((n, d)) @ rng.standard_normal((d, d)) + rng.standard_normal(d)


@given(gradients(), POSITIVE)
def test_covariance_figures_are_blind_to_the_loss_scale(g_ND, scale):
    before, after = covariance(g_ND), covariance(scale * g_ND)
    for name in ("off_diagonal_ratio", "effective_rank", "mean_abs_correlation"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-8, abs=1e-9)


@given(gradients(), st.floats(-100, 100))
def test_covariance_figures_are_blind_to_a_common_gradient(g_ND, shift):
    before, after = covariance(g_ND), covariance(g_ND + shift)
    assert after.effective_rank == pytest.approx(before.effective_rank, rel=1e-6)


@given(gradients())
def test_covariance_figures_stay_in_their_ranges(g_ND):
    found = covariance(g_ND)
    assert 0.0 <= found.off_diagonal_ratio <= 1.0
    assert found.effective_rank <= g_ND.shape[1] * (1 + 1e-9)
    assert 0.0 <= found.mean_abs_correlation <= 1.0 + 1e-12


def test_independent_gradients_are_near_diagonal_even_from_few_samples():
    # 50 samples of 64 independent coordinates: the raw ratio would be about 63/50/(1 + 63/50) = 0.56.
    rng = np.random.default_rng(0)
    ratios = [covariance(rng.standard_normal((50, 64))).off_diagonal_ratio for _ in range(30)]
    # The debiased sum of 4032 squares has a spread of about sqrt(2 * 4032)/50 = 1.8 against a diagonal of 64.
    assert np.mean(ratios) < 0.04


def test_equally_correlated_gradients_have_their_known_figures():
    rng, d, rho = np.random.default_rng(0), 8, 0.5
    g_ND = math.sqrt(1 - rho) * rng.standard_normal((4000, d)) + math.sqrt(rho) * rng.standard_normal((4000, 1))
    found = covariance(g_ND)
    # Truth 7/4/(1 + 7/4), 64/(8 + 56/4) and 1/2; a correlation of 4000 samples has a spread of 0.012.
    assert found.off_diagonal_ratio == pytest.approx(7 / 11, abs=0.03)
    assert found.effective_rank == pytest.approx(64 / 22, abs=0.15)
    assert found.mean_abs_correlation == pytest.approx(0.5, abs=0.03)


def test_unequal_variances_lower_the_effective_rank_but_not_the_ratio():
    # Truth (4 + 1 + 1)^2/(16 + 1 + 1) = 2 with a spread of about 2 * sqrt(2/4000).
    g_ND = np.random.default_rng(0).standard_normal((4000, 3)) * [2.0, 1.0, 1.0]
    found = covariance(g_ND)
    assert found.effective_rank == pytest.approx(2.0, abs=0.15)
    assert found.off_diagonal_ratio < 0.01


def test_gradients_in_one_direction_have_rank_one():
    t_N = np.random.default_rng(0).standard_normal(2000)
    # The debiasing takes V/n = 2/2000 of each square: 0.1 %.
    assert covariance(np.outer(t_N, [1.0, -2.0, 3.0])).effective_rank == pytest.approx(1.0, abs=3e-3)


@pytest.mark.parametrize("g_ND", [np.outer([1.0, -1.0] * 10, [1.0, 2.0, 3.0]), np.array([[1.0, 2.0], [3.0, 4.0]])])
def test_the_effective_rank_is_at_least_one(g_ND):
    assert covariance(g_ND).effective_rank >= 1.0 - 1e-12


def test_one_coordinate_is_diagonal_of_rank_one():
    found = covariance(np.arange(5.0)[:, None])
    assert (found.off_diagonal_ratio, found.effective_rank, found.mean_abs_correlation) == (0.0, 1.0, 0.0)


def test_a_dead_coordinate_has_no_correlation():
    g_ND = np.random.default_rng(0).standard_normal((50, 1)) * [1.0, 1.0, 0.0]
    # Of the six ordered pairs two are fully correlated.
    assert covariance(g_ND).mean_abs_correlation == pytest.approx(1 / 3)


def test_equal_gradients_have_rank_zero():
    found = covariance(np.full((8, 3), 0.25))
    assert (found.off_diagonal_ratio, found.effective_rank, found.mean_abs_correlation) == (0.0, 0.0, 0.0)


def test_equal_gradients_have_rank_zero_though_their_mean_is_rounded():
    assert covariance(np.full((10, 3), 0.1)).effective_rank == 0.0
