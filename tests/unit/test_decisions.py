"""What a trial does next and whether it may go on: every branch, its numbers and its words."""

import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from growth_service.core.certificate import Gains, candidate_verdict, network_verdict
from growth_service.core.decisions import (
    Anneal,
    CandidateReading,
    Grow,
    Reading,
    Stop,
    TrainOn,
    decision_from_dict,
    decision_to_dict,
    tolerance_nats,
)
from growth_service.core.policies import FixedSteps, SignalGuided
from growth_service.core.rules import decide
from growth_service.core.steps import AddBlock, AddData, AddUnits

SIGNAL = SignalGuided()


def candidate(**changes):
    """A depth candidate about which nothing is known yet, at a tolerance of 0.01 nats."""
    plain = CandidateReading(
        kind="depth",
        path="stem",
        verdict="undetermined",
        gain_lower=-0.02,
        gain_upper=0.2,
        transfer_gain=0.03,
        transfer_upper=0.05,
        realisable=0.8,
        added_flops=1000,
    )
    return replace(plain, **changes)


def useful(**changes):
    return candidate(**{"verdict": "useful", "gain_lower": 0.04} | changes)


def saturated(**changes):
    return candidate(**{"verdict": "saturated", "gain_upper": 0.004, "transfer_upper": 0.002} | changes)


def untransferable(**changes):
    return candidate(**{"verdict": "no_transferable_gain", "transfer_upper": 0.006} | changes)


def reading(*candidates, **changes):
    plain = Reading(
        stage=0,
        num_stages=5,
        spent_flops=10**9,
        budget_flops=10**10,
        data_share=1.0,
        tolerance_nats=0.01,
        candidates=candidates,
    )
    return replace(plain, **changes)


# --- the end of the schedule ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FixedSteps(steps=((4, (AddData(share=1.0),)),)), SIGNAL])
@pytest.mark.parametrize("stage", [4, 5])
def test_a_trial_ends_after_its_last_stage(policy, stage):
    assert decide(reading(useful(), stage=stage), policy) == Stop(
        cause="schedule", reason="all 5 stages are trained, 1e+09 of 1e+10 FLOPs spent"
    )


def test_a_trial_does_not_end_before_its_last_stage():
    assert decide(reading(stage=3), FixedSteps()) == TrainOn(reason="the schedule grows nothing after stage 3")


# --- fixed steps ----------------------------------------------------------------------------------


def test_a_fixed_schedule_takes_its_changes_together():
    changes = (AddBlock(site="stem"), AddData(share=0.5))
    assert decide(reading(stage=1), FixedSteps(steps=((1, changes),))) == Grow(
        changes=changes, reason="the schedule says depth@stem, data@0.50 after stage 1"
    )


def test_a_fixed_schedule_does_not_look_at_certificates():
    assert isinstance(decide(reading(saturated()), FixedSteps()), TrainOn)


# --- the decision table of signal-guided schedules ------------------------------------------------


def test_without_candidates_a_trial_trains_on():
    assert decide(reading(), SIGNAL) == TrainOn(reason="no site was probed")


def test_a_trial_stops_where_all_candidates_are_saturated():
    found = reading(saturated(), saturated(path="groups.0.blocks.1", gain_upper=0.007))
    assert decide(found, SIGNAL) == Stop(
        cause="saturated",
        reason="saturated: at all 2 candidates the predicted gain is below the tolerance of 0.01 nats "
        "(largest upper limit 0.007 at groups.0.blocks.1)",
    )


def test_saturation_stops_a_trial_though_more_data_is_left():
    # The certificate is about the population: more samples of the same kind cannot help either.
    assert decide(reading(saturated(), data_share=0.1), SIGNAL).cause == "saturated"


def test_one_candidate_that_is_not_saturated_prevents_the_saturation_stop():
    assert isinstance(decide(reading(saturated(), candidate()), SIGNAL), TrainOn)


UNTRANSFERABLE = (
    "at all 2 candidates what training would learn moves the held-out loss by less than the tolerance of "
    "0.01 nats (largest upper limit 0.006 at stem)"
)


def test_where_nothing_transfers_data_is_added():
    found = reading(untransferable(), saturated(), data_share=0.25)
    assert decide(found, SIGNAL) == Grow(
        changes=(AddData(share=0.5),), reason=f"{UNTRANSFERABLE}: more of this data is left, add it"
    )


