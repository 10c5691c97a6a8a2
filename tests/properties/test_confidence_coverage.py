"""What the limits promise, by simulation: misses over many seeded studies.

Bars are binomial: a limit that misses at its level passes a bar with probability 1 - 1e-4, so a failure
means that it misses more often. Shape legend: R = repeated studies, N = samples of one.
"""

import math

import numpy as np
import pytest
import scipy.stats

from growth_service.core.confidence import accept_growth, confidence_sequence, empirical_bernstein_upper

LEVEL = 0.1
LAWS = {
    "rare ones": lambda rng, n: (rng.random(n) < 0.03).astype(float),
    "fair coin": lambda rng, n: (rng.random(n) < 0.5).astype(float),
    "uniform": lambda rng, n: rng.random(n),
    "narrow": lambda rng, n: rng.beta(50, 50, n),
    "skewed": lambda rng, n: rng.beta(0.1, 0.9, n),
}
MEANS = {"rare ones": 0.03, "fair coin": 0.5, "uniform": 0.5, "narrow": 0.5, "skewed": 0.1}


def most_misses(repeats, level):
    """Misses that a limit of this level exceeds once in 10,000 seeds."""
    return int(scipy.stats.binom.ppf(1 - 1e-4, repeats, level))


@pytest.mark.parametrize("law", LAWS)
def test_the_mean_is_hardly_ever_outside_at_any_time(law):
    rng, repeats = np.random.default_rng(len(law)), 400
    missed_below = missed_above = 0
    for _ in range(repeats):
        found = confidence_sequence(LAWS[law](rng, 2000), low=0.0, high=1.0, level=LEVEL)
        missed_above += bool((found.upper_N < MEANS[law]).any())
        missed_below += bool((found.lower_N > MEANS[law]).any())
    assert missed_below + missed_above <= most_misses(repeats, LEVEL)
    assert max(missed_below, missed_above) <= most_misses(repeats, LEVEL / 2)  # either side alone holds at half


def test_peeking_at_limits_of_a_fixed_size_misses_far_more_often():
    # The simulation can tell: Student's two-sided 90 % limits, looked at after each sample from 30 on.
    rng, repeats = np.random.default_rng(0), 200
    n_N = np.arange(1, 2001)
    missed = 0
    for _ in range(repeats):
        x_N = rng.random(2000)
        mean_N = np.cumsum(x_N) / n_N
        sd_N = np.sqrt(np.maximum(np.cumsum(x_N**2) / n_N - mean_N**2, 0.0))
        missed += bool((np.abs(mean_N - 0.5) > 1.645 * sd_N / np.sqrt(n_N))[30:].any())
    assert missed > most_misses(repeats, LEVEL)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("n", [5, 50, 500])
def test_the_fixed_sample_limit_covers(law, n):
    rng, repeats = np.random.default_rng(n), 1000
    limits = [empirical_bernstein_upper(LAWS[law](rng, n), low=0.0, high=1.0, level=LEVEL) for _ in range(repeats)]
    assert sum(limit < MEANS[law] for limit in limits) <= most_misses(repeats, LEVEL)


def test_many_rounds_of_worthless_growth_accept_hardly_any():
    # 20 rounds on one validation sample each study; no network is better than the old one.
    repeats, accepted = 200, 0
    rng = np.random.default_rng(3)
    for _ in range(repeats):
        old_N = rng.exponential(1.0, 200)
        accepted += any(
            accept_growth(old_N, old_N + rng.normal(0.0, 0.3, 200), bound=3.0, level=LEVEL, round_index=j).accepted
            for j in range(20)
        )
    assert accepted <= most_misses(repeats, LEVEL)


def test_a_real_gain_is_accepted_by_a_sample_of_ordinary_size():
    # 5,000 paired samples, gain 0.05 nats, spread 0.4: standard error 0.0057, the limit at most 0.035 above.
    rng, repeats = np.random.default_rng(4), 100
    accepted = sum(
        accept_growth(np.ones(5000), np.ones(5000) - rng.normal(0.05, 0.4, 5000), bound=3.0, level=0.05).accepted
        for _ in range(repeats)
    )
    assert accepted >= 95


def test_the_spread_of_the_simulated_laws_differs():
    spreads = [LAWS[law](np.random.default_rng(0), 20000).std() for law in LAWS]
    assert max(spreads) > 8 * min(spreads)
    assert all(
        abs(LAWS[law](np.random.default_rng(0), 200000).mean() - MEANS[law]) < 4 * 0.5 / math.sqrt(2e5) for law in LAWS
    )
