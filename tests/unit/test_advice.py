"""What the next FLOP should buy: every branch of the table, its boundaries, its numbers and its words."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from growth_service.core.advice import (
    MOST_SAMPLES,
    CandidateEvidence,
    Evidence,
    advise,
    required_probe_samples,
)
from growth_service.core.decisions import CandidateReading, Grow, Reading, Stop, TrainOn
from growth_service.core.policies import SignalGuided
from growth_service.core.rules import decide
from growth_service.core.steps import AddBlock, AddData, AddUnits

TOL = 0.01


def candidate(**changes):
    """A depth candidate about which nothing is known yet, at a tolerance of 0.01 nats."""
    plain = CandidateEvidence(
        kind="depth",
        path="stem",
        verdict="undetermined",
        gain=0.03,
        gain_lower=0.0,
        gain_upper=0.05,
        noise_gain=0.025,
        transfer_gain=0.02,
        transfer_upper=0.04,
        eta=0.8,
        half_gain_samples=250.0,
        cosine=0.9,
        snr=1.44,
        effective_rank=20.0,
        s_train_gain=0.05,
        width=8,
        features=9,
        added_flops=1000,
    )
    return replace(plain, **changes)


def useful(**changes):
    return candidate(**{"verdict": "useful", "gain_lower": 0.02, "gain_upper": 0.04, "snr": 9.0} | changes)


def saturated(**changes):
    figures = {"gain": 0.002, "gain_upper": 0.004, "transfer_gain": 0.0, "transfer_upper": 0.002}
    return candidate(**{"verdict": "saturated"} | figures | changes)


def untransferable(**changes):
    return candidate(**{"verdict": "no_transferable_gain", "transfer_gain": 0.001, "transfer_upper": 0.006} | changes)


def evidence(*candidates, **changes):
    plain = Evidence(
        tolerance_nats=TOL,
        level=0.05,
        loss_train=0.5,
        loss_heldout=0.505,
        num_probe=200,
        max_probe=None,
        num_train=1000,
        more_train_available=True,
        candidates=candidates,
    )
    return replace(plain, **changes)


def unlocks(advice):
    return advice.unlock.probe_samples, advice.unlock.train_samples, advice.unlock.width


# --- nothing looked at ----------------------------------------------------------------------------


def test_without_a_candidate_training_goes_on():
    found = advise(evidence())
    assert (found.action, found.target, found.reason) == ("train_on", None, "no site was probed")
    assert found.unlock.words == "probe the places where a block could go"
    assert unlocks(found) == (None, None, None)


# --- all saturated --------------------------------------------------------------------------------


def test_where_all_is_saturated_and_the_losses_are_near_the_advice_is_to_stop():
    found = advise(evidence(saturated(), saturated(path="b", gain_upper=0.007)))
    assert (found.action, found.target, unlocks(found)) == ("stop", None, (None, None, None))
    assert found.reason == (
        "saturated: at all 2 candidates the predicted gain is below the tolerance of 0.01 nats (largest upper limit "
        "0.007 at b), and no gap between the losses is left to close (held-out loss 0.505, training loss 0.5); a block "
        "could still fit 0.05 nats of the training sample at b"
    )
    assert found.unlock.words == (
        "first-order saturated under this protocol: curvature, a wider stream and other block families are not "
        "excluded; a much wider probe block was not measured and would tell"
    )


def test_a_training_objective_at_its_floor_is_called_saturated_too():
    assert advise(evidence(saturated(s_train_gain=0.009))).reason.endswith("the training objective is saturated too")
    assert "could still fit 0.011 nats" in advise(evidence(saturated(s_train_gain=0.011))).reason
    assert advise(evidence(saturated(s_train_gain=TOL))).reason.endswith("the training objective is saturated too")


def test_one_candidate_that_is_not_saturated_prevents_the_saturation_stop():
    assert advise(evidence(saturated(), candidate())).action == "probe_more"


def test_a_wide_probe_that_still_gains_calls_for_width():
    found = advise(evidence(saturated(wide_gain=0.03), saturated(path="b", wide_gain=0.08), saturated(path="c")))
    assert (found.action, found.target, unlocks(found)) == ("widen", "b", (None, None, None))
    assert found.reason == (
        "the block family is too small: at all 3 candidates the predicted gain is below the tolerance of 0.01 nats "
        "(largest upper limit 0.004 at b), but a much wider probe block at b would gain 0.08 nats where 9 features "
        "gain 0.002"
    )
    assert found.unlock.words == "a certificate of blocks with more than 9 features"


def test_a_wide_probe_at_the_tolerance_does_not_call_for_width():
    found = advise(evidence(saturated(wide_gain=TOL)))
    assert found.action == "stop"
    assert found.unlock.words.endswith("other block families are not excluded")


def test_a_wide_probe_is_looked_at_before_the_gap_of_the_losses():
    assert advise(evidence(saturated(wide_gain=0.03), loss_heldout=2.0)).action == "widen"


def test_a_wide_probe_matters_only_where_all_is_saturated():
    assert advise(evidence(saturated(wide_gain=0.03), candidate(path="b"))).action == "probe_more"


def test_a_gap_between_the_losses_calls_for_data_where_blocks_are_saturated():
    found = advise(evidence(saturated(), loss_heldout=0.75))
    assert (found.action, found.target, unlocks(found)) == ("add_data", None, (None, None, None))
    assert found.reason.endswith(
        "and what is left is a gap of 0.25 nats (held-out loss 0.75, training loss 0.5) that more training samples "
        "can close and a block cannot"
    )
    assert found.unlock.words == "training samples until the gap is at most 0.01 nats"


def test_a_gap_of_the_tolerance_counts_as_none():
    assert advise(evidence(saturated(), loss_train=0.0, loss_heldout=TOL)).action == "stop"
    assert advise(evidence(saturated(), loss_train=0.0, loss_heldout=math.nextafter(TOL, 1))).action == "add_data"


def test_a_held_out_loss_below_the_training_loss_is_no_gap():
    assert advise(evidence(saturated(), loss_heldout=0.1)).action == "stop"


def test_a_gap_without_more_data_is_the_end():
    found = advise(evidence(saturated(), loss_heldout=0.75, more_train_available=False))
    assert (found.action, found.target) == ("stop", None)
    assert "the gap of 0.25 nats (held-out loss 0.75, training loss 0.5) asks for data and none is left" in found.reason
    assert found.unlock.words == "new training samples, or regularisation, to close the gap"


# --- nothing transfers ----------------------------------------------------------------------------


NOTHING = (
    "no transferable gain: at all 2 candidates what training would learn moves the held-out loss by less than the "
    "tolerance of 0.01 nats (largest upper limit 0.006 at stem)"
)


def test_where_nothing_transfers_and_no_held_out_gain_is_certain_the_advice_is_to_stop():
    found = advise(evidence(untransferable(gain=0.005, gain_upper=0.02), saturated(path="b")))
    assert (found.action, found.target, unlocks(found)) == ("stop", None, (None, None, None))
    assert found.reason == (
        f"{NOTHING}, and no gain on held-out samples is certain above it (largest lower limit 0 at b); a block could "
        "still fit 0.05 nats of the training sample at b"
    )
    assert found.unlock.words == "a held-out gain that is certain above the tolerance would call for data"


def test_a_stop_says_how_many_probe_samples_would_show_a_likely_held_out_gain():
    found = advise(evidence(untransferable(), saturated(path="b")))
    assert found.action == "stop"
    assert found.unlock.probe_samples > 200
    assert found.unlock.words.endswith(f"about {found.unlock.probe_samples} probe samples would show it")


def test_the_soonest_of_several_likely_gains_is_named():
    one, other = untransferable(), untransferable(path="b", gain=0.04, gain_upper=0.06)
    alone = [advise(evidence(c, saturated(path="z"))).unlock.probe_samples for c in (one, other)]
    # Three candidates in place of two: a little more each.
    assert min(alone) < advise(evidence(one, other, saturated(path="z"))).unlock.probe_samples < max(alone)


def test_a_stop_without_transfer_says_that_a_wide_probe_still_gains():
    found = advise(evidence(untransferable(gain=0.005, wide_gain=0.03), saturated(path="b", wide_gain=0.02)))
    assert found.action == "stop"
    assert found.unlock.words.endswith(
        "; a much wider probe block would gain 0.03 nats at stem: were all candidates certainly saturated, this would "
        "call for width"
    )
    assert "wider" not in advise(evidence(untransferable(wide_gain=TOL))).unlock.words


def test_a_certain_held_out_gain_that_does_not_transfer_calls_for_data():
    certain = untransferable(verdict="useful", gain_lower=0.02, eta=0.2, half_gain_samples=3999.5)
    found = advise(evidence(certain, saturated(path="b")))
    assert (found.action, found.target, unlocks(found)) == ("add_data", "stem", (None, 4000, None))
    assert found.reason == (
        f"{NOTHING}, while held-out samples hold a gain of at least 0.02 nats at stem: samples that the network has "
        "not seen would teach it"
    )
    assert found.unlock.words == (
        "about 4000 training samples in all (now 1000): half of the gain at stem is then realisable"
    )


def test_a_certain_held_out_gain_without_more_data_is_a_stop_that_names_the_data():
    certain = untransferable(verdict="useful", gain_lower=0.02, eta=0.2, half_gain_samples=4000.0)
    found = advise(evidence(certain, more_train_available=False))
    assert (found.action, found.target, unlocks(found)) == ("stop", None, (None, 4000, None))
    assert found.reason.endswith("at least 0.02 nats at stem, but no training data is left")


def test_a_lower_limit_at_the_tolerance_is_no_certain_gain():
    assert advise(evidence(untransferable(gain_lower=TOL))).action == "stop"
    assert advise(evidence(untransferable(gain_lower=0.0101))).action == "add_data"


def test_an_upper_limit_of_transfer_at_the_tolerance_does_not_stop():
    assert advise(evidence(untransferable(transfer_upper=TOL))).action == "probe_more"


def test_one_candidate_that_may_transfer_prevents_the_stop():
    assert advise(evidence(untransferable(), candidate(path="b"))).action == "probe_more"


def test_where_no_training_samples_were_given_transfer_is_not_ruled_out():
    found = advise(evidence(useful(transfer_gain=0.0, transfer_upper=0.0, cosine=0.0, eta=0.0), num_train=0))
    assert (found.action, found.target) == ("grow_depth", "stem")
    assert "transfer unknown without training samples" in found.reason


# --- something is useful --------------------------------------------------------------------------


def test_a_useful_site_gets_a_block():
    found = advise(evidence(useful(path="groups.1")))
    assert (found.action, found.target, unlocks(found)) == ("grow_depth", "groups.1", (None, None, None))
    assert found.reason == (
        "useful at groups.1: predicted gain at least 0.02 nats > tolerance 0.01, transferable 0.02, best per FLOP of "
        "1 useful candidates"
    )
    assert found.unlock.words == "nothing: the gain is certain, and training can realise it"


def test_a_useful_block_is_widened():
    found = advise(evidence(useful(kind="width", path="a.branch")))
    assert (found.action, found.target) == ("widen", "a.branch")


def test_the_best_useful_candidate_has_the_most_transferable_gain_per_flop():
    # 0.03/1000 < 0.02/500: neither the largest gain nor the cheapest wins.
    found = advise(
        evidence(
            useful(path="dear", transfer_gain=0.03),
            useful(path="best", transfer_gain=0.02, added_flops=500),
            useful(path="cheap", transfer_gain=0.001, added_flops=100),
        )
    )
    assert found.target == "best"


def test_without_training_samples_the_best_has_the_most_gain_per_flop():
    found = advise(
        evidence(
            useful(path="a", gain=0.03, transfer_gain=0.5), useful(path="b", gain=0.04, transfer_gain=0.0), num_train=0
        )
    )
    assert found.target == "b"


def test_a_candidate_for_free_is_compared_as_if_it_cost_one_flop():
    assert advise(evidence(useful(path="free", added_flops=0), useful(path="dear"))).target == "free"


def test_a_more_valuable_undetermined_candidate_is_not_grown():
    assert advise(evidence(candidate(path="maybe", transfer_gain=9.0), useful(path="z"))).target == "z"


def test_a_useful_candidate_that_cannot_transfer_is_passed_over():
    found = advise(
        evidence(useful(path="a", transfer_gain=0.009, transfer_upper=0.0099, added_flops=1), useful(path="b"))
    )
    assert found.target == "b"


LITTLE = {"eta": 0.2, "half_gain_samples": 3999.2}


def test_data_comes_first_where_little_of_the_gain_is_realisable():
    found = advise(evidence(useful(**LITTLE)))
    assert (found.action, found.target, unlocks(found)) == ("add_data", "stem", (None, 4000, None))
    assert found.reason == (
        "useful at stem: predicted gain at least 0.02 nats > tolerance 0.01, transferable 0.02, best per FLOP of 1 "
        "useful candidates, but only 20% of it is realisable with 1000 training samples: add data first"
    )
    assert found.unlock.words.startswith("about 4000 training samples in all (now 1000)")


def test_where_little_is_realisable_and_no_data_is_left_training_goes_on():
    found = advise(evidence(useful(**LITTLE), more_train_available=False))
    assert (found.action, found.target, unlocks(found)) == ("train_on", None, (None, 4000, None))
    assert found.reason.endswith(
        "only 20% of it is realisable with 1000 training samples and no training data is left: train on as it is"
    )


def test_half_of_the_gain_is_enough_to_grow():
    assert advise(evidence(useful(eta=0.5))).action == "grow_depth"
    assert advise(evidence(useful(eta=math.nextafter(0.5, 0)))).action == "add_data"


def test_gradients_that_point_apart_call_for_data():
    found = advise(evidence(useful(cosine=0.4)))
    assert (found.action, found.target, unlocks(found)) == ("add_data", "stem", (None, None, None))
    assert "training and held-out gradients point apart (cosine 0.40): add data first" in found.reason
    assert found.unlock.words == "training samples that the network has not fitted yet, until the cosine reaches 0.5"


def test_a_cosine_of_one_half_is_enough_to_grow():
    assert advise(evidence(useful(cosine=0.5))).action == "grow_depth"
    assert advise(evidence(useful(cosine=math.nextafter(0.5, 0)))).action == "add_data"


@pytest.mark.parametrize("transfer_gain", [0.0, -0.01])
def test_a_useful_candidate_without_expected_transfer_is_not_grown(transfer_gain):
    found = advise(evidence(useful(transfer_gain=transfer_gain)))
    assert found.action == "add_data"
    assert "training would not move towards it (upper limit of what transfers 0.04 nats)" in found.reason
    assert advise(evidence(useful(transfer_gain=transfer_gain), more_train_available=False)).action == "train_on"


def test_an_infinite_sample_size_is_not_named():
    assert unlocks(advise(evidence(useful(eta=0.2, half_gain_samples=math.inf)))) == (None, None, None)


# --- undetermined ---------------------------------------------------------------------------------


def needed(c, **changes):
    figures = {
        name: getattr(c, name) for name in ("gain", "gain_lower", "gain_upper", "noise_gain")
    } | {"tolerance_nats": TOL, "level": 0.05, "num_candidates": 1, "num_probe": 200}  # fmt: skip
    return required_probe_samples(**figures | changes)


def test_an_undetermined_candidate_above_the_tolerance_is_probed_until_it_is_certain():
    found = advise(evidence(candidate()))
    wanted = needed(candidate())
    assert 200 < wanted < 64 * 200
    assert (found.action, found.target, unlocks(found)) == ("probe_more", "stem", (wanted, None, None))
    assert found.reason == (
        "undetermined at stem: the predicted gain of 0.03 nats has limits 0 and 0.05 around the tolerance of 0.01 "
        f"(signal to noise 1.4 with 200 probe samples); about {wanted} probe samples in all would settle that it is "
        "above"
    )
    assert found.unlock.words == f"about {wanted} probe samples in all"


def test_an_undetermined_candidate_below_the_tolerance_is_probed_until_it_is_saturated():
    low = candidate(gain=0.004, gain_upper=0.02, noise_gain=0.014)
    found = advise(evidence(low))
    assert (found.action, unlocks(found)) == ("probe_more", (needed(low), None, None))
    assert found.reason.endswith("would settle that it is below")


def test_of_several_above_the_tolerance_the_soonest_decides():
    late, soon = candidate(path="a"), candidate(path="b", gain=0.04, noise_gain=0.02, gain_upper=0.055)
    found = advise(evidence(late, soon))
    assert needed(soon, num_candidates=2) < needed(late, num_candidates=2)
    assert (found.target, found.unlock.probe_samples) == ("b", needed(soon, num_candidates=2))


def test_one_above_the_tolerance_decides_before_those_below():
    low = candidate(path="a", gain=0.004, gain_upper=0.011, noise_gain=0.007)
    found = advise(evidence(low, candidate(path="b")))
    assert needed(low, num_candidates=2) < needed(candidate(), num_candidates=2)
    assert found.target == "b"


def test_of_several_below_the_tolerance_the_last_decides():
    first = candidate(path="a", gain=0.004, gain_upper=0.015, noise_gain=0.01)
    last = candidate(path="b", gain=0.004, gain_upper=0.02, noise_gain=0.014)
    found = advise(evidence(first, last, saturated(path="c")))
    assert (found.target, found.unlock.probe_samples) == ("b", needed(last, num_candidates=3))


def test_candidates_that_cannot_transfer_need_no_more_samples():
    slow = untransferable(path="a", gain=0.004, gain_upper=0.05, noise_gain=0.035)
    fast = candidate(path="b", gain=0.004, gain_upper=0.015, noise_gain=0.01)
    assert advise(evidence(slow, fast)).target == "b"


def test_a_candidate_that_the_limits_seem_to_decide_needs_one_more_sample():
    # Its p-value was not small enough: the limit alone is above the tolerance.
    found = advise(evidence(candidate(gain_lower=0.02, noise_gain=0.01, gain_upper=0.035)))
    assert (found.action, found.unlock.probe_samples) == ("probe_more", 201)


def test_more_probe_samples_than_exist_mean_training_on():
    wanted = needed(candidate())
    found = advise(evidence(candidate(), max_probe=wanted - 201))
    assert (found.action, found.target, unlocks(found)) == ("train_on", None, (wanted, None, None))
    assert found.reason.endswith(
        f"about {wanted} probe samples would decide, more than the {wanted - 1} that exist: train on"
    )


def test_exactly_as_many_probe_samples_as_exist_are_probed():
    assert advise(evidence(candidate(), max_probe=needed(candidate()) - 200)).action == "probe_more"


def far(factor, **changes):
    """At the null: one candidate whose upper limit falls below the tolerance at ``factor * 200`` samples."""
    z = 1.6448536269514722
    noise = TOL * math.sqrt(factor / z)
    return candidate(gain=0.0, noise_gain=noise, gain_upper=noise * math.sqrt(z), snr=0.0, **changes)


def test_the_noise_of_a_gain_squared_falls_with_the_samples():
    assert needed(far(10.0)) == 2000


def test_more_than_64_times_the_samples_mean_training_on():
    assert advise(evidence(far(64.0))).action == "probe_more"
    found = advise(evidence(far(64.1), max_probe=10**9))
    assert (found.action, found.unlock.probe_samples) == ("train_on", 12820)
    assert found.reason.endswith(
        "about 12820 probe samples would decide, more than 64 times the present ones: train on"
    )


def test_64_times_the_samples_are_the_limit_even_where_a_few_more_exist():
    assert advise(evidence(far(64.2), max_probe=64 * 200 - 1)).action == "train_on"
    assert advise(evidence(far(63.99), max_probe=64 * 200 - 1)).action == "probe_more"


def test_width_would_make_a_signal_visible_where_the_covariance_is_near_diagonal():
    # 1600 samples needed, 400 there: a factor of 4 in samples is worth 16 in width.
    found = advise(evidence(far(8.0, effective_rank=36.0), max_probe=200))
    assert (found.action, unlocks(found)) == ("train_on", (1600, None, 16 * 8))
    assert found.unlock.words == (
        "about 1600 probe samples, or 400 at a stream of 128 channels: the gradient covariance is near diagonal "
        "(effective rank 36 of 72), so the signal to noise grows like the root of the width"
    )


def test_width_would_not_help_where_the_covariance_is_far_from_diagonal():
    found = advise(evidence(far(8.0, effective_rank=35.9), max_probe=200))
    assert unlocks(found) == (1600, None, None)
    assert found.unlock.words == (
        "about 1600 probe samples; width would not help, the gradient covariance is far from diagonal (effective "
        "rank 35.9 of 72)"
    )


def test_an_estimate_at_the_tolerance_is_decided_by_no_number_of_samples():
    found = advise(evidence(candidate(gain=TOL)))
    assert (found.action, unlocks(found)) == ("train_on", (None, None, None))
    assert found.reason.endswith("an estimate at the tolerance itself is decided by no number of samples: train on")
    assert found.unlock.words == "another tolerance, or a signal that changes with training"


def test_one_at_the_tolerance_keeps_those_below_from_a_decision_but_not_one_above():
    at, below = candidate(path="a", gain=TOL), candidate(path="b", gain=0.004, gain_upper=0.02)
    assert advise(evidence(at, below)).action == "train_on"
    assert advise(evidence(at, candidate(path="b"))).target == "b"


# --- how many probe samples -----------------------------------------------------------------------


LIMITS = {
    "gain": 0.03,
    "gain_lower": 0.0,
    "gain_upper": 0.05,
    "noise_gain": 0.02,
    "tolerance_nats": 0.01,
    "level": 0.05,
    "num_candidates": 4,
    "num_probe": 100,
}


@st.composite
def limits(draw):
    gain, tol = draw(st.just(0.0) | st.floats(1e-3, 1.0)), draw(st.floats(1e-3, 1.0))
    assume(abs(gain - tol) > 1e-3)
    return LIMITS | {
        "gain": gain,
        "gain_lower": gain * draw(st.just(0.0) | st.floats(1e-3, 1.0)),
        "gain_upper": gain + draw(st.floats(1e-3, 2.0)),
        "noise_gain": draw(st.floats(1e-4, 1.0)),
        "tolerance_nats": tol,
    }


@given(limits(), st.sampled_from([2.0**-10, 2.0**7]))
def test_the_unit_of_the_loss_does_not_change_the_number_of_samples(figures, c):
    scaled = {k: c * figures[k] for k in ("gain", "gain_lower", "gain_upper", "noise_gain", "tolerance_nats")}
    assert required_probe_samples(**figures | scaled) == required_probe_samples(**figures)


@given(limits())
def test_twice_the_samples_behind_the_same_limits_need_twice_as_many(figures):
    one, two = (required_probe_samples(**figures | {"num_probe": n}) for n in (10**4, 2 * 10**4))
    assert abs(two - 2 * one) <= 2


@given(limits(), st.sampled_from([2.0, 8.0]))
def test_without_a_signal_c_times_the_noise_needs_c_squared_times_the_samples(figures, c):
    null = figures | {"gain": 0.0, "gain_lower": 0.0, "num_probe": 10**6}
    louder = null | {name: c * null[name] for name in ("noise_gain", "gain_upper")}
    one, other = required_probe_samples(**null), required_probe_samples(**louder)
    if one > 10**6:  # not decided already
        assert other == pytest.approx(c**2 * one, abs=c**2)  # whole numbers


@given(limits())
def test_samples_in_all_are_never_fewer_than_there_are(figures):
    found = required_probe_samples(**figures)
    assert found is None or found >= figures["num_probe"]


@given(limits(), st.floats(1.0, 10.0))
def test_a_tolerance_further_away_never_needs_more_samples(figures, factor):
    if figures["gain"] < figures["tolerance_nats"]:
        further = figures["tolerance_nats"] * factor
    else:
        further = figures["tolerance_nats"] / factor
    one, other = required_probe_samples(**figures), required_probe_samples(**figures | {"tolerance_nats": further})
    assert other <= one


def test_a_negative_gain_counts_as_zero():
    one, other = (required_probe_samples(**LIMITS | {"gain": g, "gain_upper": 0.02}) for g in (0.0, -0.02))
    assert one == other > 100


def test_a_lower_limit_below_zero_counts_as_hidden():
    one, other = (required_probe_samples(**LIMITS | {"gain_lower": g}) for g in (0.0, -0.5))
    assert one == other > 100


def test_more_candidates_need_more_samples_to_call_one_useful():
    one, other = (required_probe_samples(**LIMITS | {"num_candidates": j}) for j in (1, 8))
    assert one < other


def test_the_number_of_candidates_does_not_matter_where_all_have_to_be_saturated():
    low = LIMITS | {"gain": 0.005, "gain_upper": 0.03}
    one, other = (required_probe_samples(**low | {"num_candidates": j}) for j in (1, 8))
    assert one == other > 100


def test_what_is_decided_needs_no_more():
    assert required_probe_samples(**LIMITS | {"gain": 0.003, "gain_upper": 0.009, "noise_gain": 0.004}) == 100
    assert required_probe_samples(**LIMITS | {"gain_lower": 0.02, "noise_gain": 0.01}) == 100


def test_a_gain_at_the_tolerance_has_no_number():
    assert required_probe_samples(**LIMITS | {"gain": 0.01}) is None
    assert required_probe_samples(**LIMITS | {"gain": math.nextafter(0.01, 1)}) is None
    assert required_probe_samples(**LIMITS | {"gain": 0.010001}) < MOST_SAMPLES


def test_a_candidate_without_any_gradient_is_decided():
    zero = {"gain": 0.0, "gain_lower": 0.0, "gain_upper": 0.0, "noise_gain": 0.0}
    assert required_probe_samples(**LIMITS | zero) == 100


@pytest.mark.parametrize("level", [0.0, 0.5, math.nan])
def test_a_level_outside_its_range_is_refused(level):
    with pytest.raises(ValueError, match=r"must be in \(0, 0\.5\)"):
        required_probe_samples(**LIMITS | {"level": level})


# --- properties of the advice ---------------------------------------------------------------------


def verdict_of(gain_lower, gain_upper, transfer_upper):
    """The verdict that these limits have at a tolerance of 0.01, with a small p-value."""
    if gain_lower > TOL:
        return "useful"
    if gain_upper < TOL:
        return "saturated"
    return "no_transferable_gain" if transfer_upper < TOL else "undetermined"


GAINS = st.sampled_from([0.0, 0.002, 0.009, 0.01, 0.011, 0.02, 0.1]) | st.floats(0.0, 0.2)


@st.composite
def candidates(draw, may_transfer=True):
    """A candidate whose verdict follows from its limits."""
    gain, transfer_gain = draw(GAINS), draw(st.sampled_from([-1.0, 1.0])) * draw(GAINS)
    lower = gain * draw(st.floats(0.0, 1.0))
    upper = gain + draw(GAINS)
    transfer_upper = transfer_gain + draw(GAINS)
    if not may_transfer:
        transfer_gain, transfer_upper = min(transfer_gain, 0.005), min(transfer_upper, 0.009)
    return candidate(
        kind=draw(st.sampled_from(["depth", "width"])),
        path=draw(st.sampled_from("abcd")),
        verdict=verdict_of(lower, upper, transfer_upper),
        gain=gain,
        gain_lower=lower,
        gain_upper=upper,
        noise_gain=draw(GAINS),
        transfer_gain=transfer_gain,
        transfer_upper=transfer_upper,
        eta=draw(st.sampled_from([0.1, 0.5, 0.9])),
        half_gain_samples=draw(st.sampled_from([50.0, 1000.0, math.inf])),
        cosine=draw(st.sampled_from([-0.2, 0.3, 0.5, 0.9])),
        effective_rank=draw(st.sampled_from([1.0, 40.0])),
        added_flops=draw(st.integers(1, 10**6)),
        wide_gain=draw(st.none() | GAINS),
    )


@st.composite
def evidences(draw, may_transfer=True, more_data=(False, True)):
    return evidence(
        *draw(st.lists(candidates(may_transfer), min_size=0 if may_transfer else 1, max_size=4)),
        loss_heldout=draw(st.sampled_from([0.4, 0.51, 0.9])),
        max_probe=draw(st.none() | st.integers(0, 10**5)),
        num_train=draw(st.sampled_from([0, 1000])),
        more_train_available=draw(st.sampled_from(more_data)),
    )


@given(evidences(), st.randoms(use_true_random=False))
def test_the_order_of_candidates_changes_nothing(found, random):
    shuffled = list(found.candidates)
    random.shuffle(shuffled)
    assert advise(replace(found, candidates=tuple(shuffled))) == advise(found)


def test_ties_go_to_the_first_path_whatever_the_order():
    tied = [useful(path=p) for p in "cab"]
    assert {advise(evidence(*order)).target for order in itertools.permutations(tied)} == {"a"}


def test_two_blocks_at_one_place_that_tie_are_told_apart_in_any_order():
    tied = (useful(half_gain_samples=1500.0, eta=0.4), useful(half_gain_samples=1600.0, eta=0.4))
    assert advise(evidence(*tied)) == advise(evidence(*tied[::-1]))


@given(evidences(), st.integers(0, 12))
def test_the_unit_of_flops_changes_nothing(found, power):
    scaled = tuple(replace(c, added_flops=c.added_flops * 2**power) for c in found.candidates)  # a power of two: exact
    assert advise(replace(found, candidates=scaled)) == advise(found)


@given(evidences(may_transfer=False, more_data=(False,)), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_more_certainty_about_the_same_gains_never_turns_a_stop_into_growth(found, keep, keep_transfer):
    before = advise(found)
    assume(before.action == "stop")
    tighter = []
    for c in found.candidates:
        lower = c.gain - keep * (c.gain - c.gain_lower)
        upper = c.gain + keep * (c.gain_upper - c.gain)
        moved = c.transfer_gain + keep_transfer * (c.transfer_upper - c.transfer_gain)
        verdict = verdict_of(lower, upper, moved)
        tighter.append(replace(c, gain_lower=lower, gain_upper=upper, transfer_upper=moved, verdict=verdict))
    after = advise(replace(found, candidates=tuple(tighter)))
    if "call for width" in before.unlock.words:  # announced: a wide probe gains, and now the family is saturated
        assert after.action in ("stop", "add_data", "widen")
    else:
        assert after.action in ("stop", "add_data")


@given(evidences())
def test_more_data_to_be_had_never_changes_growing_or_probing(found):
    one, other = (advise(replace(found, more_train_available=b)) for b in (False, True))
    if one.action in ("grow_depth", "widen", "probe_more"):
        assert one == other
    assert one.action != "add_data"


@given(evidences(), st.integers(0, 10**6))
def test_more_probe_samples_to_be_had_only_ever_turn_training_on_into_probing(found, more):
    found = replace(found, max_probe=found.max_probe or 0)
    one, other = advise(found), advise(replace(found, max_probe=found.max_probe + more))
    assert one.action == other.action or (one.action, other.action) == ("train_on", "probe_more")


@given(evidences())
def test_an_advice_is_one_line_of_words_and_plain_json(found):
    given_advice = advise(found)
    data = json.loads(json.dumps(given_advice.to_dict(), allow_nan=False))
    assert data["action"] == given_advice.action
    assert data["unlock"]["words"] == given_advice.unlock.words != ""
    assert data["reason"]
    assert "\n" not in data["reason"]
    assert "nan" not in data["reason"]


@given(evidences())
def test_a_target_is_one_of_the_candidates_and_has_the_kind_of_the_action(found):
    given_advice = advise(found)
    at = {c.kind for c in found.candidates if c.path == given_advice.target}
    assert (given_advice.target is None) == (not at)
    if given_advice.action == "grow_depth":
        assert "depth" in at
    assert (given_advice.action in ("grow_depth", "widen", "probe_more")) <= (given_advice.target is not None)


# --- the same question asked of the trial's own rule ----------------------------------------------


def as_reading(found, data_share):
    """The part of the evidence that a trial's decision sees."""
    readings = tuple(
        CandidateReading(
            kind=c.kind,
            path=c.path,
            verdict=c.verdict,
            gain_lower=c.gain_lower,
            gain_upper=c.gain_upper,
            transfer_gain=c.transfer_gain,
            transfer_upper=c.transfer_upper,
            realisable=c.eta,
            added_flops=c.added_flops,
        )
        for c in found.candidates
    )
    return Reading(
        stage=0,
        num_stages=5,
        spent_flops=0,
        budget_flops=1,
        data_share=data_share,
        tolerance_nats=TOL,
        candidates=readings,
    )


