"""Certificates: exact identities, known cases, and what the promises of coverage are worth.

Shape legend: N = independent units, M = numbers per unit.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from growth_service.core.certificate import (
    Gains,
    Transfer,
    UStatistic,
    _schatten_four,
    _schatten_six,
    candidate_verdict,
    certificate_flops,
    chaos_tail_bound,
    half_gain_samples,
    network_verdict,
    order_excess,
    realisable_share,
    significance,
    student_quantile,
    transfer,
    u_statistic,
    wild_bootstrap_p_value,
)

SEEDS = st.integers(0, 2**32 - 1)
LEVELS = st.sampled_from([0.4, 0.05, 1e-3, 1e-6])
T95 = {d: student_quantile(0.95, degrees=d) for d in range(3, 30)}
"""Held against scipy's in a test of its own below."""


@st.composite
def units(draw):
    rng = np.random.default_rng(draw(SEEDS))
    n, m = draw(st.integers(4, 30)), draw(st.integers(1, 40))
    return rng.standard_normal((n, m)) * draw(st.sampled_from([1e-3, 1.0, 50.0])) + draw(
        st.sampled_from([0.0, 0.2, 2.0])
    )


def of(psi_NM):
    return u_statistic(psi_NM @ psi_NM.T)


def statistic(**changes):
    """Figures with simple roots: n = 4, noise floor sqrt(2 * 6/12) = 1."""
    plain = {
        "value": 2.0,
        "num_rows": 4,
        "num_samples": 4,
        "cov_frobenius_sq": 6.0,
        "cov_trace": 5.0,
        "cov_largest": 0.0,
        "first_order_variance": 0.0,
    }
    return UStatistic(**plain | changes)


# --- the statistic and its limits -----------------------------------------------------------------


@given(units())
def test_the_plug_in_score_is_too_high_by_the_trace_over_n(psi_NM):
    found, plug_in = of(psi_NM), np.square(psi_NM.mean(axis=0)).sum()
    scale = np.square(psi_NM).sum()
    assert plug_in - found.cov_trace / len(psi_NM) == pytest.approx(found.value, abs=1e-12 * scale)


@given(units(), st.sampled_from([2.0**-20, 2.0**10]), LEVELS)
def test_all_figures_scale_with_the_square_of_the_loss(psi_NM, c, level):
    one, other = of(psi_NM), of(c * psi_NM)  # a power of two: exact
    assert other.value == c**2 * one.value
    assert other.noise_sd == pytest.approx(c**2 * one.noise_sd, rel=1e-9)
    assert other.upper_limit(level) == pytest.approx(c**2 * one.upper_limit(level), rel=1e-9)
    assert other.lower_limit(level) == pytest.approx(c**2 * one.lower_limit(level), rel=1e-9)
    assert other.snr == pytest.approx(one.snr, rel=1e-9)


@given(units(), SEEDS)
def test_the_order_of_units_does_not_matter(psi_NM, seed):
    one, other = of(psi_NM), of(np.random.default_rng(seed).permutation(psi_NM))
    scale = 1e-9 * np.square(psi_NM).sum()
    for name in ("value", "cov_trace", "cov_largest"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), abs=scale)
    assert other.cov_frobenius_sq == pytest.approx(one.cov_frobenius_sq, rel=1e-9)


@given(units(), LEVELS)
def test_the_limits_enclose_the_value_and_zero_is_never_ruled_out_from_above(psi_NM, level):
    found = of(psi_NM)
    assert found.lower_limit(level) <= found.value <= found.upper_limit(level)
    assert found.upper_limit(level) >= 0.0


@given(units())
def test_a_smaller_level_gives_wider_limits(psi_NM):
    found = of(psi_NM)
    assert found.upper_limit(0.01) >= found.upper_limit(0.1)
    assert found.lower_limit(0.01) <= found.lower_limit(0.1)


@given(units())
def test_the_upper_limit_is_never_below_the_simple_one(psi_NM):
    # (7) is the safe form: at least T+ plus Student's quantile of noise floors (up to n against n - 1).
    found, n = of(psi_NM), len(psi_NM)
    floor = found.noise_sd * math.sqrt((n - 1) / n)
    assert found.upper_limit(0.05) >= max(found.value, 0) + T95[n - 1] * floor * (1 - 1e-12)


@given(units(), LEVELS)
def test_the_lower_limit_is_above_zero_exactly_where_the_value_is_that_far_above_the_floor(psi_NM, level):
    # Whatever the linear part of the variance: where S = 0 there is none.
    found, q = of(psi_NM), student_quantile(1 - level, degrees=len(psi_NM) - 1)
    if abs(found.value - q * found.noise_sd) > 1e-9 * q * found.noise_sd:
        assert (found.lower_limit(level) > 0) == (found.value > q * found.noise_sd)