def test_where_nothing_transfers_and_all_data_is_in_use_the_trial_stops():
    assert decide(reading(untransferable(), saturated()), SIGNAL) == Stop(
        cause="no_transferable_gain", reason=f"no transferable gain: {UNTRANSFERABLE}"
    )


def test_where_nothing_transfers_and_data_may_not_grow_the_trial_stops():
    found = reading(untransferable(), saturated(), data_share=0.25)
    assert decide(found, SignalGuided(axes=("depth", "width"))).cause == "no_transferable_gain"


def test_transfer_is_looked_at_before_usefulness():
    # A certain gain of the population that training would not find: no growth.
    found = reading(useful(transfer_upper=0.009))
    assert decide(found, SIGNAL).cause == "no_transferable_gain"


def test_an_upper_limit_of_transfer_at_the_tolerance_does_not_stop():
    assert isinstance(decide(reading(candidate(transfer_upper=0.01)), SIGNAL), TrainOn)


def test_one_candidate_that_may_transfer_prevents_the_stop():
    assert isinstance(decide(reading(untransferable(), candidate()), SIGNAL), TrainOn)


def test_a_useful_site_gets_a_block():
    policy = SignalGuided(inner="copy", jumpboard=False)
    assert decide(reading(useful(path="groups.1.blocks.0")), policy) == Grow(
        changes=(AddBlock(site="groups.1.blocks.0", inner="copy", jumpboard=False),),
        reason="useful at groups.1.blocks.0: predicted gain at least 0.04 nats > tolerance 0.01, "
        "transferable 0.03, best per FLOP of 1 useful candidates",
    )


def test_a_block_is_born_as_the_policy_says():
    (change,) = decide(reading(useful()), SIGNAL).changes
    assert change == AddBlock(site="stem", inner="random", jumpboard=True)


def test_a_useful_block_gets_the_units_of_the_policy():
    found = reading(useful(kind="width", path="groups.0.blocks.0.branch"))
    assert decide(found, SignalGuided(units=12)).changes == (AddUnits(block="groups.0.blocks.0.branch", units=12),)


def test_the_best_useful_candidate_has_the_most_transferable_gain_per_flop():
    # 0.03/1000 < 0.02/500: neither the largest gain nor the cheapest wins.
    found = reading(
        useful(path="dear"),
        useful(path="best", transfer_gain=0.02, added_flops=500),
        useful(path="cheap", transfer_gain=0.001, added_flops=100),
    )
    assert decide(found, SIGNAL).changes[0].site == "best"


def test_a_candidate_for_free_is_compared_as_if_it_cost_one_flop():
    found = reading(useful(path="free", added_flops=0), useful(path="dear"))
    assert decide(found, SIGNAL).changes[0].site == "free"


def test_a_more_valuable_undetermined_candidate_is_not_grown():
    found = reading(candidate(path="maybe", transfer_gain=9.0), useful(path="certain"))
    assert decide(found, SIGNAL).changes[0].site == "certain"


def test_data_comes_first_where_little_of_the_gain_is_realisable():
    assert decide(reading(useful(realisable=0.2), data_share=0.4), SIGNAL) == Grow(
        changes=(AddData(share=0.8),),
        reason="useful at stem: predicted gain at least 0.04 nats > tolerance 0.01, transferable 0.03, best per FLOP "
        "of 1 useful candidates, but only 20% is realisable with this many samples: add data",
    )


def test_half_of_the_gain_is_enough_to_grow():
    assert isinstance(decide(reading(useful(realisable=0.5), data_share=0.4), SIGNAL).changes[0], AddBlock)


def test_a_network_with_all_its_data_grows_though_little_is_realisable():
    assert isinstance(decide(reading(useful(realisable=0.01)), SIGNAL).changes[0], AddBlock)


@pytest.mark.parametrize(("share", "factor", "wanted"), [(0.1, 2.0, 0.2), (0.1, 3.0, 0.3), (0.6, 2.0, 1.0)])
def test_a_data_step_multiplies_the_share_up_to_all_of_it(share, factor, wanted):
    found = decide(reading(untransferable(), data_share=share), SignalGuided(data_factor=factor))
    assert found.changes[0].share == pytest.approx(wanted, rel=1e-12)


