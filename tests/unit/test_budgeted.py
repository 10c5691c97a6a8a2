"""What the rest of the budget buys: training on against growing, data, and the end."""

import math
from dataclasses import replace

import pytest

from growth_service.core import advantage as model
from growth_service.core.advantage import Outlook, advantage, could_pay, line_for, outlook
from growth_service.core.decisions import CandidateReading, Grow, Past, Reading, SizeAfter, Stop, TrainOn
from growth_service.core.policies import BudgetAware, Sight, sight_of
from growth_service.core.rules import decide
from growth_service.core.steps import AddBlock, AddData, Deepen, Widen
from growth_service.errors import UserError

POLICY = BudgetAware()
SIZES = (
    SizeAfter(change=Deepen(), params=2_000, flops_per_sample=200),
    SizeAfter(change=Widen(times=1.5), params=2_200, flops_per_sample=220),
    SizeAfter(change=Widen(times=2.0), params=4_000, flops_per_sample=400),
)
PAST = (Past(loss_val=2.0, grew=False), Past(loss_val=1.5, grew=False))


def reading(**changes):
    """A network of 1,000 parameters with nine tenths of its budget left; a sample costs 100 FLOPs."""
    plain = Reading(
        stage=1, num_stages=6, spent_flops=10**6, budget_flops=10**7, data_share=1.0, tolerance_nats=0.02, past=PAST,
        loss_train=1.5, loss_val=1.5, params=1_000, targets_seen=10_000, targets_available=10**6,
        targets_per_step=10, flops_per_sample=100, sizes_after=SIZES,
    )  # fmt: skip
    return replace(plain, **changes)


def candidate(**changes):
    plain = {
        "kind": "depth", "path": "stem", "verdict": "undetermined", "gain_lower": -0.02, "gain_upper": 0.2,
        "transfer_gain": 0.03, "transfer_upper": 0.05, "realisable": 0.8, "added_flops": 1000,
    }  # fmt: skip
    return CandidateReading(**plain | changes)


def seen_often(**changes):
    """Where every line is certain that growing pays: a hundred thousand targets for each parameter are to come."""
    plain = {"budget_flops": 10**12, "targets_seen": 10**6, "targets_available": 10**10}
    return reading(**plain | changes)


# --- where a network would be -----------------------------------------------------------------------


def test_the_outlook_spends_the_rest_of_the_budget_at_the_new_cost():
    at = outlook(reading(), SIZES[0])
    assert at == Outlook(steps=4_500.0, targets_per_param=22.5, gap=0.0)


def test_the_cost_of_the_step_itself_is_taken_off():
    dear = replace(SIZES[0], flops=9 * 10**6)
    assert outlook(reading(), dear).steps == 0
    assert outlook(reading(), replace(SIZES[0], flops=10**6)).steps == 4_000


def test_sequences_count_their_tokens():
    at = outlook(reading(targets_per_sample=64), SIZES[0])
    assert at.steps == pytest.approx(64 * 45_000 / 10)


def test_the_gap_is_a_share_of_the_validation_loss():
    assert outlook(reading(loss_train=0.3), SIZES[0]).gap == pytest.approx(0.8)


def test_features_stay_finite_at_the_ends():
    found = Outlook(steps=0.0, targets_per_param=0.0, gap=-3.0).features
    assert all(map(math.isfinite, found))
    assert found[-3:] == (0.0, 0.0, 0.0)
    at = Outlook(steps=1.0, targets_per_param=1.0, gap=7.0, predicted_gain=0.4, cosine=0.3)
    assert at.features == (1.0, 0.0, 1.0, 0.4, 0.3)
    assert Outlook(steps=1.0, targets_per_param=1.0, gap=0.5, predicted_gain=0.4, cosine=-0.3).features[-1] == 0.0


def test_the_predicted_gain_is_the_largest_of_a_block_as_a_share_of_the_loss():
    found = (candidate(gain=0.3), candidate(gain=0.6), candidate(kind="width", gain=1.2))
    assert outlook(reading(candidates=found), SIZES[0]).predicted_gain == pytest.approx(0.4)
    assert outlook(reading(candidates=(candidate(kind="width", gain=1.2),)), SIZES[0]).predicted_gain is None


def test_the_cosine_is_the_largest_of_a_block():
    found = (candidate(gain=0.3, cosine=-0.2), candidate(gain=0.1, cosine=0.5), candidate(kind="width", cosine=0.9))
    assert outlook(reading(candidates=found), SIZES[0]).cosine == 0.5
    assert outlook(reading(), SIZES[0]).cosine is None