@given(st.floats(1.01, 1e3), st.floats(0, 1e3), LEVELS, st.integers(4, 64))
def test_the_lower_limit_is_the_score_at_which_the_value_is_as_surprising_as_the_level(value, linear, level, n):
    found = statistic(value=value, first_order_variance=linear, num_rows=n)
    limit, q = found.lower_limit(level), student_quantile(1 - level, degrees=n - 1)
    spread = math.sqrt(max(0.0, 4 * linear * limit / value / n + found.noise_sd**2))
    # The limit is a difference of terms as large as `half`: its rounding is that of half, times eps.
    half = 2 * q**2 * linear / n / value
    assert value - limit == pytest.approx(q * spread, rel=1e-6, abs=1e-9 * (half + value))


@given(st.floats(0.1, 100.0), st.floats(0.0, 100.0), LEVELS)
def test_more_variance_never_raises_the_lower_limit_of_a_certain_signal(value, linear, level):
    one, other = (statistic(value=value, first_order_variance=v) for v in (linear, 2 * linear + 1))
    if one.lower_limit(level) > 0:
        assert other.lower_limit(level) <= one.lower_limit(level) * (1 + 1e-9)


@given(units())
def test_covariance_figures_are_consistent(psi_NM):
    found = of(psi_NM)
    rounding = 1e-12 * np.square(psi_NM).sum()
    assert 0.0 <= found.cov_largest <= found.cov_trace + rounding
    assert found.first_order_variance >= 0.0


@pytest.mark.parametrize("negative", [-1.0, -50.0])
def test_a_negative_value_has_the_upper_limit_of_zero(negative):
    lucky, zero = statistic(value=negative, cov_largest=3.0), statistic(value=0.0, cov_largest=3.0)
    assert lucky.upper_limit(0.05) == zero.upper_limit(0.05) > 0


def test_the_noise_floor_of_known_figures():
    assert statistic().noise_sd == 1.0


def test_the_standard_error_of_known_figures():
    assert statistic(first_order_variance=3.0).standard_error == 2.0  # sqrt(4 * 3/4 + 1)


def test_the_signal_to_noise_ratio_is_in_noise_floors():
    assert statistic(value=3.0).snr == 3.0


def test_the_lower_limit_of_known_figures():
    # Variance 4 * 3/4 * S/2 + 1 at S: (2 - S)^2 = q^2 (1.5 S + 1), S = 2 + p - sqrt((2 + p)^2 - 4 + q^2), p = 0.75 q^2.
    q2 = T95[3] ** 2
    p = 0.75 * q2
    wanted = 2.0 + p - math.sqrt((2 + p) ** 2 - 4 + q2)
    assert statistic(first_order_variance=3.0).lower_limit(0.05) == pytest.approx(wanted, rel=1e-12)


def test_the_lower_limit_of_a_constant_variance_is_students():
    assert statistic().lower_limit(0.05) == pytest.approx(2.0 - T95[3], rel=1e-12)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_the_lower_limit_of_no_signal_is_standard_errors_below(value):
    found = statistic(value=value, first_order_variance=3.0).lower_limit(0.05)
    assert found == pytest.approx(value - 2 * T95[3], rel=1e-12)


def test_the_upper_limit_of_known_figures():
    # a = 4 q^2 lmax/n = 3 q^2, b = 2 q^2 H2/n^2 = 0.75 q^2.
    a, b = 3 * T95[3] ** 2, 0.75 * T95[3] ** 2
    wanted = 2.0 + a / 2 + math.sqrt(a**2 / 4 + 2 * a + b)
    assert statistic(cov_largest=3.0).upper_limit(0.05) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("num_samples", "rank"), [(4, 25 / 6), (40, 25 / 600)])
def test_the_effective_rank_is_that_of_the_rows(num_samples, rank):
    # 5^2 over 6; where 40 units lie behind 4 rows, the trace of a row is a tenth of a unit's.
    assert statistic(num_samples=num_samples).effective_rank == pytest.approx(rank, rel=1e-12)


def test_units_without_any_gradient_are_exactly_saturated():
    found = u_statistic(np.zeros((5, 5)))
    assert found == UStatistic(
        value=0.0,
        num_rows=5,
        num_samples=5,
        cov_frobenius_sq=0.0,
        cov_trace=0.0,
        cov_largest=0.0,
        first_order_variance=0.0,
    )
    assert (found.snr, found.lower_limit(0.05), found.upper_limit(0.05)) == (0.0, 0.0, 0.0)
    assert found.effective_rank == 0.0


