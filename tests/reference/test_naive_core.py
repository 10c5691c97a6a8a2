"""The core against its naive twins, over random sizes.

Tolerances: both sides work in float64 on fewer than 1e4 well-scaled terms, so they agree to
about 1e-12; 1e-9 leaves room for the condition of random feature matrices. Figures that are
differences of larger ones (T, v1) are compared on the scale of what is subtracted.
"""

import math

import naive_core as naive
import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from growth_service.core.certificate import (
    ENOUGH_EXCEEDANCES,
    chaos_tail_bound,
    order_excess,
    student_quantile,
    transfer,
    u_statistic,
    wild_bootstrap_p_value,
)
from growth_service.core.frontier import Outcome, frontier
from growth_service.core.score import (
    GradientMoments,
    covariance_diagnostic,
    descent_direction,
    gradmax_score,
    partial_out,
    pool_inflation,
    saturation_score,
    whitener,
)

RIDGES = st.sampled_from([0.0, 1e-3, 1e-2, 0.5])
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def probes(draw):
    """g_NPD and phi_NPK: a few units with a few positions each; more rows than features."""
    rng = np.random.default_rng(draw(SEEDS))
    positions, width, features = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num = draw(st.integers(3 * features + 4, 3 * features + 8))
    phi_NPK = rng.standard_normal((num, positions, features)) * rng.uniform(0.5, 2.0, features)
    g_NPD = rng.standard_normal((num, positions, width)) + phi_NPK @ rng.standard_normal((features, width))
    return g_NPD, phi_NPK


@st.composite
def units(draw):
    """psi_NM with some mean, from a few units to a dozen."""
    rng = np.random.default_rng(draw(SEEDS))
    n, m = draw(st.integers(4, 12)), draw(st.integers(1, 8))
    return rng.standard_normal((n, m)) * rng.uniform(0.1, 3.0, m) + draw(st.sampled_from([0.0, 0.3, 3.0]))


def plain_score(g_NPD, phi_NPK, *, ridge):
    sigma_KK = naive.second_moment(phi_NPK)
    return saturation_score(naive.cross_gradient(g_NPD, phi_NPK), whitener(sigma_KK, ridge=ridge))


@given(probes(), RIDGES)
def test_the_score_is_what_least_squares_on_the_jacobian_explains(probe, ridge):
    assert plain_score(*probe, ridge=ridge) == pytest.approx(naive.score(*probe, ridge=ridge), rel=1e-9)


@given(probes())
def test_the_score_is_the_squared_norm_of_the_projected_gradient(probe):
    assert plain_score(*probe, ridge=0.0) == pytest.approx(naive.projected_norm_sq(*probe), rel=1e-9)


@given(probes())
def test_the_score_of_dependent_features_is_what_least_squares_explains(probe):
    g_NPD, phi_NPK = probe
    doubled_NPK = np.concatenate([phi_NPK, phi_NPK[:, :, :1], np.zeros_like(phi_NPK[:, :, :1])], axis=2)
    assert plain_score(g_NPD, doubled_NPK, ridge=0.0) == pytest.approx(
        naive.projected_norm_sq(g_NPD, doubled_NPK), rel=1e-9
    )


@given(probes(), RIDGES)
def test_the_descent_direction_is_minus_the_least_squares_weights(probe, ridge):
    g_NPD, phi_NPK = probe
    direction_DK = descent_direction(
        naive.cross_gradient(g_NPD, phi_NPK), whitener(naive.second_moment(phi_NPK), ridge=ridge)
    )
    wanted_DK = -naive.least_squares_weights(g_NPD, phi_NPK, ridge=ridge).reshape(direction_DK.shape)
    np.testing.assert_allclose(direction_DK, wanted_DK, rtol=1e-9, atol=1e-9 * np.abs(wanted_DK).max())


@given(probes())
def test_the_gradmax_score_adds_the_squared_entries(probe):
    cross_DK = naive.cross_gradient(*probe)
    assert gradmax_score(cross_DK) == pytest.approx(sum(x**2 for row in cross_DK for x in row), rel=1e-12)


@st.composite
def gated(draw):
    """g_NPD and phi_NPD: every row of the projection has its own feature."""
    rng = np.random.default_rng(draw(SEEDS))
    positions, width, num = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(10, 14))
    phi_NPD = rng.standard_normal((num, positions, width)) * rng.uniform(0.5, 2.0, width) + rng.uniform(-1, 1, width)
    return rng.standard_normal((num, positions, width)) + rng.uniform(-1, 1, width) * phi_NPD, phi_NPD