def test_width_is_worth_less_as_long_as_training_and_held_out_data_agree():
    def promised(cosine, size=SIZES[2]):
        return advantage(size.change, outlook(reading(candidates=(candidate(gain=0.3, cosine=cosine),)), size)).mean

    assert promised(-0.5) == promised(0.0) > promised(0.5) > promised(1.0)
    assert promised(0.0, SIZES[0]) == promised(1.0, SIZES[0])


def test_the_later_a_step_comes_the_less_it_is_worth():
    found = [
        advantage(s.change, outlook(reading(spent_flops=spent), s)).mean
        for s in SIZES for spent in (5 * 10**6, 4 * 10**6, 10**6)
    ]  # fmt: skip
    assert found[:3] == sorted(found[:3])
    assert found[3:6] == sorted(found[3:6])


def test_certificates_that_promise_more_speak_for_width():
    def promised(gain):
        return advantage(Widen(), outlook(reading(candidates=(candidate(gain=gain),)), SIZES[2])).mean

    assert promised(-0.1) == promised(0.0) < promised(0.5) < promised(1.5) == promised(9.0)


# --- the lines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (Deepen(), "depth*2"),
        (Deepen(exact=False), "stack*2"),
        (Widen(times=1.25), "width*1.5"),
        (Widen(times=1.5), "width*1.5"),
        (Widen(times=2.0), "width*2"),
        (Widen(times=3.0), "width*2"),
    ],
)
def test_a_step_has_the_line_of_the_nearest_recorded_one(change, line):
    assert line_for(change, seeing=True) is model.LINES[line]
    assert line_for(change, seeing=False) is model.BLIND_LINES[line]


def test_a_step_that_was_never_recorded_has_no_advantage():
    assert advantage(AddBlock(site="stem"), outlook(reading(), SIZES[0])) is None


@pytest.mark.parametrize("line", [*model.LINES.values(), *model.BLIND_LINES.values()])
def test_more_targets_for_each_parameter_speak_for_growing(line):
    assert line.weights[1] > 0
    assert line.sd > 0


def test_an_advantage_is_certain_to_a_degree():
    found = model.Advantage(mean=0.1, sd=0.05)
    assert found.lower(0.5) == pytest.approx(0.1)
    assert found.lower(0.9) == pytest.approx(0.1 - 1.2816 * 0.05, abs=1e-4)
    assert found.lower(0.1) == pytest.approx(0.1 + 1.2816 * 0.05, abs=1e-4)


# --- the rule ---------------------------------------------------------------------------------------


def test_a_network_that_saw_much_grows_and_one_that_saw_little_trains_on():
    grown, trained = decide(seen_often(), POLICY), decide(reading(targets_seen=10, budget_flops=1_900_000), POLICY)
    assert isinstance(grown, Grow)
    assert isinstance(trained, TrainOn)
    for decision in (grown, trained):
        assert "over training on, the best of 3" in decision.reason


def test_the_step_with_the_largest_advantage_is_taken(monkeypatch):
    for winner in ("depth*2", "width*1.5", "width*2"):
        lines = {k: replace(v, weights=(0.2 if k == winner else 0.1, 0, 0, 0, 0)) for k, v in model.LINES.items()}
        monkeypatch.setattr(model, "BLIND_LINES", lines)
        (change,) = decide(reading(), POLICY).changes
        assert str(change) == winner


def test_of_two_equal_steps_the_first_axis_is_preferred(monkeypatch):
    same = {k: replace(v, weights=(0.1, 0, 0, 0, 0), sd=0.05) for k, v in model.LINES.items()}
    monkeypatch.setattr(model, "BLIND_LINES", same)
    assert decide(reading(), POLICY).changes == (Deepen(),)


def test_confidence_holds_a_step_back(monkeypatch):
    monkeypatch.setattr(
        model, "BLIND_LINES", {k: replace(v, weights=(0.05, 0, 0, 0, 0), sd=0.1) for k, v in model.LINES.items()}
    )
    assert isinstance(decide(reading(), POLICY), Grow)
    assert isinstance(decide(reading(), replace(POLICY, confidence=0.8)), TrainOn)
    assert isinstance(decide(reading(), replace(POLICY, confidence=0.65)), Grow)


def test_saturation_ends_a_trial_whatever_growing_promises():
    flat = candidate(verdict="saturated", gain_upper=0.004)
    decision = decide(seen_often(candidates=(flat,)), POLICY)
    assert (type(decision), decision.cause) == (Stop, "saturated")