def test_orthonormal_units_show_no_signal():
    found = u_statistic(np.eye(5))
    assert (found.value, found.cov_frobenius_sq) == (0.0, 0.0)
    assert found.cov_trace == pytest.approx(1.0)  # sum of squares 5, less 5 * |mean|^2 = 1, over 4
    assert found.cov_largest == 0.0  # the sample's own is 1/4, but no two units agree on any direction


def test_equal_units_are_all_signal():
    found = u_statistic(np.full((6, 6), 2.0))
    assert found.value == 2.0
    assert found.cov_trace == pytest.approx(0.0, abs=1e-12)
    assert found.cov_largest == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_fewer_than_four_units_are_refused(n):
    with pytest.raises(ValueError, match=f"at least 4 independent units, got {n}: probe more samples"):
        u_statistic(np.zeros((n, n)))


def test_four_units_are_enough():
    found = u_statistic(np.eye(4))
    assert (found.num_rows, found.num_samples) == (4, 4)


def test_rows_may_stand_for_more_units_than_there_are_rows():
    found = u_statistic(np.eye(4), num_samples=12)
    assert (found.num_rows, found.num_samples) == (4, 12)
    assert found.cov_trace == pytest.approx(3 * u_statistic(np.eye(4)).cov_trace)


def test_an_exact_plug_in_score_takes_the_place_of_the_sketched_one():
    # Plug-in 1/4 of orthonormal rows, T = 0. If it is known to be 1: T = (16 * 1 - 4)/12.
    found = u_statistic(np.eye(4), plug_in=1.0)
    assert found.value == pytest.approx(1.0)
    assert u_statistic(np.eye(4), plug_in=0.25).value == 0.0
    assert found.noise_sd == u_statistic(np.eye(4)).noise_sd


@pytest.mark.parametrize("level", [0.0, 0.5, -0.1, 1.0, math.nan])
def test_a_level_outside_its_range_is_refused(level):
    with pytest.raises(ValueError, match=r"must be in \(0, 0\.5\)"):
        statistic().upper_limit(level)
    with pytest.raises(ValueError, match=r"must be in \(0, 0\.5\)"):
        statistic().lower_limit(level)


# --- the order of rows ----------------------------------------------------------------------------


def test_neighbours_that_agree_like_all_others_show_no_order():
    assert order_excess(np.ones((6, 6)), u_statistic(np.ones((6, 6)))) == 0.0


def test_rows_without_any_gradient_show_no_order():
    assert order_excess(np.zeros((6, 6)), u_statistic(np.zeros((6, 6)))) == 0.0


def test_the_order_of_known_rows_is_in_standard_errors():
    # Only neighbours agree: 5 of 15 pairs with 1, so 1 - 1/3 over sqrt((10/30)/5).
    gram_NN = np.eye(6) * 7 + np.eye(6, k=1) + np.eye(6, k=-1)
    assert order_excess(gram_NN, u_statistic(gram_NN)) == pytest.approx((2 / 3) / math.sqrt(1 / 15), rel=1e-12)


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_rows_in_random_order_show_a_standard_normal_excess(shift):
    rng = np.random.default_rng(7)
    found = []
    for _ in range(1000):
        gram_NN = (psi_NM := shift + rng.standard_normal((32, 40))) @ psi_NM.T
        found.append(order_excess(gram_NN, u_statistic(gram_NN)))
    assert abs(np.mean(found)) < 4 / math.sqrt(1000)
    # At a signal H2 holds the signal too, and the spread is overstated: on the safe side. 4/sqrt(2000) = 0.09.
    assert 0.3 < np.std(found) < 1.09
    assert np.max(found) < 5.0  # what the probe takes for sorted


def test_sorted_rows_are_many_standard_errors_off():
    # Four classes one after the other, each with a direction of its own.
    rng = np.random.default_rng(8)
    psi_NM = np.repeat(rng.standard_normal((4, 40)), 8, axis=0) + rng.standard_normal((32, 40))
    assert order_excess(psi_NM @ psi_NM.T, of(psi_NM)) > 5.0
    mixed_NM = rng.permutation(psi_NM)
    assert abs(order_excess(mixed_NM @ mixed_NM.T, of(mixed_NM))) < 3.0


# --- the wild bootstrap ---------------------------------------------------------------------------


@given(units(), st.integers(1, 300), SEEDS)
def test_a_p_value_is_between_one_draw_and_one(psi_NM, num_resamples, seed):
    found = wild_bootstrap_p_value(psi_NM @ psi_NM.T, max_resamples=num_resamples, seed=seed).value
    assert 1 / (num_resamples + 1) <= found <= 1.0


def test_unknown_inner_products_are_not_significant():
    gram_NN = np.full((8, 8), math.nan)
    assert not wild_bootstrap_p_value(gram_NN, max_resamples=999, seed=0).value < 0.05