@given(gated(), RIDGES)
def test_rows_with_features_of_their_own_are_fitted_one_by_one(probe, ridge):
    cross_D2, weights_D2 = naive.gated_cross_gradient(*probe), naive.gated_weights(*probe, ridge=ridge)
    w = whitener(naive.gated_moments(probe[1]), ridge=ridge)
    assert saturation_score(cross_D2, w) == pytest.approx(naive.dot(cross_D2.ravel(), weights_D2.ravel()), rel=1e-9)
    np.testing.assert_allclose(
        descent_direction(cross_D2, w), -weights_D2, rtol=1e-9, atol=1e-9 * np.abs(weights_D2).max()
    )


@st.composite
def joint_probes(draw):
    """g_NPD, new features phi_NPK and existing ones phi_NPO, which are correlated."""
    g_NPD, new_NPK = draw(probes())
    rng = np.random.default_rng(draw(SEEDS))
    old = draw(st.integers(0, 3))
    mix_KO = rng.standard_normal((new_NPK.shape[2], old))
    old_NPO = rng.standard_normal((*new_NPK.shape[:2], old)) + new_NPK @ mix_KO
    return g_NPD, new_NPK, old_NPO


@given(joint_probes(), RIDGES)
def test_what_is_left_of_new_features_is_the_residual_of_least_squares(probe, ridge):
    g_NPD, new_NPK, old_NPO = probe
    joint_NPJ = np.concatenate([new_NPK, old_NPO], axis=2)
    keep_JK, rest_KK = partial_out(naive.second_moment(joint_NPJ), num_new=new_NPK.shape[2], ridge=ridge)
    left_NPK = naive.residual_features(new_NPK, old_NPO, ridge=ridge)
    scale = 1e-9 * np.abs(joint_NPJ).max() ** 2
    np.testing.assert_allclose(joint_NPJ @ keep_JK, left_NPK, rtol=1e-9, atol=scale)
    np.testing.assert_allclose(rest_KK, naive.second_moment(left_NPK), rtol=1e-9, atol=scale)
    np.testing.assert_allclose(
        naive.cross_gradient(g_NPD, joint_NPJ) @ keep_JK, naive.cross_gradient(g_NPD, left_NPK), rtol=1e-9, atol=scale
    )


@given(joint_probes())
def test_the_score_of_the_rest_is_what_the_joint_features_explain_beyond_the_old(probe):
    g_NPD, new_NPK, old_NPO = probe
    joint_NPJ = np.concatenate([new_NPK, old_NPO], axis=2)
    keep_JK, rest_KK = partial_out(naive.second_moment(joint_NPJ), num_new=new_NPK.shape[2], ridge=0.0)
    found = saturation_score(naive.cross_gradient(g_NPD, joint_NPJ) @ keep_JK, whitener(rest_KK, ridge=0.0))
    joint = naive.projected_norm_sq(g_NPD, joint_NPJ)
    old = naive.projected_norm_sq(g_NPD, old_NPO) if old_NPO.shape[2] else 0.0
    # A difference of projections, of features that are correlated up to 0.999: 1e-8 of the larger.
    assert found == pytest.approx(joint - old, rel=1e-8, abs=1e-8 * joint)


@given(probes(), SEEDS, RIDGES)
def test_inflation_is_the_mean_of_what_each_half_says_of_the_other(probe, seed, ridge):
    phi_NPK = probe[1]
    order_N = np.random.default_rng(seed).permutation(len(phi_NPK))
    halves = [naive.second_moment(phi_NPK[part]) for part in np.array_split(order_N, 2)]
    assert pool_inflation(*halves, ridge=ridge) == pytest.approx(naive.pool_inflation(*halves, ridge=ridge), rel=1e-8)


@given(probes(), st.sampled_from([1e-3, 0.5]))
def test_the_plug_in_score_is_the_norm_of_the_mean_whitened_unit(probe, ridge):
    psi_NM = naive.whitened_units(*probe, naive.second_moment(probe[1]), ridge=ridge)
    assert plain_score(*probe, ridge=ridge) == pytest.approx(naive.plug_in(psi_NM), rel=1e-9)


@given(units())
def test_t_is_the_mean_over_pairs(psi_NM):
    scale = np.square(psi_NM).sum() / len(psi_NM)
    assert u_statistic(psi_NM @ psi_NM.T).value == pytest.approx(naive.u_statistic(psi_NM), rel=1e-9, abs=1e-9 * scale)


