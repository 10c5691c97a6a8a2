"""The frontier keeps exactly what nothing beats; the preference is its cheapest good point."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth_service.core.frontier import Outcome, Preference, frontier, prefer

AXIS = st.integers(1, 6).map(float) | st.floats(0.1, 10.0)  # small integers make ties
OUTCOMES = st.lists(
    st.builds(Outcome, trial=st.text("abc", min_size=1, max_size=3), flops=AXIS, loss=AXIS), max_size=10
)


def beats(p, o):
    return p.flops <= o.flops and p.loss <= o.loss and (p.flops, p.loss) != (o.flops, o.loss)


@given(OUTCOMES)
def test_nothing_on_the_frontier_is_beaten_and_all_else_is(outcomes):
    kept = frontier(outcomes)
    assert sorted(kept) == sorted(o for o in outcomes if not any(beats(p, o) for p in outcomes))


@given(OUTCOMES)
def test_the_frontier_of_a_frontier_is_itself(outcomes):
    assert frontier(frontier(outcomes)) == frontier(outcomes)


@given(OUTCOMES, st.randoms(use_true_random=False))
def test_the_frontier_does_not_depend_on_the_order(outcomes, random):
    shuffled = list(outcomes)
    random.shuffle(shuffled)
    assert frontier(shuffled) == frontier(outcomes)


@given(OUTCOMES)
def test_more_compute_on_the_frontier_never_means_more_loss(outcomes):
    kept = frontier(outcomes)
    assert [o.flops for o in kept] == sorted(o.flops for o in kept)
    assert [o.loss for o in kept] == sorted((o.loss for o in kept), reverse=True)


@given(OUTCOMES.filter(bool), st.floats(0.0, 5.0), st.floats(0.001, 5.0))
def test_a_beaten_outcome_changes_nothing(outcomes, dearer, worse):
    one = outcomes[0]
    assert frontier([*outcomes, Outcome("new", one.flops + dearer, one.loss + worse)]) == frontier(outcomes)


@given(OUTCOMES.filter(bool))
def test_the_lowest_loss_and_the_lowest_compute_are_on_the_frontier(outcomes):
    kept = frontier(outcomes)
    assert min(o.loss for o in outcomes) == kept[-1].loss
    assert min(o.flops for o in outcomes) == kept[0].flops


def test_equal_outcomes_stay_together():
    twins = [Outcome("b", 1.0, 1.0), Outcome("a", 1.0, 1.0)]
    assert frontier(twins) == [Outcome("a", 1.0, 1.0), Outcome("b", 1.0, 1.0)]


@pytest.mark.parametrize(
    "lost", [Outcome("x", math.nan, 0.1), Outcome("x", 0.1, math.nan), Outcome("x", math.nan, math.nan)]
)
def test_an_outcome_with_nan_is_not_on_the_frontier(lost):
    assert frontier([lost, Outcome("a", 1.0, 1.0)]) == [Outcome("a", 1.0, 1.0)]


def test_nothing_gives_an_empty_frontier_and_no_preference():
    assert (frontier([]), prefer([])) == ([], None)


def test_outcomes_with_nan_alone_give_no_preference():
    assert prefer([Outcome("a", 1.0, math.nan)]) is None


def test_outcomes_with_infinite_loss_alone_give_no_preference():
    assert prefer([Outcome("a", 1.0, math.inf)]) is None


def test_a_negative_loss_can_be_preferred():
    assert prefer([Outcome("a", 1.0, -1.0)]).trial == "a"


@given(OUTCOMES.filter(bool), st.sampled_from([0.0, 0.02, 0.5]))
def test_the_preference_is_the_cheapest_within_the_noise_of_the_best(outcomes, noise_share):
    good = [o for o in outcomes if o.loss <= min(p.loss for p in outcomes) * (1 + noise_share)]
    cheapest = min(o.flops for o in good)
    chosen = prefer(outcomes, noise_share=noise_share)
    assert any(o.trial == chosen.trial and o.flops == cheapest for o in good)


def test_a_cheaper_schedule_within_the_noise_is_preferred_with_its_saving():
    found = prefer([Outcome("deep", 4e9, 1.0), Outcome("lean", 1e9, 1.02), Outcome("tiny", 1e8, 1.03)])
    assert found == Preference("lean", "its loss (1.02 nats) is within 2% of the best (1, deep) for 75% less compute")


def test_the_best_schedule_is_preferred_where_nothing_cheaper_comes_close():
    assert prefer([Outcome("deep", 4e9, 1.0), Outcome("lean", 1e9, 1.03)]) == Preference(
        "deep", "it has the lowest validation loss (1 nats), and nothing cheaper comes within 2%"
    )


def test_compute_that_differs_by_less_than_the_share_counts_as_equal():
    dear, cheap = Outcome("dear", 100.5, 0.3), Outcome("cheap", 100.0, 0.4)
    assert frontier([dear, cheap]) == [cheap, dear]
    assert frontier([dear, cheap], same_share=0.01) == [dear]
    assert frontier([dear, cheap], same_share=0.001) == [cheap, dear]