@given(units(), SEEDS)
def test_the_same_seed_gives_the_same_p_value(psi_NM, seed):
    gram_NN = psi_NM @ psi_NM.T
    found = [wild_bootstrap_p_value(gram_NN, max_resamples=200, seed=seed) for _ in range(2)]
    assert found[0] == found[1]


@given(units(), SEEDS)
def test_a_p_value_is_blind_to_the_loss_scale(psi_NM, seed):
    gram_NN = psi_NM @ psi_NM.T
    one, other = (wild_bootstrap_p_value(c * gram_NN, max_resamples=99, seed=seed) for c in (1.0, 2.0**-30))
    assert one == other


@given(units(), SEEDS)
def test_a_p_value_does_not_look_at_the_diagonal(psi_NM, seed):
    gram_NN = np.round(psi_NM @ psi_NM.T)  # whole numbers: no rounding
    one, other = (
        wild_bootstrap_p_value(g, max_resamples=99, seed=seed) for g in (gram_NN, gram_NN + 64 * np.eye(len(gram_NN)))
    )
    assert one == other


def test_units_without_inner_products_have_a_p_value_of_one():
    assert wild_bootstrap_p_value(np.eye(6), max_resamples=99, seed=0).value == 1.0


def test_a_strong_signal_has_the_smallest_p_value_there_is():
    psi_NM = np.random.default_rng(0).standard_normal((40, 5)) + 3.0
    assert wild_bootstrap_p_value(psi_NM @ psi_NM.T, max_resamples=999, seed=0) == (1 / 1000, 999)


def test_a_signal_of_the_wrong_sign_has_a_large_p_value():
    # Units that cancel: the sum over pairs is as low as it can be.
    gram_NN = -np.ones((8, 8)) + 8 * np.eye(8)
    assert wild_bootstrap_p_value(gram_NN, max_resamples=99, seed=0).value > 0.9


# --- the bound that saves sign flips --------------------------------------------------------------


@pytest.mark.parametrize(
    ("snr", "bound"), [(-3.0, 1.0), (0.0, 1.0), (5.43, 1.0), (2 * math.e, math.exp(-2)), (10 * math.e, math.exp(-10))]
)
def test_the_tail_bound_is_exponential_from_two_e_on(snr, bound):
    assert chaos_tail_bound(snr) == pytest.approx(bound, rel=1e-12)


@given(st.floats(-10, 500), st.floats(0, 500))
def test_a_stronger_signal_never_has_a_larger_bound(snr, more):
    assert 0 < chaos_tail_bound(snr + more) <= chaos_tail_bound(snr) <= 1.0


def test_a_clear_signal_takes_the_bound_and_no_flips():
    gram_NN = np.ones((60, 60))  # snr sqrt(60 * 59/2) = 42.1
    found = significance(gram_NN, u_statistic(gram_NN), threshold=1e-3, max_resamples=999, seed=0)
    assert found == (pytest.approx(math.exp(-math.sqrt(60 * 59 / 2) / math.e), rel=1e-12), 0)


def test_a_bound_that_does_not_reach_the_threshold_leaves_it_to_the_flips():
    gram_NN = np.ones((60, 60))
    found = significance(gram_NN, u_statistic(gram_NN), threshold=1e-9, max_resamples=999, seed=0)
    assert found == wild_bootstrap_p_value(gram_NN, max_resamples=999, seed=0)


@given(units(), SEEDS)
def test_a_faint_signal_is_left_to_the_flips(psi_NM, seed):
    gram_NN = psi_NM @ psi_NM.T
    stat = u_statistic(gram_NN)
    if stat.snr < 2 * math.e:
        found = significance(gram_NN, stat, threshold=0.5, max_resamples=99, seed=seed)
        assert found == wild_bootstrap_p_value(gram_NN, max_resamples=99, seed=seed)


# --- statistical promises -------------------------------------------------------------------------


class Draws(NamedTuple):
    score: float
    trace: float
    largest: float
    signal_variance: float
    """mu^T C mu, which v1 estimates."""
    found: list[UStatistic]
    plug_in: np.ndarray


def draws(seed, *, n, m, score, repeats):
    """Certificates of psi_i = mu + noise with uneven variances; ||mu||^2 = score."""
    rng = np.random.default_rng(seed)
    sd_M = np.linspace(0.3, 1.0, m)
    mu_M = rng.standard_normal(m)
    mu_M *= math.sqrt(score) / np.linalg.norm(mu_M)
    grams = ((psi_NM := mu_M + sd_M * rng.standard_normal((n, m))) @ psi_NM.T for _ in range(repeats))
    pairs = [(u_statistic(g), g.mean()) for g in grams]
    var_M = np.square(sd_M)
    return Draws(
        score,
        var_M.sum(),
        var_M.max(),
        float((mu_M**2 * var_M).sum()),
        [p[0] for p in pairs],
        np.array([p[1] for p in pairs]),
    )