def test_what_does_not_transfer_calls_for_data_or_ends_the_trial():
    found = (candidate(transfer_upper=0.006),)
    assert decide(seen_often(candidates=found, data_share=0.5), POLICY).changes == (AddData(share=1.0),)
    assert decide(seen_often(candidates=found), POLICY).cause == "no_transferable_gain"


@pytest.mark.parametrize(("seen", "adds"), [(400_000, False), (500_000, True)])
def test_data_is_added_after_a_pass_over_the_subset(seen, adds):
    decision = decide(reading(data_share=0.5, targets_seen=seen), POLICY)
    assert (isinstance(decision, Grow) and decision.changes == (AddData(share=1.0),)) is adds
    without = replace(POLICY, axes=("depth", "stream"))
    kept = decide(reading(data_share=0.5, targets_seen=seen), without)
    assert not isinstance(kept, Grow) or not isinstance(kept.changes[0], AddData)


def overfitting(**changes):
    worse = (Past(loss_val=1.0, grew=False), Past(loss_val=1.1, grew=False))
    return reading(targets_seen=10, budget_flops=1_900_000, past=worse, **changes)


def test_a_network_that_gets_worse_ends_where_no_step_promises_anything():
    decision = decide(overfitting(), POLICY)
    assert (type(decision), decision.cause) == (Stop, "overfitting")


def test_a_loss_within_its_noise_is_no_overfitting():
    level = (Past(loss_val=1.0, grew=False), Past(loss_val=1.005, grew=False))
    assert isinstance(decide(replace(overfitting(), past=level), POLICY), TrainOn)


def test_the_stage_after_a_step_may_end_worse():
    grown = (Past(loss_val=1.0, grew=True), Past(loss_val=1.1, grew=False))
    assert isinstance(decide(replace(overfitting(), past=grown), POLICY), TrainOn)


@pytest.mark.parametrize("left", [100, 10**5])
def test_a_step_that_leaves_too_little_training_is_not_considered(left):
    now = seen_often(spent_flops=10**7 - left, budget_flops=10**7)
    decision = decide(now, POLICY)
    assert isinstance(decision, TrainOn)
    assert "does not pay for any step" in decision.reason
    worse = (Past(loss_val=1.0, grew=False), Past(loss_val=1.1, grew=False))
    assert decide(replace(now, past=worse), POLICY).cause == "overfitting"


@pytest.mark.parametrize("left", [0, 500_000, 800_000, 10**6, 10**7])
@pytest.mark.parametrize("size", [*SIZES, replace(SIZES[0], params=10**6), replace(SIZES[0], flops=9 * 10**6)])
def test_a_step_could_pay_where_its_advantage_is_known(left, size):
    now = reading(spent_flops=10**7, budget_flops=10**7 + left, targets_per_sample=3, targets_per_step=20)
    known = advantage(size.change, outlook(now, size)) is not None
    assert could_pay(size, left=left, targets_per_sample=3, targets_per_step=20) is known


def test_nothing_is_said_about_networks_far_larger_than_any_that_was_recorded():
    huge = tuple(replace(s, params=10**9) for s in SIZES)
    assert isinstance(decide(reading(sizes_after=huge, loss_train=0.1), POLICY), TrainOn)


def test_without_steps_a_trial_trains_on():
    assert isinstance(decide(reading(sizes_after=()), POLICY), TrainOn)


# --- the policy as a value ----------------------------------------------------------------------------


def test_the_steps_are_those_of_the_axes_in_their_order():
    assert POLICY.steps == (Deepen(), Widen(times=1.5), Widen(times=2.0))
    policy = BudgetAware(axes=("stream", "depth"), width_factors=(1.25,), exact=False, inner="random")
    assert policy.steps == (Widen(times=1.25), Deepen(inner="random", exact=False))
    assert BudgetAware(axes=("data",)).steps == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"axes": ("width",)}, "axis 'width'"),
        ({"axes": ()}, "nothing may grow"),
        ({"width_factors": ()}, "nothing may grow"),
        ({"width_factors": (1.0,)}, "width factor 1 must be above 1"),
        ({"confidence": 1.0}, "confidence must be above 0 and below 1"),
        ({"data_factor": 1.0}, "data_factor must be above 1"),
        ({"passes": 0.0}, "passes must be above 0"),
        ({"look_share": 0.0}, "look_share"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        BudgetAware(**changes)


def test_a_look_is_left_out_where_it_is_dear():
    assert sight_of(POLICY) == Sight(axes=("depth", "width"), inner="copy", most_share=0.1)
    assert sight_of(replace(POLICY, look=False)) is None
