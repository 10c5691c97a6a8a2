"""How often pruning takes the eventual winner, and what it saves, over a thousand synthetic studies."""

import numpy as np
import pytest

from growth_service.core.judging import Rule
from growth_service.simulate import Scenario, play, synthetic_trials
from growth_service.spec import SchedulerSpec

BUDGET = 10**12
SCENARIOS = {
    "mixed": Scenario(),
    "nothing grows, quiet": Scenario(grows=0.0, noise=(0.0, 0.002)),
    "all grow, noisy": Scenario(grows=1.0, noise=(0.01, 0.03)),
    "strong decay at the end": Scenario(anneal=(0.2, 0.4)),
    "equal stages": Scenario(shares=(0.2,) * 5),
}


def played(scenario, rule, *, num=1000):
    """Shares of studies whose winner was lost, of compute that was spent, and mean loss above the winner's."""
    lost, spent, excess = [], [], []
    for study in range(num):
        losses = synthetic_trials(np.random.default_rng([7, study]), scenario)
        found = play(losses, shares=scenario.shares, rule=rule, budget_flops=BUDGET)
        lost.append(found.winner_lost)
        spent.append(found.spent_share)
        excess.append(found.best_loss / losses[:, -1].min() - 1)
    return np.mean(lost), np.mean(spent), np.mean(excess)


def test_at_most_one_winner_in_twenty_is_pruned_and_a_third_of_the_compute_is_saved():
    lost, spent, excess = played(SCENARIOS["mixed"], SchedulerSpec().of_budget(BUDGET))
    assert lost <= 0.05
    assert spent <= 0.70
    assert excess <= 0.001


@pytest.mark.parametrize("name", [n for n in SCENARIOS if n != "mixed"])
def test_winners_are_safe_in_other_studies_too(name):
    lost, _, excess = played(SCENARIOS[name], SchedulerSpec().of_budget(BUDGET), num=300)
    assert lost <= 0.05
    assert excess <= 0.005  # half of what seeds make of it


def test_less_optimism_prunes_more_and_errs_more():
    bold, default, shy = (played(SCENARIOS["mixed"], Rule(optimism=o, grace_flops=BUDGET // 10), num=200)
                          for o in (1.0, 1.25, 2.0))  # fmt: skip
    assert bold[1] < default[1] < shy[1]
    assert bold[0] >= default[0] >= shy[0]


def test_a_rule_without_patience_would_be_seen():
    """The bar of the first test can be missed: a rule that believes in no further improvement misses it."""
    greedy = Rule(name="ratio", prune_ratio=1.0 + 1e-9, grace_flops=0)
    lost, _, _ = played(SCENARIOS["mixed"], greedy, num=200)
    assert lost > 0.05


def test_nothing_is_pruned_where_no_rule_is():
    found = play(
        synthetic_trials(np.random.default_rng(0), Scenario()), shares=Scenario().shares, rule=Rule(name="none")
    )
    assert set(found.pruned_after) == {None}
    assert found.spent_share == 1.0
    assert not found.winner_lost


def test_the_first_wave_is_never_pruned():
    """It has nothing to be compared with, whatever it does."""
    losses = np.linspace(9.0, 1.0, 12)[:, None] * np.ones((1, 7))
    found = play(losses, shares=Scenario().shares, rule=Rule(name="ratio", prune_ratio=1.01), wave_size=3)
    assert set(found.pruned_after[:3]) == {None}


def test_synthetic_losses_are_positive_and_repeat():
    one, other = (synthetic_trials(np.random.default_rng(3), Scenario()) for _ in range(2))
    assert np.array_equal(one, other)
    assert one.shape == (12, 7)
    assert (one > 0).all()
