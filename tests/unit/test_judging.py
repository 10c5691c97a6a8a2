"""Which trials may go on: what the others have shown, and the rules that compare with it."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth_service.core.decisions import Stop, TrainOn
from growth_service.core.judging import Incumbents, Rule, Standing, judge, optimistic_loss
from growth_service.spec import SchedulerSpec

NAMES = st.sampled_from("abcdef")


def at(flops, loss, *, trial="other", stage=0, reachable=0.0):
    return Standing(trial=trial, stage=stage, flops=flops, loss_val=loss, reachable_nats=reachable)


def curve(*losses, trial="other", step=100):
    return [at((s + 1) * step, loss, trial=trial, stage=s) for s, loss in enumerate(losses)]


def incumbents(*histories):
    found = Incumbents()
    for history in histories:
        found.add(history)
    return found


def judged(finished, *, standing=None, rule=None, until=2000, **changes):
    mine = standing or at(1000, 0.6, trial="mine")
    rule = rule or Rule(**{"name": "ratio", "prune_ratio": 1.5, "grace_flops": 100} | changes)
    return judge([mine], incumbents(*([r] for r in finished)), rule=rule, until_flops=until)


# --- a loss many times the best -------------------------------------------------------------------


def test_a_trial_far_behind_a_finished_one_at_no_more_compute_is_pruned():
    assert judged([at(900, 0.39)]) == Stop(
        cause="pruned",
        reason="validation loss 0.6 at 1e+03 FLOPs against 0.39 of other at 900: more than 1.5 times as high",
    )


def test_a_trial_within_the_ratio_goes_on():
    assert judged([at(900, 0.41)]) == TrainOn(
        reason="validation loss 0.6 at 1e+03 FLOPs against 0.41 of other at 900: within a factor of 1.5"
    )


def test_a_trial_exactly_at_the_ratio_goes_on():
    assert isinstance(judged([at(900, 0.5)], standing=at(1000, 0.75)), TrainOn)  # 0.75 = 1.5 * 0.5 without rounding


def test_a_rival_at_equal_compute_counts_and_one_at_more_does_not():
    assert isinstance(judged([at(1000, 0.1)]), Stop)
    assert judged([at(1001, 0.1)]) == TrainOn(reason="nothing finished to compare mine with at its compute yet")


def test_nothing_is_pruned_where_nothing_has_finished():
    assert judged([]) == TrainOn(reason="nothing finished to compare mine with at its compute yet")


@pytest.mark.parametrize("name", ["law", "ratio", "median", "asha"])
def test_grace_ends_at_its_compute(name):
    others = [curve(0.1, 0.1, 0.1, trial=t) for t in "abc"]
    mine = curve(9.0, 8.99, trial="mine")
    for grace, kind in ((201, TrainOn), (200, Stop)):
        rule = Rule(name=name, prune_ratio=1.5, grace_flops=grace)
        assert isinstance(judge(mine, incumbents(*others), rule=rule, until_flops=300), kind)


@pytest.mark.parametrize("name", ["law", "ratio", "median", "asha"])
def test_a_loss_that_is_no_number_is_pruned_at_once(name):
    for bad in (math.nan, math.inf):
        decision = judge([at(1, bad)], Incumbents(), rule=Rule(name=name, grace_flops=100), until_flops=9)
        assert (type(decision), decision.cause) == (Stop, "pruned")


def test_no_rule_prunes_nothing_but_that():
    assert isinstance(judged([at(1, 0.001)], rule=Rule(name="none")), TrainOn)


# --- what the finished trials have shown ------------------------------------------------------------


@given(st.lists(st.builds(at, st.integers(1, 50), st.floats(0.0, 10.0), trial=NAMES), max_size=30), st.integers(0, 60))
def test_the_best_at_some_compute_is_the_best_of_all_that_needed_no_more(found, flops):
    """The frontier is kept as trials come; this asks all of them each time."""
    within = [s for s in found if s.flops <= flops]
    wanted = min(((s.loss_val, s.trial) for s in within), default=None)
    best = incumbents(*([s] for s in found)).best_at(flops)
    assert (best and (best[0], best[2])) == wanted


@given(st.lists(st.builds(at, st.integers(1, 50), st.floats(0.0, 10.0), trial=NAMES), max_size=12), st.randoms())
def test_the_order_of_finished_trials_does_not_matter(found, random):
    shuffled = list(found)
    random.shuffle(shuffled)
    one, other = (incumbents(*([s] for s in order)) for order in (found, shuffled))
    for flops in range(0, 60, 7):
        assert (one.best_at(flops) or ())[::2] == (other.best_at(flops) or ())[::2]
    assert [one.remaining(k / 10) for k in range(11)] == [other.remaining(k / 10) for k in range(11)]


def test_improvements_still_to_come_are_those_of_the_trial_that_made_the_most():
    found = incumbents(curve(1.0, 0.8, 0.6, 0.5), curve(1.0, 0.9, 0.5, 0.3, trial="b"))
    assert found.remaining(0.25) == pytest.approx(0.3)
    assert found.remaining(0.5) == pytest.approx(0.3 / 0.9)
    assert found.remaining(0.75) == pytest.approx(0.6)
    assert found.remaining(1.0) == 1.0


def test_where_nobody_stood_more_was_still_to_come():
    found = incumbents([at(500, 1.0), at(1000, 0.5)])
    assert found.remaining(0.5) == 0.5
    assert found.remaining(0.7) == 0.5  # not 1, though nobody stood at 70 %
    assert found.remaining(0.2) == 1.0  # nothing is known so early; the trial's own curve decides


def test_a_trial_without_a_finite_loss_shows_nothing():
    assert incumbents(curve(math.nan, math.inf)).num_trials == 0


# --- optimistic continuations -----------------------------------------------------------------------


def test_an_optimistic_loss_follows_the_steepest_slope_without_a_floor():
    mine = [at(100, 1.0), at(200, 0.5), at(400, 0.45)]  # slope 1, then less
    found = optimistic_loss(mine, incumbents([at(100, 9.0), at(800, 8.9)]), until_flops=800, optimism=1.0)
    assert found == pytest.approx(0.225)


def test_an_optimistic_loss_is_no_higher_than_what_others_still_made():
    mine = [at(100, 1.0), at(200, 0.99)]
    others = incumbents([at(400, 1.0, stage=0), at(800, 0.2, stage=1)])
    assert optimistic_loss(mine, others, until_flops=400, optimism=1.0) == pytest.approx(0.99 * 0.2)


@given(st.floats(1.0, 4.0), st.floats(0.0, 2.0))
def test_more_optimism_and_more_reachable_gain_never_raise_the_bound(optimism, reachable):
    plain, others = curve(2.0, 1.5), incumbents(curve(2.0, 1.2, 1.0))
    mine = [*plain[:-1], at(200, 1.5, stage=1, reachable=reachable)]
    bound = optimistic_loss(plain, others, until_flops=300, optimism=1.0)
    assert optimistic_loss(mine, others, until_flops=300, optimism=optimism) <= bound


def test_one_record_says_nothing_about_what_comes():
    assert optimistic_loss(curve(5.0), incumbents(curve(1.0, 0.9)), until_flops=900, optimism=1.0) == 0.0


def test_a_loss_that_only_rises_is_held_to_what_others_still_made():
    mine, others = curve(2.3, 5.0, 50.0), incumbents(curve(1.0, 0.5, 0.3, 0.2))
    assert optimistic_loss(mine, others, until_flops=400, optimism=1.0) == pytest.approx(50 * 0.2 / 0.3)
    assert isinstance(judge(mine, others, rule=LAW, until_flops=400), Stop)


LAW = Rule(optimism=1.0, margin=0.05)


def test_a_trial_that_cannot_reach_the_best_is_pruned_with_its_numbers():
    mine, best = curve(2.0, 1.9, trial="mine"), incumbents(curve(1.0, 0.7, 0.5, trial="best"))
    decision = judge(mine, best, rule=LAW, until_flops=300)
    assert decision.cause == "pruned"
    assert re_numbers(decision.reason, "1.9", "1.357", "0.5", "best", "5%")


def re_numbers(text, *parts):
    return all(part in text for part in parts)


def test_a_trial_that_is_steep_enough_goes_on():
    mine, best = curve(9.0, 4.0, trial="mine"), incumbents(curve(3.0, 2.5, 2.4, trial="best"))
    assert isinstance(judge(mine, best, rule=LAW, until_flops=300), TrainOn)


def test_the_best_at_more_compute_than_the_trial_will_have_does_not_count():
    mine, best = curve(2.0, 1.9, trial="mine"), incumbents([at(900, 0.1)])
    assert "nothing finished within" in judge(mine, best, rule=LAW, until_flops=300).reason


def test_certificates_that_leave_a_gain_open_keep_a_trial():
    mine, best = curve(2.0, 1.9, trial="mine"), incumbents(curve(1.0, 0.7, 0.5, trial="best"))
    open_ = [mine[0], at(200, 1.9, stage=1, trial="mine", reachable=1.0)]
    assert isinstance(judge(open_, best, rule=LAW, until_flops=300), TrainOn)


@given(st.lists(st.floats(0.05, 5.0), min_size=3, max_size=6))
def test_a_finished_trial_would_not_have_been_pruned_for_its_own_sake(losses):
    """Its own curve is among those that say what was still to come."""
    whole = curve(*losses)
    for past in range(1, len(whole)):
        decision = judge(
            whole[:past], incumbents(whole), rule=Rule(optimism=1.0, margin=1e-9), until_flops=whole[-1].flops
        )
        last_is_best = losses[-1] <= min(losses)
        assert isinstance(decision, TrainOn) or not last_is_best


# --- ranks --------------------------------------------------------------------------------------------


def test_the_median_rule_compares_after_the_same_stage():
    others = incumbents(*(curve(1.0, loss, trial=f"t{loss}") for loss in (0.1, 0.2, 0.3, 0.4)))
    rule = Rule(name="median")
    for loss, kind in ((0.25, TrainOn), (0.35, Stop)):
        assert isinstance(judge(curve(1.0, loss), others, rule=rule, until_flops=900), kind)


def test_asha_asks_at_its_rungs_only():
    others = incumbents(*(curve(*[loss] * 8, trial=f"t{loss}") for loss in (0.1, 0.2, 0.3)))
    mine, rule = curve(*[0.25] * 8), Rule(name="asha", reduction=3)
    stopped = [s for s in range(8) if isinstance(judge(mine[: s + 1], others, rule=rule, until_flops=900), Stop)]
    assert stopped == [0, 1, 3, 7]
    best = curve(*[0.05] * 8)
    assert not any(isinstance(judge(best[: s + 1], others, rule=rule, until_flops=900), Stop) for s in range(8))


def test_losses_of_a_stage_are_kept_in_order():
    others = incumbents(curve(3.0), curve(1.0), curve(2.0))
    assert all(a <= b for a, b in pairwise(others.losses_after(0)))
    assert others.losses_after(5) == []


def test_a_rule_is_by_default_that_of_a_job():
    assert SchedulerSpec(grace_share=0.0).of_budget(1e12) == Rule()