def action_of(decision):
    match decision:
        case TrainOn():
            return {"train_on", "probe_more"}, None
        case Stop():
            return {"stop"}, None
        case Grow(changes=(AddBlock(site=site),)):
            return {"grow_depth"}, site
        case Grow(changes=(AddUnits(block=block),)):
            return {"widen"}, block
        case Grow(changes=(AddData(),)):
            return {"add_data"}, None


@given(st.lists(candidates(), max_size=4), st.booleans())
def test_advice_agrees_with_the_rule_of_a_trial_where_that_has_all_it_needs(found, more):
    """Without a wide probe, a gap of losses or gradients that point apart, and with all gain realisable."""
    neutral = [replace(c, wide_gain=None, cosine=1.0, eta=0.9) for c in found]
    assume(len({(c.path, c.kind) for c in neutral}) == len(neutral))
    asked = evidence(*neutral, more_train_available=more)
    decision = decide(as_reading(asked, 0.5 if more else 1.0), SignalGuided())
    wanted, target = action_of(decision)
    given_advice = advise(asked)
    open_ = [c for c in neutral if c.verdict != "saturated"]
    certain = any(c.gain_lower > TOL for c in neutral)
    moving = [c for c in neutral if c.verdict == "useful" and c.transfer_gain > 0 and c.transfer_upper >= TOL]
    if open_ and all(c.transfer_upper < TOL for c in open_) and not certain:
        assert given_advice.action == "stop"  # the trial adds data without a certain held-out gain
    elif certain and not moving:
        assert given_advice.action in ("add_data", "train_on", "stop")  # the trial grows or trains on
    elif any(c.verdict == "useful" and c.transfer_gain > 0 and c.transfer_upper < TOL for c in neutral):
        assert given_advice.target in {c.path for c in moving}  # the trial may take what cannot transfer
    else:
        assert given_advice.action in wanted
        if target is not None:
            assert given_advice.target == target