@given(units())
def test_h2_is_the_mean_squared_inner_product_over_pairs(psi_NM):
    assert u_statistic(psi_NM @ psi_NM.T).cov_frobenius_sq == pytest.approx(naive.h2(psi_NM), rel=1e-9)


@given(units())
def test_the_noise_floor_is_that_of_the_pairs(psi_NM):
    assert u_statistic(psi_NM @ psi_NM.T).noise_sd == pytest.approx(naive.noise_sd(psi_NM), rel=1e-9)


@given(units())
def test_v1_is_the_variance_of_the_row_means_without_its_noise(psi_NM):
    found, h2 = u_statistic(psi_NM @ psi_NM.T).first_order_variance, naive.h2(psi_NM)
    assert found == pytest.approx(naive.v1(psi_NM), rel=1e-9, abs=1e-9 * h2)


@given(units())
def test_the_standard_error_adds_both_orders(psi_NM):
    found = u_statistic(psi_NM @ psi_NM.T).standard_error
    assert found == pytest.approx(naive.standard_error(psi_NM), rel=1e-9)


@given(units())
def test_the_trace_is_that_of_the_covariance_matrix(psi_NM):
    found, wanted = u_statistic(psi_NM @ psi_NM.T).cov_trace, np.trace(naive.covariance(psi_NM))
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9 * np.square(psi_NM).sum())


@given(units())
def test_the_largest_eigenvalue_is_the_least_of_three_upper_estimates(psi_NM):
    # Sixth powers: a sum over walks is exact to rounding, its sixth root near zero is not.
    found, wanted = u_statistic(psi_NM @ psi_NM.T).cov_largest, naive.largest_eigenvalue(psi_NM)
    scale = np.square(psi_NM).sum() ** 6
    assert found**6 == pytest.approx(wanted**6, rel=1e-9, abs=1e-12 * scale)


def test_each_of_the_three_estimates_is_the_least_somewhere():
    least = set()
    for seed in (*range(60), 233):
        rng = np.random.default_rng(seed)
        psi_NM = rng.standard_normal((int(rng.integers(4, 15)), int(rng.integers(1, 5)))) + (seed % 3)
        three = naive.upper_estimates(psi_NM)
        least.add(three.index(min(three)))
        assert u_statistic(psi_NM @ psi_NM.T).cov_largest == pytest.approx(min(three), rel=1e-9)
    assert least == {0, 1, 2}  # else the twin above would not see a change of one of them


def test_where_rows_are_many_the_samples_own_largest_eigenvalue_is_the_least():
    # Of few rows it is the Schatten norm; here that is 20^(1/4) = 2.1 against (1 + sqrt(20/200))^2 = 1.7.
    psi_NM = np.random.default_rng(0).standard_normal((200, 20))
    own = float(np.linalg.eigvalsh(np.cov(psi_NM.T))[-1])
    assert u_statistic(psi_NM @ psi_NM.T).cov_largest == pytest.approx(own, rel=1e-9)


@given(units())
def test_the_effective_rank_is_trace_squared_over_the_squared_norm(psi_NM):
    scale = np.square(psi_NM).sum() ** 2 / naive.h2(psi_NM)
    found = u_statistic(psi_NM @ psi_NM.T).effective_rank
    assert found == pytest.approx(naive.effective_rank(psi_NM), rel=1e-9, abs=1e-12 * scale)


@given(units(), st.sampled_from([0.2, 0.05, 0.001]))
def test_the_upper_limit_solves_its_equation(psi_NM, level):
    q = student_quantile(1 - level, degrees=len(psi_NM) - 1)
    assert u_statistic(psi_NM @ psi_NM.T).upper_limit(level) == pytest.approx(
        naive.upper_limit(psi_NM, quantile=q), rel=1e-6, abs=1e-9 * np.square(psi_NM).sum()
    )


@given(units(), st.sampled_from([0.2, 0.05, 0.001]))
def test_the_lower_limit_solves_its_equation(psi_NM, level):
    q = student_quantile(1 - level, degrees=len(psi_NM) - 1)
    wanted = naive.lower_limit(psi_NM, quantile=q)
    scale = np.square(psi_NM).sum()
    assert u_statistic(psi_NM @ psi_NM.T).lower_limit(level) == pytest.approx(wanted, rel=1e-9, abs=1e-9 * scale)