def test_an_axis_that_may_not_grow_is_not_grown():
    found = reading(useful(path="a"), useful(kind="width", path="b", transfer_gain=9.0))
    assert decide(found, SignalGuided(axes=("depth",))).changes == (AddBlock(site="a", jumpboard=True),)


@pytest.mark.parametrize("transfer_gain", [0.0, -0.01])
def test_a_useful_candidate_without_expected_transfer_is_not_grown(transfer_gain):
    assert isinstance(decide(reading(useful(transfer_gain=transfer_gain)), SIGNAL), TrainOn)


def test_undetermined_candidates_are_trained_on_with_the_limits_that_straddle():
    found = reading(candidate(), candidate(gain_lower=0.009, gain_upper=0.1), saturated())
    assert decide(found, SIGNAL) == TrainOn(
        reason="undetermined: no candidate is certain above the tolerance of 0.01 nats (largest lower limit 0.009), "
        "nor all below it (largest upper limit 0.2)"
    )


@pytest.mark.parametrize(
    ("found", "axes"),
    [(useful(), ("width",)), (useful(), ("data",)), (useful(transfer_gain=-0.01), ("depth", "width"))],
)
def test_the_reason_never_denies_a_useful_candidate(found, axes):
    assert "no candidate is certain" not in decide(reading(found), SignalGuided(axes=axes)).reason


def test_the_decision_follows_the_network_verdict_where_some_are_saturated():
    found = reading(untransferable(), saturated(transfer_upper=0.011))
    assert network_verdict([c.verdict for c in found.candidates]) == "no_transferable_gain"
    assert isinstance(decide(found, SIGNAL), Stop)


def test_an_unknown_transfer_limit_never_stops_a_trial():
    assert not isinstance(decide(reading(untransferable(), candidate(transfer_upper=math.nan)), SIGNAL), Stop)


@pytest.mark.parametrize(
    ("policy_value", "loss", "wanted"),
    [(None, 2.0, 0.04), (None, 0.1, 0.01), (None, 0.5, 0.01), (0.3, 2.0, 0.3), (0.0, 2.0, 0.0)],
)
def test_the_tolerance_is_two_percent_of_the_loss_but_a_hundredth_at_least(policy_value, loss, wanted):
    assert tolerance_nats(policy_value, loss_nats=loss) == wanted


# --- properties of decide -------------------------------------------------------------------------

NATS = st.floats(0.0, 1.0)


@st.composite
def certificates(draw):
    """(path, gains, transfer gain, eta, added FLOPs) of a candidate, with limits in order."""
    lower, upper = sorted([draw(NATS), draw(NATS)])
    gains = Gains(
        lower=lower, upper=upper, transfer_upper=draw(NATS), p_value=draw(st.sampled_from([1e-4, 0.004, 0.03, 0.6]))
    )
    return (
        gains,
        draw(st.floats(-0.5, 1.0)),
        draw(NATS),
        draw(st.integers(0, 10**6)),
        draw(st.sampled_from(["depth", "width"])),
    )


def as_reading(found, tolerance, **changes):
    """What the trial would read of these certificates at this tolerance."""
    return reading(
        *(
            CandidateReading(
                kind=kind,
                path=f"site{i}",
                verdict=candidate_verdict(gains, tolerance=tolerance, level=0.05, num_candidates=len(found)),
                gain_lower=gains.lower,
                gain_upper=gains.upper,
                transfer_gain=transfer_gain,
                transfer_upper=gains.transfer_upper,
                realisable=eta,
                added_flops=flops,
            )
            for i, (gains, transfer_gain, eta, flops, kind) in enumerate(found)
        ),
        **{"tolerance_nats": tolerance} | changes,
    )


CERTIFICATES = st.lists(certificates(), min_size=1, max_size=5)
TOLERANCES = st.floats(0.001, 1.0)
SHARES = st.sampled_from([0.1, 0.5, 1.0])


def is_decisive(found):
    """No two candidates tie in a figure that is compared."""
    figures = [[f(c) for c in found] for f in (lambda c: c[0].upper, lambda c: c[0].transfer_upper)]
    per_flop = [c[1] / max(c[3], 1) for c in found if c[1] > 0]
    return all(len(set(values)) == len(values) for values in [*figures, per_flop])


@given(CERTIFICATES, TOLERANCES, SHARES, st.randoms(use_true_random=False))
def test_the_decision_does_not_depend_on_the_order_of_candidates(found, tolerance, share, random):
    assume(is_decisive(found))
    before = as_reading(found, tolerance, data_share=share)
    shuffled = list(before.candidates)
    random.shuffle(shuffled)
    assert decide(replace(before, candidates=tuple(shuffled)), SIGNAL) == decide(before, SIGNAL)