# 2,000 draws where they are cheap; 200 of n = 400 take as long as 2,000 of n = 50.
CASES = {
    "null": {"n": 50, "m": 30, "score": 0.0, "repeats": 2000},
    "weak": {"n": 50, "m": 60, "score": 0.3, "repeats": 2000},
    "strong": {"n": 60, "m": 30, "score": 4.0, "repeats": 1000},
    "wide": {"n": 100, "m": 200, "score": 0.2, "repeats": 400},
    "long": {"n": 400, "m": 100, "score": 0.05, "repeats": 60},
}


@pytest.fixture(scope="module", params=CASES)
def drawn(request):
    return draws(sorted(CASES).index(request.param), **CASES[request.param])


def assert_mean(values, truth):
    """Within 4 standard errors: once in 16,000 fresh seeds, and this seed is fixed."""
    values = np.asarray(values)
    assert abs(values.mean() - truth) < 4 * values.std(ddof=1) / math.sqrt(len(values))


def test_the_value_is_unbiased(drawn):
    assert_mean([u.value for u in drawn.found], drawn.score)


def test_the_naive_plug_in_is_biased_by_the_trace_over_n(drawn):
    bias = drawn.trace / drawn.found[0].num_samples
    assert_mean(drawn.plug_in, drawn.score + bias)
    assert drawn.plug_in.mean() > drawn.score + 0.8 * bias


def test_the_trace_is_unbiased(drawn):
    assert_mean([u.cov_trace for u in drawn.found], drawn.trace)


def test_the_largest_eigenvalue_is_on_the_safe_side(drawn):
    assert np.mean([u.cov_largest for u in drawn.found]) > drawn.largest


def test_few_rows_do_not_inflate_the_largest_eigenvalue():
    # C = I/64 of 128 numbers in 32 rows: the sample's own largest is (1 + sqrt(128/32))^2 = 9 times too high, ||C||_F
    # 11.3 times. Walks over four rows give (128 + 128^2 sqrt(8/32^4))^(1/4) = 3.6 times, those over six fewer: seen 2.6.
    rng = np.random.default_rng(3)
    found = [of(rng.standard_normal((32, 128)) / 8).cov_largest * 64 for _ in range(100)]
    assert np.median(found) < (128 + 128**2 * math.sqrt(8 / 32**4)) ** 0.25
    assert min(found) > 1.0  # never below the truth


def test_no_draw_of_many_alike_directions_takes_the_largest_eigenvalue_for_much_too_large():
    # 528 directions in 32 rows: where the walks' mean is negative, ||C||_F is 23 times too high. With two standard
    # errors of 528^2 * sqrt(8/32^4) = 770 in place of the mean it is (2 * 770 + 528 + 2 * 770)^(1/4) = 7.8 at most
    # in 39 of 40 draws; 11 would be 16 standard errors above. And it is never below the truth.
    rng = np.random.default_rng(9)
    found = [of(rng.standard_normal((32, 528))).cov_largest for _ in range(200)]
    assert min(found) > 1.0
    assert max(found) < 11.0


@pytest.mark.parametrize(
    ("order", "estimate", "others"),
    [
        (4, _schatten_four, lambda n: math.sqrt(8 / (n * (n - 1) * (n - 2) * (n - 3)))),
        (6, _schatten_six, lambda n: 1 / math.sqrt(48 * math.comb(n, 6))),
    ],
)
def test_the_closed_walks_estimate_the_power_but_for_the_centring(order, estimate, others):
    # tr C^p of variances sd^2 without signal, and a standard error of what noise gives on top. Centring by row means
    # takes (1 - 1/n)^p of it off, about p/n, where few directions rule; 4 standard errors of the mean each way.
    rng, sd_M, n = np.random.default_rng(4), np.linspace(0.5, 1.0, 20), 40
    walks = []
    for _ in range(400):
        off_NN = degenerate(sd_M * rng.standard_normal((n, 20)))
        square = float(np.square(off_NN).sum()) / (n * (n - 1))
        walks.append(estimate(off_NN, frobenius_sq=square) ** order - square ** (order / 2) * others(n))
    truth, slack = np.sum(sd_M ** (2 * order)), 4 * np.std(walks) / math.sqrt(400)
    assert truth * (1 - order / n) - slack < np.mean(walks) < truth * (1 + order / n) + slack


