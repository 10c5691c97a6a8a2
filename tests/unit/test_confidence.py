"""Limits of bounded means and the acceptance of a grow step: known figures, edges, refusals."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth_service.core.confidence import (
    LARGEST_BET,
    accept_growth,
    confidence_sequence,
    empirical_bernstein_upper,
    spend,
)

SEEDS = st.integers(0, 2**32 - 1)
LEVELS = st.floats(1e-6, 0.9)


def uniform(seed, n=20):
    return np.random.default_rng(seed).random(n)


# --- one sample of fixed size ---------------------------------------------------------------------


def test_the_limit_of_known_figures():
    # Mean 1/2, variance 1/3 (n - 1), ln(2/level) = 3: 0.5 + sqrt(2/3 * 3/4) + 7 * 3 / (3 * 3).
    found = empirical_bernstein_upper(np.array([0.0, 0.0, 1.0, 1.0]), low=0.0, high=1.0, level=2 * math.exp(-3))
    assert found == pytest.approx(0.5 + math.sqrt(0.5) + 7 / 3, rel=1e-12)


def test_the_figures_of_the_paired_example_certify_where_hoeffding_does_not():
    # 5,000 differences of mean -0.0106 in [-1, 1]; a spread of 0.055 gives the -0.0041 of section 4.4.
    values_N = -0.0106 + np.tile([0.055, -0.055], 2500)
    found = empirical_bernstein_upper(values_N, low=-1.0, high=1.0, level=0.05)
    hoeffding = values_N.mean() + 2 * math.sqrt(math.log(1 / 0.05) / (2 * 5000))
    assert found < 0 < hoeffding


@given(SEEDS, LEVELS, st.sampled_from([2.0**-20, 2.0**10]))
def test_the_limit_scales_with_the_unit(seed, level, c):
    one = empirical_bernstein_upper(uniform(seed), low=0.0, high=1.0, level=level)
    other = empirical_bernstein_upper(c * uniform(seed), low=0.0, high=c, level=level)
    assert other == pytest.approx(c * one, rel=1e-12)


@given(SEEDS, LEVELS)
def test_the_limit_is_above_the_mean_and_falls_with_the_level(seed, level):
    values_N = uniform(seed)
    found = empirical_bernstein_upper(values_N, low=0.0, high=1.0, level=level)
    assert values_N.mean() < found <= empirical_bernstein_upper(values_N, low=0.0, high=1.0, level=level / 2)


@given(SEEDS)
def test_a_wider_possible_range_gives_a_higher_limit(seed):
    values_N = uniform(seed)
    one, other = (empirical_bernstein_upper(values_N, low=low, high=1.0, level=0.1) for low in (0.0, -1.0))
    assert other - one == pytest.approx(7 * math.log(20) / (3 * 19), rel=1e-9)


def test_two_values_are_enough_and_one_is_not():
    assert empirical_bernstein_upper(np.zeros(2), low=0.0, high=1.0, level=0.5) == pytest.approx(7 * math.log(4) / 3)
    with pytest.raises(ValueError, match=r"at least 2 values, got shape \(1,\)"):
        empirical_bernstein_upper(np.zeros(1), low=0.0, high=1.0, level=0.5)


@pytest.mark.parametrize("bad", [-0.01, 1.01, math.nan, math.inf])
def test_a_value_outside_the_range_is_refused(bad):
    with pytest.raises(ValueError, match=r"is outside \[0\.0, 1\.0\]: truncate the values first"):
        empirical_bernstein_upper(np.array([0.5, bad]), low=0.0, high=1.0, level=0.1)
    with pytest.raises(ValueError, match=r"is outside \[0\.0, 1\.0\]: truncate the values first"):
        confidence_sequence(np.array([0.5, bad]), low=0.0, high=1.0, level=0.1)


def test_values_at_the_ends_of_the_range_are_taken():
    assert math.isfinite(empirical_bernstein_upper(np.array([0.0, 1.0]), low=0.0, high=1.0, level=0.1))


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, math.nan])
def test_a_level_outside_its_range_is_refused(level):
    with pytest.raises(ValueError, match=r"must be in \(0, 1\)"):
        empirical_bernstein_upper(np.zeros(3), low=0.0, high=1.0, level=level)
    with pytest.raises(ValueError, match=r"must be in \(0, 1\)"):
        confidence_sequence(np.zeros(3), low=0.0, high=1.0, level=level)
    with pytest.raises(ValueError, match=r"must be in \(0, 1\)"):
        spend(level, look=0)


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match=r"the range \[1\.0, 1\.0\] is empty"):
        empirical_bernstein_upper(np.ones(3), low=1.0, high=1.0, level=0.1)


def test_a_matrix_of_values_is_refused():
    with pytest.raises(ValueError, match=r"a vector of at least 1 values, got shape \(2, 2\)"):
        confidence_sequence(np.zeros((2, 2)), low=0.0, high=1.0, level=0.1)


# --- the confidence sequence ----------------------------------------------------------------------


def test_the_first_interval_of_known_figures():
    # The first bet is capped at 1/2, v = 4 (1 - 1/2)^2 = 1, psi(1/2) = (ln 2 - 1/2)/4.
    found = confidence_sequence(np.array([1.0]), low=0.0, high=1.0, level=2 * math.exp(-3))
    assert found.centre_N[0] == 1.0
    assert found.radius_N[0] == pytest.approx((3 + (math.log(2) - 0.5) / 4) / LARGEST_BET, rel=1e-12)
    assert (found.lower_N[0], found.upper_N[0]) == (0.0, 1.0)


@given(SEEDS, LEVELS)
def test_an_interval_does_not_depend_on_what_comes_after_it(seed, level):
    values_N = uniform(seed, 40)
    whole, first = (confidence_sequence(v, low=0.0, high=1.0, level=level) for v in (values_N, values_N[:25]))
    np.testing.assert_allclose(whole.centre_N[:25], first.centre_N, rtol=1e-12)
    np.testing.assert_allclose(whole.radius_N[:25], first.radius_N, rtol=1e-12)


@given(SEEDS, LEVELS, st.floats(-50, 50), st.floats(0.01, 100))
def test_an_interval_moves_and_scales_with_the_values(seed, level, low, size):
    unit = confidence_sequence(uniform(seed), low=0.0, high=1.0, level=level)
    moved_N = np.clip(low + size * uniform(seed), low, low + size)
    moved = confidence_sequence(moved_N, low=low, high=low + size, level=level)
    slack = 1e-9 * (abs(low) + size)
    np.testing.assert_allclose(moved.lower_N, low + size * unit.lower_N, atol=slack)
    np.testing.assert_allclose(moved.upper_N, low + size * unit.upper_N, atol=slack)


@given(SEEDS, LEVELS)
def test_the_limits_stay_in_the_range_and_in_order(seed, level):
    found = confidence_sequence(uniform(seed, 100), low=0.0, high=1.0, level=level)
    assert (found.lower_N >= 0.0).all()
    assert (found.lower_N <= found.upper_N).all()
    assert (found.upper_N <= 1.0).all()


def test_the_interval_of_a_constant_closes_like_one_over_n():
    # The bets stay at their cap where nothing varies, so the radius is ln(2/level)/(n/2) and a little.
    found = confidence_sequence(np.full(4000, 0.25), low=0.0, high=1.0, level=0.1)
    assert found.radius_N[-1] < 2.2 * math.log(20) / 4000
    assert found.lower_N[-1] <= 0.25 <= found.upper_N[-1]


def test_looking_at_every_sample_costs_less_than_twice_the_width():
    values_N = np.random.default_rng(0).random(20000)
    anytime = confidence_sequence(values_N, low=0.0, high=1.0, level=0.1)
    fixed = empirical_bernstein_upper(values_N, low=0.0, high=1.0, level=0.05) - values_N.mean()
    assert fixed < anytime.radius_N[-1] < 2 * fixed


# --- spending -------------------------------------------------------------------------------------


def test_the_first_look_gets_six_over_pi_squared():
    assert spend(0.05, look=0) == pytest.approx(0.05 * 0.6079271018540267, rel=1e-12)


@pytest.mark.parametrize(("look", "share"), [(1, 1 / 4), (2, 1 / 9), (9, 1 / 100)])
def test_later_looks_get_less_by_the_square(look, share):
    assert spend(0.05, look=look) == pytest.approx(share * spend(0.05, look=0), rel=1e-12)


def test_all_looks_together_spend_the_level_and_no_more():
    spent = math.fsum(spend(0.05, look=j) for j in range(10000))
    assert 0.05 * (1 - 1e-4) < spent < 0.05  # what is left after J looks is about 6/(pi^2 J)


def test_a_look_before_the_first_is_refused():
    with pytest.raises(ValueError, match="look -1 must be 0 or more"):
        spend(0.05, look=-1)


# --- accepting a grow step ------------------------------------------------------------------------


def better(n=2000, gain=0.1):
    old_N = np.random.default_rng(1).exponential(1.0, n)
    return old_N, np.maximum(old_N - gain, 0.0)


def test_a_network_that_is_better_on_nearly_all_samples_is_accepted():
    found = accept_growth(*better(), bound=5.0, level=0.05)
    assert found.accepted
    assert found.mean < found.upper < 0
    assert (found.level, found.num_samples, found.num_truncated) == (spend(0.05, look=0), 2000, 0)


def test_the_reason_of_an_acceptance_has_its_numbers():
    # No spread: -0.5 + 7 * 10 * ln(2/0.00338) / (3 * 3999).
    found = accept_growth(np.full(4000, 1.0), np.full(4000, 0.5), bound=5.0, level=0.05, round_index=2)
    assert found.reason == (
        "accepted: the loss changed by -0.5 nats over 4000 paired samples, and its upper limit -0.463 at level "
        "0.00338 (round 2) is below 0"
    )


def test_equal_networks_are_not_accepted_and_the_reason_says_so():
    found = accept_growth(np.ones(100), np.ones(100), bound=1.0, level=0.05)
    assert not found.accepted
    assert found.upper > 0
    assert found.reason.startswith("not accepted: the loss changed by +0 nats over 100 paired samples, and its upper")
    assert found.reason.endswith("(round 0) is not below 0")


def test_a_worse_network_is_not_accepted():
    old_N, new_N = better()
    assert not accept_growth(new_N, old_N, bound=5.0, level=0.05).accepted


def test_pairing_certifies_what_two_separate_means_could_not():
    old_N, new_N = better(n=4000, gain=0.05)
    assert accept_growth(old_N, new_N, bound=3.0, level=0.05).accepted
    shuffled_N = np.random.default_rng(0).permutation(new_N)
    assert not accept_growth(old_N, shuffled_N, bound=3.0, level=0.05).accepted


def test_later_rounds_need_more():
    limits = [accept_growth(*better(), bound=5.0, level=0.05, round_index=j).upper for j in range(4)]
    assert limits == sorted(limits)
    assert len(set(limits)) == 4


def test_the_anytime_limit_holds_one_side_at_the_spent_level():
    old_N, new_N = better()
    found = accept_growth(old_N, new_N, bound=5.0, level=0.05)
    two_sided = confidence_sequence(new_N - old_N, low=-5.0, high=5.0, level=2 * spend(0.05, look=0))
    assert found.anytime_upper == two_sided.upper_N[-1]


def test_differences_are_truncated_on_both_sides_and_counted():
    old_N, new_N = np.array([0.0, 9.0, 1.0, 1.0]), np.array([9.0, 0.0, 1.0, 3.0])
    found = accept_growth(old_N, new_N, bound=2.0, level=0.05)
    assert found.mean == (2.0 - 2.0 + 0.0 + 2.0) / 4
    assert found.num_truncated == 2  # a difference at the bound is whole
    assert "over 4 paired samples, 2 of them truncated, and" in found.reason


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_new_loss_that_is_no_number_counts_as_the_worst(bad):
    found = accept_growth(np.array([1.0, 1.0]), np.array([1.0, bad]), bound=2.0, level=0.05)
    assert (found.mean, found.num_truncated) == (1.0, 1)


def test_two_infinite_losses_count_as_the_worst():
    assert accept_growth(np.full(9, math.inf), np.full(9, math.inf), bound=2.0, level=0.05).mean == 2.0


def test_unpaired_losses_are_refused():
    with pytest.raises(ValueError, match=r"got \(3,\) of the old network and \(4,\) of the new one: evaluate both"):
        accept_growth(np.ones(3), np.ones(4), bound=1.0, level=0.05)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_a_bound_of_nothing_is_refused(bound):
    with pytest.raises(ValueError, match="must be above 0 nats"):
        accept_growth(np.ones(3), np.ones(3), bound=bound, level=0.05)


@pytest.mark.parametrize("level", [0.0, 0.5])
def test_a_level_that_cannot_be_one_sided_is_refused(level):
    with pytest.raises(ValueError, match=r"must be in \(0, 0\.5\)"):
        accept_growth(np.ones(3), np.ones(3), bound=1.0, level=level)
