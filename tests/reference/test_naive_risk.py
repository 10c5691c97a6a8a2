"""Limits, routes and probe sizes against their naive twins, over random sizes.

Tolerances: float64 on fewer than 1e4 well-scaled terms agrees to about 1e-13; 1e-9 leaves room.
"""

import math

import naive_risk as naive
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from growth_service.core import risk
from growth_service.core.advice import required_probe_samples
from growth_service.core.certificate import UStatistic
from growth_service.core.confidence import accept_growth, confidence_sequence, empirical_bernstein_upper, spend

SEEDS = st.integers(0, 2**32 - 1)
LEVELS = st.sampled_from([0.4, 0.1, 0.05, 1e-4])


@st.composite
def bounded(draw, smallest=2):
    """Values in [low, high], some at the ends."""
    low = draw(st.sampled_from([-3.0, 0.0, 1.5]))
    high = low + draw(st.sampled_from([0.01, 1.0, 7.0]))
    rng = np.random.default_rng(draw(SEEDS))
    n = draw(st.integers(smallest, 30))
    shape = draw(st.sampled_from([0.05, 1.0, 20.0]))
    return low + (high - low) * rng.beta(shape, shape, n), low, high


@given(bounded(), LEVELS)
def test_the_fixed_sample_limit_is_the_formula_of_maurer_and_pontil(drawn, level):
    values_N, low, high = drawn
    wanted = naive.empirical_bernstein_upper(values_N, low=low, high=high, level=level)
    assert empirical_bernstein_upper(values_N, low=low, high=high, level=level) == pytest.approx(wanted, rel=1e-9)


@given(bounded(smallest=1), LEVELS)
def test_the_confidence_sequence_is_that_of_the_definition(drawn, level):
    values_N, low, high = drawn
    found = confidence_sequence(values_N, low=low, high=high, level=level)
    wanted_N2 = np.array(naive.confidence_sequence(values_N, low=low, high=high, level=level))
    np.testing.assert_allclose(found.centre_N, wanted_N2[:, 0], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.radius_N, wanted_N2[:, 1], rtol=1e-9)
    np.testing.assert_allclose(found.lower_N, np.maximum(wanted_N2[:, 0] - wanted_N2[:, 1], low), atol=1e-8)
    np.testing.assert_allclose(found.upper_N, np.minimum(wanted_N2[:, 0] + wanted_N2[:, 1], high), atol=1e-8)


def test_the_confidence_sequence_is_that_of_the_definition_where_bets_are_below_their_cap():
    # Bets of a fair coin at level 0.4 leave their cap of 1/2 after 17 samples.
    values_N = np.random.default_rng(0).integers(0, 2, 70).astype(float)
    found = confidence_sequence(values_N, low=0.0, high=1.0, level=0.4)
    wanted_N2 = np.array(naive.confidence_sequence(values_N, low=0.0, high=1.0, level=0.4))
    np.testing.assert_allclose(found.centre_N, wanted_N2[:, 0], rtol=1e-9)
    np.testing.assert_allclose(found.radius_N, wanted_N2[:, 1], rtol=1e-9)


@given(LEVELS, st.integers(0, 1000))
def test_spending_is_that_of_the_definition(level, look):
    assert spend(level, look=look) == pytest.approx(naive.spend(level, look=look), rel=1e-12)


@given(SEEDS, st.integers(2, 40), st.integers(0, 5))
def test_acceptance_uses_the_paired_truncated_differences(seed, n, round_index):
    rng = np.random.default_rng(seed)
    old_N, new_N = rng.exponential(2.0, n), rng.exponential(1.5, n)
    found = accept_growth(old_N, new_N, bound=1.5, level=0.1, round_index=round_index)
    changes = naive.paired_changes(old_N, new_N, bound=1.5)
    spent = naive.spend(0.1, look=round_index)
    wanted = naive.empirical_bernstein_upper(changes, low=-1.5, high=1.5, level=spent)
    centre, radius = naive.confidence_sequence(changes, low=-1.5, high=1.5, level=2 * spent)[-1]
    assert found.upper == pytest.approx(wanted, rel=1e-9)
    assert found.anytime_upper == pytest.approx(min(centre + radius, 1.5), rel=1e-9)
    assert found.mean == pytest.approx(naive.mean(changes), abs=1e-12)
    assert found.accepted == (wanted < 0)


@given(SEEDS, st.integers(1, 30), st.integers(2, 30), LEVELS, st.sampled_from([0.5, 3.0]))
def test_the_account_is_that_of_the_definitions(seed, num_train, num_test, delta, bound):
    rng = np.random.default_rng(seed)
    nets = {n: (rng.exponential(1.0, num_train), rng.exponential(1.2, num_test)) for n in ("old", "pop", "s", "new")}
    old, pop, s, new = (risk.NetworkLosses(train_M=a, test_K=b) for a, b in nets.values())
    block = risk.BlockClass(lipschitz=0.7, weight_norm=0.3, width=5, features=3)
    found = risk.test_risk(
        old=old, jumpboard_pop=pop, jumpboard_train=s, new=new, bound=bound, delta=delta, block=block,
        smallest_rms=None, norm_eps=None,
    )  # fmt: skip
    wanted = naive.routes(nets, bound=bound, delta=delta, lz=0.7, b=0.3, d=5, k=3)
    figures = {name: getattr(found, name) for name in wanted if hasattr(found, name)} | {
        "bound_a": found.route_a.bound,
        "probability_a": found.route_a.probability,
        "bound_b": found.route_b.bound,
        "probability_b": found.route_b.probability,
    }
    assert figures == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert abs(found.identity_residual) < 1e-12