def degenerate(psi_NM):
    """H_ij - h_i - h_j + T off the diagonal."""
    n, gram_NN = len(psi_NM), psi_NM @ psi_NM.T
    off_NN = gram_NN - np.diag(np.diag(gram_NN))
    h_N = off_NN.sum(axis=1) / (n - 1)
    out_NN = off_NN - h_N[:, None] - h_N[None, :] + h_N.mean()
    np.fill_diagonal(out_NN, 0.0)
    return out_NN


def test_chunk_means_estimate_what_units_do():
    # 240 units in 24 rows of 10: value and trace stay unbiased for the score and the trace of a *unit*.
    rng, mu_M, sd_M = np.random.default_rng(5), np.full(20, 0.1), np.linspace(0.3, 1.0, 20)
    found = []
    for _ in range(400):
        psi_NM = mu_M + sd_M * rng.standard_normal((240, 20))
        rows_NM = psi_NM.reshape(24, 10, 20).mean(axis=1)
        found.append(u_statistic(rows_NM @ rows_NM.T, num_samples=240))
    assert_mean([u.value for u in found], 20 * 0.1**2)
    assert_mean([u.cov_trace for u in found], np.square(sd_M).sum())


def test_the_effective_rank_of_noise_is_that_of_its_covariance():
    # (sum sd^2)^2/sum sd^4 of units and of chunk means alike; H2 of 24 rows is known to about 1/24 of its size.
    rng, sd_M = np.random.default_rng(6), np.linspace(0.3, 1.0, 20)
    psi_BNM = sd_M * rng.standard_normal((200, 240, 20))
    truth = np.square(sd_M).sum() ** 2 / np.sum(sd_M**4)
    for rows_BNM in (psi_BNM[:, :24], psi_BNM.reshape(200, 24, 10, 20).mean(axis=2)):
        ranks = [u_statistic(r @ r.T).effective_rank for r in rows_BNM]
        assert np.median(ranks) == pytest.approx(truth, rel=0.1)


def test_the_signal_variance_is_estimated_without_the_noise_in_it(drawn):
    # As defined it is too low by (4 v1 + S^2)/n, since H2 holds the signal too; clipping at zero lifts it
    # by less than one standard deviation where there is hardly a signal.
    v1 = np.array([u.first_order_variance for u in drawn.found])
    slack = 4 * v1.std() / math.sqrt(len(v1))
    too_low = (4 * drawn.signal_variance + drawn.score**2) / drawn.found[0].num_samples
    assert drawn.signal_variance - too_low - slack < v1.mean()
    assert v1.mean() < drawn.signal_variance + slack + v1.std() * (drawn.score < 1)


def test_the_standard_error_is_the_spread_of_the_value(drawn):
    # A spread from R draws is known to 1/sqrt(2R) for normal values; T is skewed: 4 times that, 25 % at R = 60 + 10 %.
    spread = np.std([u.value for u in drawn.found], ddof=1)
    claimed = math.sqrt(np.mean([u.standard_error**2 for u in drawn.found]))
    assert claimed == pytest.approx(spread, rel=4 / math.sqrt(2 * len(drawn.found)) + 0.1)


def test_the_upper_limit_covers_at_least_as_often_as_it_says(drawn):
    assert np.mean([u.upper_limit(0.05) >= drawn.score for u in drawn.found]) >= 0.95


def test_the_lower_limit_covers_nearly_as_often_as_it_says(drawn):
    # The normal limit of a skewed statistic: 0.978 to 0.985 in MATH.md 2.3; 0.93 allows for 4 standard errors.
    assert np.mean([u.lower_limit(0.05) <= drawn.score for u in drawn.found]) >= 0.93


@pytest.mark.parametrize(("n", "score"), [(32, 10.0), (64, 20.0)])
def test_the_lower_limit_covers_a_strong_signal_too(n, score):
    found = draws(n, n=n, m=20, score=score, repeats=1000).found
    assert np.mean([u.lower_limit(0.05) <= score for u in found]) >= 0.93  # 0.95 less 3 standard errors


@pytest.mark.parametrize("score", [0.5, 2.0, 10.0])
def test_the_upper_limit_covers_where_all_noise_is_along_the_signal(score):
    # The least favourable covariance of (7): rank one, so that all three estimates of lmax are of lmax itself.
    rng = np.random.default_rng(int(10 * score))
    covered = [of(math.sqrt(score) + rng.standard_normal((32, 1))).upper_limit(0.05) >= score for _ in range(2000)]
    assert np.mean(covered) >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 2000)


def test_a_lucky_draw_below_zero_never_certifies_saturation(drawn):
    floors = [(u.upper_limit(0.05), u.noise_sd) for u in drawn.found if u.value < 0]
    assert all(upper > floor > 0 for upper, floor in floors)