@given(units(), st.sampled_from([0.2, 0.05, 0.01]))
def test_limits_take_students_quantile_of_one_degree_less_than_units(psi_NM, level):
    assume(len(psi_NM) >= 6)
    # The expansion is stated to be 1 % off at most from 5 degrees of freedom on for p <= 0.99; distances
    # from T are between proportional to the quantile and, where one term rules the root, to its square.
    q, t = float(scipy.stats.t.ppf(1 - level, len(psi_NM) - 1)), naive.u_statistic(psi_NM)
    found = u_statistic(psi_NM @ psi_NM.T)
    low, high = naive.lower_limit(psi_NM, quantile=q), naive.upper_limit(psi_NM, quantile=q)
    assert found.lower_limit(level) == pytest.approx(low, abs=0.02 * (t - low))
    assert found.upper_limit(level) == pytest.approx(high, abs=0.02 * (high - max(t, 0.0)))


@given(units(), SEEDS)
def test_a_sketch_blurs_the_noise_and_not_the_signal(psi_NM, seed):
    m = psi_NM.shape[1]
    sketched_NM = psi_NM @ np.random.default_rng(seed).standard_normal((m, m + 1)) / math.sqrt(m + 1)
    exact = naive.plug_in(psi_NM)
    gram_NN = sketched_NM @ sketched_NM.T
    found, without = u_statistic(gram_NN, plug_in=exact), u_statistic(gram_NN)
    scale = (np.square(psi_NM).sum() + np.square(sketched_NM).sum()) * 1e-9
    assert found.value == pytest.approx(naive.u_statistic_from_plug_in(exact, sketched_NM), rel=1e-9, abs=scale)
    assert (found.noise_sd, found.standard_error) == (without.noise_sd, without.standard_error)


@given(units())
def test_without_a_sketch_the_exact_plug_in_score_changes_nothing(psi_NM):
    found = u_statistic(psi_NM @ psi_NM.T, plug_in=naive.plug_in(psi_NM))
    assert found.value == pytest.approx(naive.u_statistic(psi_NM), rel=1e-9, abs=1e-9 * np.square(psi_NM).sum())


@given(units(), st.integers(1, 7))
def test_the_bias_of_chunk_means_is_counted_in_units(psi_NM, size):
    # Rows stand for means over chunks of ``size`` units: one unit varies ``size`` times as much.
    n = len(psi_NM)
    found, plain = (u_statistic(psi_NM @ psi_NM.T, num_samples=num) for num in (n * size, None))
    assert found.cov_trace == pytest.approx(size * np.trace(naive.covariance(psi_NM)), rel=1e-9, abs=1e-9)
    assert (found.effective_rank, found.noise_sd) == pytest.approx((plain.effective_rank, plain.noise_sd), rel=1e-12)
    assert (found.num_samples, found.num_rows) == (n * size, n)


@given(units())
def test_order_excess_is_how_far_neighbours_agree_more_than_all(psi_NM):
    gram_NN = psi_NM @ psi_NM.T
    found = order_excess(gram_NN, u_statistic(gram_NN))
    assert found == pytest.approx(naive.order_excess(psi_NM), rel=1e-9, abs=1e-9)


def signs_of(seed, *, num, n):
    return np.random.default_rng(seed).integers(0, 2, size=(num, n)) * 2.0 - 1.0


@given(SEEDS, st.integers(11, 14), st.sampled_from([1, 50, 99, 300]), st.sampled_from([0.1, 0.4]))
def test_the_bootstrap_counts_the_flips_that_reach_the_observed_sum(seed, n, max_resamples, shift):
    psi_NM = np.random.default_rng(seed).standard_normal((n, 3)) + shift
    signs_BN = signs_of(seed, num=max_resamples, n=n)
    # All-equal signs give the observed sum itself, up to rounding: such ties have their own test below.
    assume(not (np.abs(signs_BN.sum(axis=1)) == n).any())
    found = wild_bootstrap_p_value(psi_NM @ psi_NM.T, max_resamples=max_resamples, seed=seed)
    wanted = naive.wild_bootstrap_p_value(psi_NM, signs_BN, enough=ENOUGH_EXCEEDANCES)
    assert found.value == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("max_resamples", [255, 256, 257, 1025, 4000])