# --- probe sizes ----------------------------------------------------------------------------------

NUM_PROBE = 400


@st.composite
def populations(draw):
    """A certificate at n = 400 whose limits straddle a tolerance, and the tolerance."""
    c = draw(st.sampled_from([0.1, 1.0, 5.0]))
    largest = draw(st.floats(0.1, 3.0))
    population = naive.Population(
        score=draw(st.sampled_from([-0.1, 0.0, 1.0])) * draw(st.floats(0.01, 2.0)),
        v1=0.0,
        largest=largest,
        h2=largest**2 * draw(st.floats(1.0, 1000.0)),
        c=c,
        level=0.05,
        num_candidates=draw(st.integers(1, 12)),
    )
    population.v1 = max(population.score, 0.0) * largest * draw(st.floats(0.0, 1.0))  # v1 = mu^T C mu <= S lmax
    gain = population.gain(population.score)
    if gain > 0 and draw(st.booleans()):
        tolerance = gain * draw(st.floats(0.1, 0.95))
    else:
        tolerance = gain * draw(st.floats(1.05, 3.0)) + 1e-3 * c
    return population, tolerance


def required(population, tolerance):
    """What the rule says from the limits at n = 400."""
    n = NUM_PROBE
    return required_probe_samples(
        gain=population.gain(population.score),
        gain_lower=population.gain(population.lower(n)),
        gain_upper=population.gain(population.upper(n)),
        noise_gain=population.gain(population.noise(n)),
        tolerance_nats=tolerance,
        level=0.05,
        num_candidates=population.num_candidates,
        num_probe=n,
    )


def hidden_signal():
    """A lower limit hidden at zero by the signal's own noise, at its largest."""
    return naive.Population(score=0.01, v1=0.012, largest=1.2, h2=1.44, c=0.8, level=0.05, num_candidates=8), 0.05


def hidden_noise():
    """A lower limit hidden at zero by the noise floor."""
    return naive.Population(score=0.01, v1=0.0, largest=0.01, h2=9.0, c=0.8, level=0.05, num_candidates=8), 0.05


@given(populations())
@example(hidden_signal())
@example(hidden_noise())
def test_the_required_samples_are_those_at_which_the_limits_first_decide(drawn):
    population, tolerance = drawn
    found, first = required(population, tolerance), population.first_deciding(tolerance)
    if first <= NUM_PROBE:
        assert found == NUM_PROBE  # decided already
    elif population.gain(population.score) < tolerance or population.lower(NUM_PROBE) > 0:
        assert found == pytest.approx(max(first, NUM_PROBE), rel=1e-6, abs=1.0)  # a whole number: one more at most
    else:  # the lower limit is hidden at zero: the larger of two worst cases
        worst = max(first_with(population, tolerance, v1) for v1 in (largest_v1(population), v1_at_zero(population)))
        assert first * (1 - 1e-6) <= found == pytest.approx(max(worst, NUM_PROBE), rel=1e-6, abs=1.0)


def largest_v1(population):
    """mu^T C mu <= S lmax."""
    return population.score * population.largest


def v1_at_zero(population):
    """v1 for a lower limit that is exactly zero at n = 400."""
    sd_sq = (population.score / population.z_each) ** 2
    return max(0.0, (sd_sq - population.noise(NUM_PROBE) ** 2) * NUM_PROBE / 4)


def first_with(population, tolerance, v1):
    population.v1 = v1
    return population.first_deciding(tolerance)


def test_the_required_samples_agree_with_a_certificate_of_that_size():
    # Real certificates use n - 1 in the noise floor and Student's quantiles: both within 1 % of it at 400 rows.
    def stat(n, value):
        return UStatistic(
            value=value, num_rows=n, num_samples=n, cov_frobenius_sq=40.0, cov_trace=30.0, cov_largest=1.2,
            first_order_variance=value * 0.6,
        )  # fmt: skip

    def gain(score):
        return 0.8 * math.sqrt(max(score, 0.0))

    for value, tolerance in ((0.05, 0.2), (0.1, 0.16), (0.0, 0.1)):
        now = stat(400, value)
        n = required_probe_samples(
            gain=gain(value), gain_lower=gain(now.lower_limit(0.05 / 4)), gain_upper=gain(now.upper_limit(0.05)),
            noise_gain=gain(now.noise_sd), tolerance_nats=tolerance, level=0.05, num_candidates=4, num_probe=400,
        )  # fmt: skip
        assert n > 400
        for size, decided in ((n * 1.02, True), (n * 0.98, False)):
            then = stat(int(size), value)
            if gain(value) > tolerance:
                assert (gain(then.lower_limit(0.05 / 4)) > tolerance) is decided
            else:
                assert (gain(then.upper_limit(0.05)) < tolerance) is decided