def test_null_draws_below_zero_do_occur():
    found = draws(1, n=50, m=30, score=0.0, repeats=200).found
    assert 50 < sum(u.value < 0 for u in found) < 150


def test_the_noise_floor_is_the_spread_of_the_value_where_there_is_no_signal():
    found = draws(2, n=50, m=30, score=0.0, repeats=2000).found
    # 4/sqrt(2 * 2000) = 6 %, and 4 % for the skew.
    assert np.mean([u.noise_sd for u in found]) == pytest.approx(np.std([u.value for u in found]), rel=0.1)


def rejections(seed, *, n, m, shift, repeats):
    """Share of p <= 5 % among heavy-tailed units (Student, 5 degrees) of unequal size."""
    rng = np.random.default_rng(seed)
    count = 0
    for i in range(repeats):
        psi_NM = shift + rng.standard_t(5, (n, m)) * rng.uniform(0.2, 2.0, (n, 1))
        count += wild_bootstrap_p_value(psi_NM @ psi_NM.T, max_resamples=199, seed=i).value <= 0.05
    return count / repeats


@pytest.mark.parametrize(("n", "m"), [(50, 30), (80, 200)])
def test_the_bootstrap_rejects_a_true_null_as_often_as_it_says(n, m):
    # Sign flips are exact for symmetric units; 2,000 repeats have a standard error of 0.0049, 4 of them 0.02.
    assert 0.03 <= rejections(n, n=n, m=m, shift=0.0, repeats=2000) <= 0.07


def test_the_bootstrap_rejects_a_false_null_more_often():
    assert rejections(0, n=50, m=30, shift=0.3, repeats=200) > 0.9


# --- transfer and Student's quantile --------------------------------------------------------------


def test_transfer_is_in_roots_of_the_training_score():
    found = transfer(np.array([2.0, 2.0, 2.0]), train_score=4.0, level=0.05)
    assert found == Transfer(value=1.0, lower=1.0, upper=1.0)


@pytest.mark.parametrize("train_score", [0.0, -1e-9])
def test_without_a_training_gradient_training_goes_nowhere(train_score):
    assert transfer(np.array([1.0, 2.0]), train_score=train_score, level=0.05) == Transfer(
        value=0.0, lower=0.0, upper=0.0
    )


@given(SEEDS, st.integers(2, 50), LEVELS)
def test_transfer_limits_lie_evenly_around_the_value(seed, n, level):
    found = transfer(np.random.default_rng(seed).standard_normal(n), train_score=1.0, level=level)
    assert found.lower <= found.value <= found.upper
    assert found.upper - found.value == pytest.approx(found.value - found.lower, rel=1e-9, abs=1e-12)


@given(SEEDS, st.integers(2, 50))
def test_held_out_data_that_disagree_turn_the_sign(seed, n):
    x_N = np.random.default_rng(seed).standard_normal(n)
    one, other = (transfer(x, train_score=2.0, level=0.05) for x in (x_N, -x_N))
    assert (other.value, other.lower, other.upper) == pytest.approx((-one.value, -one.upper, -one.lower))


def test_transfer_limits_cover_as_often_as_they_say():
    rng, truth = np.random.default_rng(0), 0.5
    found = [transfer(truth + rng.standard_normal(20), train_score=1.0, level=0.05) for _ in range(2000)]
    # Exact for normal samples: 0.95 with a standard error of 0.0049.
    assert np.mean([t.lower <= truth for t in found]) == pytest.approx(0.95, abs=0.02)
    assert np.mean([t.upper >= truth for t in found]) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("p", [0.6, 0.9, 0.95, 0.975, 0.99])
@pytest.mark.parametrize(("degrees", "error"), [(5, 1e-2), (10, 1e-4), (50, 1e-5), (200, 1e-7), (2000, 1e-9)])
def test_the_quantile_is_students_within_its_stated_error(p, degrees, error):
    assert student_quantile(p, degrees=degrees) == pytest.approx(scipy.stats.t.ppf(p, degrees), rel=error)


@pytest.mark.parametrize("degrees", [5, 31, 400])
def test_the_quantile_is_odd_around_one_half(degrees):
    assert student_quantile(0.5, degrees=degrees) == pytest.approx(0.0, abs=1e-15)
    assert student_quantile(0.05, degrees=degrees) == pytest.approx(-student_quantile(0.95, degrees=degrees), rel=1e-12)


@pytest.mark.parametrize("degrees", [31, 63, 359])
@pytest.mark.parametrize("p", [0.999, 0.9999, 0.99999])
def test_the_quantile_holds_at_the_levels_of_many_candidates(degrees, p):
    # 0.05 over 50 candidates and a few looks is 1e-4; 32 units are the fewest that a probe should use.
    assert student_quantile(p, degrees=degrees) == pytest.approx(scipy.stats.t.ppf(p, degrees), rel=1e-4)