def test_ties_between_candidates_do_not_depend_on_their_order():
    one, other = useful(path="a"), useful(path="b")
    assert decide(reading(one, other), SIGNAL) == decide(reading(other, one), SIGNAL)


@given(CERTIFICATES, TOLERANCES, st.floats(0.0, 1.0), SHARES)
def test_a_smaller_tolerance_never_turns_training_on_into_a_stop(found, tolerance, factor, share):
    strict = decide(as_reading(found, tolerance * factor, data_share=share), SIGNAL)
    if isinstance(strict, Stop):
        assert not isinstance(decide(as_reading(found, tolerance, data_share=share), SIGNAL), TrainOn)


@given(CERTIFICATES, TOLERANCES, SHARES)
def test_a_saturation_stop_says_what_the_network_verdict_says(found, tolerance, share):
    before = as_reading(found, tolerance, data_share=share)
    decision = decide(before, SIGNAL)
    is_saturated = network_verdict([c.verdict for c in before.candidates]) == "saturated"
    assert (isinstance(decision, Stop) and decision.cause == "saturated") == is_saturated


@given(CERTIFICATES, TOLERANCES, SHARES)
def test_a_step_goes_only_where_a_gain_is_certain_and_transfers(found, tolerance, share):
    before = as_reading(found, tolerance, data_share=share)
    for change in getattr(decide(before, SIGNAL), "changes", ()):
        if isinstance(change, AddData):
            continue
        path = change.site if isinstance(change, AddBlock) else change.block
        (chosen,) = [c for c in before.candidates if c.path == path]
        assert chosen.verdict == "useful"
        assert chosen.gain_lower > tolerance
        assert chosen.transfer_gain > 0
        assert chosen.kind == ("depth" if isinstance(change, AddBlock) else "width")


@given(CERTIFICATES, TOLERANCES, SHARES, st.sampled_from([("depth",), ("width",), ("data",), ("depth", "data")]))
def test_a_step_is_always_on_an_axis_that_may_grow(found, tolerance, share, axes):
    decision = decide(as_reading(found, tolerance, data_share=share), SignalGuided(axes=axes))
    kinds = {AddBlock: "depth", AddUnits: "width", AddData: "data"}
    assert all(kinds[type(c)] in axes for c in getattr(decision, "changes", ()))


@given(CERTIFICATES, TOLERANCES, SHARES)
def test_a_data_step_always_adds_data(found, tolerance, share):
    decision = decide(as_reading(found, tolerance, data_share=share), SIGNAL)
    added = [c.share for c in getattr(decision, "changes", ()) if isinstance(c, AddData)]
    assert all(share < more <= 1.0 for more in added)


# --- decisions as data ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decision",
    [
        TrainOn(reason="r"),
        Grow(changes=(AddBlock(site="a", inner="copy"), AddUnits(block="b", units=8), AddData(share=0.5)), reason="r"),
        Grow(changes=(), reason=""),
        Stop(cause="saturated", reason="r"),
        Anneal(cause="overfitting", reason="r"),
    ],
)
def test_a_decision_survives_json(decision):
    assert decision_from_dict(json.loads(json.dumps(decision_to_dict(decision)))) == decision


@pytest.mark.parametrize(
    ("decision", "kind"),
    [
        (TrainOn(reason="r"), "train_on"),
        (Grow(changes=(), reason="r"), "grow"),
        (Stop(cause="pruned", reason="r"), "stop"),
        (Anneal(cause="saturated", reason="r"), "anneal"),
    ],
)
def test_the_dict_of_a_decision_is_plain_json_with_its_kind(decision, kind):
    data = decision_to_dict(decision)
    assert json.loads(json.dumps(data)) == data
    assert data["kind"] == kind


@given(CERTIFICATES, TOLERANCES, SHARES)
def test_any_decision_of_a_policy_survives_json_and_has_a_reason(found, tolerance, share):
    decision = decide(as_reading(found, tolerance, data_share=share), SIGNAL)
    assert decision_from_dict(json.loads(json.dumps(decision_to_dict(decision)))) == decision
    assert re.search(r"\d", decision.reason), "a reason has numbers"