def test_the_bootstrap_approaches_the_share_of_all_flips(max_resamples):
    psi_NM = np.random.default_rng(6).standard_normal((12, 3)) + 0.55
    exact = naive.wild_bootstrap_exact(psi_NM)
    assert 1e-3 < exact < 4e-3  # too small to stop early, large enough to be counted
    found = wild_bootstrap_p_value(psi_NM @ psi_NM.T, max_resamples=max_resamples, seed=1)
    # p is a mean of B draws of probability `exact`: 4 standard errors, and 1/(B+1) for the observed one.
    assert abs(found.value - exact) < 4 * math.sqrt(exact / max_resamples) + 1 / max_resamples


@pytest.mark.parametrize(("seed", "shift"), [(0, 0.0), (8, 0.55)])  # p near 1/2 and near 0.03: first and third block
def test_the_bootstrap_stops_at_the_exceedance_that_settles_it(seed, shift):
    psi_NM = np.random.default_rng(seed).standard_normal((12, 3)) + shift
    signs_BN = signs_of(5, num=1500, n=12)
    found = wild_bootstrap_p_value(psi_NM @ psi_NM.T, max_resamples=10**6, seed=5)
    wanted = naive.wild_bootstrap_p_value(psi_NM, signs_BN, enough=ENOUGH_EXCEEDANCES)
    settled = round(ENOUGH_EXCEEDANCES / wanted)
    assert not (np.abs(signs_BN[:settled].sum(axis=1)) == 12).any()  # no tie: see the test of ties
    assert found.value == pytest.approx(wanted, rel=1e-12)
    assert settled <= found.resamples < 1500


def test_a_tie_of_the_bootstrap_counts_as_reaching_the_observed_sum():
    # With 4 units the two all-equal flips tie in 1/8 of the draws, so p can never be far below 1/8.
    for seed in range(20):
        psi_NM = np.random.default_rng(seed).standard_normal((4, 3)) + 5.0
        found = wild_bootstrap_p_value(psi_NM @ psi_NM.T, max_resamples=999, seed=seed)
        # The 20th tie comes after 160 draws, give or take 4 * 33.
        assert found.value > 20 / 292


@given(SEEDS, st.integers(10, 12), st.sampled_from([2.0, 5.0, 50.0]))
@settings(max_examples=10)  # each takes all 2^n flips
def test_the_tail_bound_is_above_the_share_of_all_flips(seed, n, shift):
    psi_NM = np.random.default_rng(seed).standard_normal((n, 2)) + shift
    # n = 10 units reach a ratio of sqrt(10 * 9/2) = 6.7 at most: above 2 e, where the bound says something.
    bound = chaos_tail_bound(naive.u_statistic(psi_NM) / naive.noise_sd(psi_NM))
    assert naive.wild_bootstrap_exact(psi_NM) <= bound


@given(SEEDS, st.integers(12, 60), st.floats(0.01, 10.0), st.sampled_from([0.2, 0.05, 0.01]))
def test_transfer_limits_are_students(seed, n, train_score, level):
    projections_N = np.random.default_rng(seed).standard_normal(n) + 0.2
    found = transfer(projections_N, train_score=train_score, level=level)
    mean, lower, upper = naive.transfer(projections_N, train_score=train_score, level=level)
    assert found.value == pytest.approx(mean, rel=1e-9, abs=1e-12)
    # The quantile is an expansion: below 1e-5 off from 11 degrees of freedom on for p <= 0.99.
    half = upper - mean
    assert found.upper == pytest.approx(upper, abs=1e-5 * half)
    assert found.lower == pytest.approx(lower, abs=1e-5 * half)


@given(SEEDS, st.integers(3, 14), st.integers(2, 6))
def test_the_covariance_figures_are_those_of_the_entries(seed, n, d):
    rng = np.random.default_rng(seed)
    g_ND = rng.standard_normal((n, d)) @ rng.standard_normal((d, d)) + rng.standard_normal(d)
    found = covariance_diagnostic(GradientMoments.of(g_ND))
    ratio, rank, correlation = naive.covariance_diagnostic(g_ND)
    assert found.off_diagonal_ratio == pytest.approx(ratio, rel=1e-9, abs=1e-9)
    assert found.effective_rank == pytest.approx(rank, rel=1e-9)
    assert found.mean_abs_correlation == pytest.approx(correlation, rel=1e-9)


AXIS = st.sampled_from([0.5, 1.0, 2.0, 3.0, math.inf, math.nan])


@given(st.lists(st.tuples(st.sampled_from("abcdef"), AXIS, AXIS), max_size=8))
def test_the_frontier_is_exactly_the_unbeaten(points):
    assert set(map(tuple, frontier([Outcome(*p) for p in points]))) == naive.frontier(points)