# --- realisable gain ------------------------------------------------------------------------------


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e6), st.integers(1, 10**6))
def test_the_realisable_share_is_one_over_one_plus_half_gain_samples_over_samples(score, trace, num_train):
    half = half_gain_samples(score, cov_trace=trace)
    share = realisable_share(score, cov_trace=trace, num_train=num_train)
    assert share == pytest.approx(1 / (1 + half / num_train), rel=1e-9)


def test_half_the_gain_is_realisable_with_the_half_gain_samples():
    assert half_gain_samples(0.5, cov_trace=100.0) == 200.0
    assert realisable_share(0.5, cov_trace=100.0, num_train=200) == 0.5


@pytest.mark.parametrize("score", [0.0, -0.1])
def test_nothing_is_realisable_of_no_signal(score):
    assert realisable_share(score, cov_trace=1.0, num_train=10) == 0.0
    assert half_gain_samples(score, cov_trace=1.0) == math.inf


def test_all_is_realisable_without_noise():
    assert realisable_share(0.5, cov_trace=0.0, num_train=1) == 1.0


# --- verdicts -------------------------------------------------------------------------------------

PLAIN = {"lower": 0.005, "upper": 0.2, "transfer_upper": 0.05, "p_value": 0.001}


def verdict(num_candidates=10, **changes):
    return candidate_verdict(Gains(**PLAIN | changes), tolerance=0.01, level=0.05, num_candidates=num_candidates)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "undetermined"),
        ({"lower": 0.02}, "useful"),
        ({"lower": 0.01}, "undetermined"),  # at the tolerance is not above it
        ({"lower": 0.02, "p_value": 0.004}, "useful"),
        ({"lower": 0.02, "p_value": 0.006}, "undetermined"),  # 0.05/10 is the level of each
        ({"lower": 0.02, "p_value": 0.006, "num_candidates": 1}, "useful"),
        ({"lower": 0.02, "p_value": 0.005}, "undetermined"),
        ({"upper": 0.009}, "saturated"),
        ({"upper": 0.01}, "undetermined"),
        ({"upper": 0.009, "transfer_upper": 0.009}, "saturated"),
        ({"transfer_upper": 0.009}, "no_transferable_gain"),
        ({"transfer_upper": 0.01}, "undetermined"),
        ({"lower": 0.02, "transfer_upper": 0.009}, "useful"),
        ({"lower": 0.02, "p_value": 0.5, "transfer_upper": 0.009}, "no_transferable_gain"),
        ({"lower": 0.0, "upper": 0.0, "transfer_upper": 0.0, "p_value": 1.0}, "saturated"),
    ],
)
def test_a_candidate_is_judged_by_its_limits(changes, wanted):
    assert verdict(**changes) == wanted


@pytest.mark.parametrize(
    ("verdicts", "wanted"),
    [
        ([], "undetermined"),
        (["useful"], "useful"),
        (["saturated", "useful", "undetermined"], "useful"),
        (["no_transferable_gain", "useful"], "useful"),
        (["saturated", "saturated"], "saturated"),
        (["saturated", "no_transferable_gain"], "no_transferable_gain"),
        (["no_transferable_gain"], "no_transferable_gain"),
        (["saturated", "undetermined"], "undetermined"),
        (["no_transferable_gain", "undetermined"], "undetermined"),
    ],
)
def test_one_useful_candidate_is_enough_and_a_stop_needs_all(verdicts, wanted):
    assert {network_verdict(list(order)) for order in itertools.permutations(verdicts)} == {wanted}


NATS = st.floats(0.0, 1.0)


@given(NATS, NATS, NATS, NATS, st.floats(0.001, 1.0), st.floats(0.0, 1.0))
def test_a_smaller_tolerance_never_makes_a_candidate_saturated(one, other, transfer_upper, p_value, tolerance, factor):
    gains = Gains(lower=min(one, other), upper=max(one, other), transfer_upper=transfer_upper, p_value=p_value)
    strict, loose = (
        candidate_verdict(gains, tolerance=t, level=0.05, num_candidates=3) for t in (tolerance * factor, tolerance)
    )
    if strict == "saturated":
        assert loose == "saturated"
    if loose == "useful":
        assert strict == "useful"


def test_the_cost_of_a_certificate_is_factors_gram_and_flips():
    # Three factors and two products, 11 * 5^3; 2 * 6^2 * 10 and (4/3 + 2 (1 + 4 * 48)) * 6^3; 2 * 7 * 6^2.
    found = certificate_flops(num_rows=6, numbers=10, features=5, num_resamples=7)
    assert found == 1375 + (720 + 288 + 2 * 193 * 216) + 504
