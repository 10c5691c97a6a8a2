"""The test-risk account: each term from losses with known means, each precondition, each kind of emptiness."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth_service.core import risk
from growth_service.core.confidence import empirical_bernstein_upper
from growth_service.core.risk import BlockClass, NetworkLosses, deviation_bound, fallback, rademacher_bound

STILL = BlockClass(lipschitz=0.0, weight_norm=0.0, width=1, features=1)
"""Nothing can move: no complexity term."""


def losses(train, test, *, num_train=400, num_test=200):
    """Constant losses: means are exact and limits have only their last term."""
    return NetworkLosses(train_M=np.full(num_train, float(train)), test_K=np.full(num_test, float(test)))


def account(*, sizes=None, **changes):
    """Old 2.0/2.5, population jumpboard 1.75/2.0, training jumpboard 1.5/2.25, new 1.0/2.125 (train/test)."""
    n = sizes or {}
    plain = {
        "old": losses(2.0, 2.5, **n),
        "jumpboard_pop": losses(1.75, 2.0, **n),
        "jumpboard_train": losses(1.5, 2.25, **n),
        "new": losses(1.0, 2.125, **n),
        "bound": 4.0,
        "delta": 0.05,
        "block": STILL,
        "smallest_rms": None,
        "norm_eps": None,
    }
    return risk.test_risk(**plain | changes)


# A million samples of each kind make all deviations small: the routes then promise something.
MANY = {"num_train": 10**6, "num_test": 10**6}


# --- terms ----------------------------------------------------------------------------------------


def test_the_terms_are_differences_of_means():
    found = account()
    assert found.delta_r == 0.5  # 2.5 - 2.0, population jumpboard on test
    assert found.delta_r_test == 0.25  # 2.5 - 2.25, training jumpboard on test
    assert found.delta_erm == 0.5  # 1.5 - 1.0
    assert found.delta_erm_pop == 0.75  # 1.75 - 1.0
    assert found.gamma == (2.125 - 1.0) - (2.25 - 1.5) == 0.375
    assert found.realised_change == 2.125 - 2.5
    assert (found.old_test, found.new_test) == (2.5, 2.125)
    assert found.identity_residual == 0.0
    assert (found.num_train, found.num_test, found.num_truncated) == (400, 200, 0)


def test_the_margin_limit_is_the_one_of_paired_differences():
    rng = np.random.default_rng(0)
    old_K = rng.uniform(0.5, 3.0, 200)
    pop_K = old_K - rng.uniform(0.0, 0.5, 200)
    train_M = np.ones(3)
    found = account(
        old=NetworkLosses(train_M=train_M, test_K=old_K),
        jumpboard_pop=NetworkLosses(train_M=train_M, test_K=pop_K),
        jumpboard_train=losses(1, 1, num_train=3),
        new=losses(1, 1, num_train=3),
    )
    wanted = -empirical_bernstein_upper(pop_K - old_K, low=-4.0, high=4.0, level=0.05)
    assert found.delta_r_lower == pytest.approx(wanted, rel=1e-12)
    assert found.delta_r_lower < found.delta_r


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 2.0, 50.0]))
def test_the_three_terms_add_up_to_the_change_of_the_test_loss(seed, bound):
    rng = np.random.default_rng(seed)
    nets = [NetworkLosses(train_M=rng.exponential(1.0, 7), test_K=rng.exponential(1.5, 5)) for _ in range(4)]
    found = account(**dict(zip(("old", "jumpboard_pop", "jumpboard_train", "new"), nets, strict=True)), bound=bound)
    assert found.delta_r_test + found.delta_erm - found.gamma == pytest.approx(-found.realised_change, abs=1e-12)
    assert abs(found.identity_residual) < 1e-12


def test_losses_above_the_bound_are_truncated_and_counted():
    found = account(old=losses(2.0, 9.0), new=losses(math.inf, 2.125))
    assert found.old_test == 4.0
    assert found.num_truncated == 200 + 400


def test_a_loss_at_the_bound_is_whole():
    assert account(bound=2.5).num_truncated == 0


# --- deviations -----------------------------------------------------------------------------------


def test_the_complexity_of_known_figures():
    block = BlockClass(lipschitz=3.0, weight_norm=0.5, width=8, features=4)
    assert rademacher_bound(block, num_samples=64) == pytest.approx(math.sqrt(2) * 1.5 * math.sqrt(0.5), rel=1e-12)


def test_the_deviation_of_known_figures():
    # B sqrt(ln(2/delta)/(2N)) with ln(2/delta) = 8, N = 100: B/5.
    block = BlockClass(lipschitz=1.0, weight_norm=1.0, width=2, features=1)
    found = deviation_bound(block, num_samples=100, bound=3.0, delta=2 * math.exp(-8))
    assert found == pytest.approx(2 * math.sqrt(2) * math.sqrt(0.02) + 0.6, rel=1e-12)


def test_a_block_that_cannot_move_has_no_complexity():
    assert rademacher_bound(STILL, num_samples=10) == 0.0


def test_both_samples_get_their_own_deviation():
    block = BlockClass(lipschitz=1.0, weight_norm=0.1, width=4, features=5)
    found = account(block=block)
    assert found.eps_m == deviation_bound(block, num_samples=400, bound=4.0, delta=0.05)
    assert found.eps_k == deviation_bound(block, num_samples=200, bound=4.0, delta=0.05)


def test_the_gain_of_a_step_beats_the_complexity_from_the_sample_size_of_the_worst_case():
    # b sqrt(S) > 4 R_M iff M > 32 Lz^2 d k/S.
    block = BlockClass(lipschitz=2.0, weight_norm=0.3, width=6, features=5)
    score = 0.5
    threshold = 32 * 2.0**2 * 30 / score
    for num, beats in ((threshold * 1.01, True), (threshold * 0.99, False)):
        gain = 0.3 * math.sqrt(score)
        assert (gain > 4 * rademacher_bound(block, num_samples=num)) is beats


# --- routes ---------------------------------------------------------------------------------------


def test_route_a_promises_half_the_certain_margin_the_training_gain_and_twice_the_deviation():
    found = account()
    assert found.route_a.bound == pytest.approx(2.5 - found.delta_r_lower / 2 - 0.75 + 2 * found.eps_m, rel=1e-12)
    assert found.route_a.name == "A"


def test_route_a_holds_with_what_three_failures_leave():
    found = account(sizes=MANY)
    failure = math.exp(-(10**6) * found.delta_r_lower**2 / (8 * 16.0))
    assert found.route_a.probability == pytest.approx(1 - 0.1 - failure, rel=1e-12)


def test_route_a_in_a_smaller_sample_holds_with_less():
    few = account(sizes={"num_train": 400, "num_test": 400})
    assert 0 < few.delta_r_lower < 0.5
    assert few.route_a.probability == pytest.approx(0.9 - math.exp(-400 * few.delta_r_lower**2 / 128), rel=1e-12)


def test_route_b_promises_the_test_margin_the_training_gain_and_twice_both_deviations():
    found = account()
    assert found.route_b.bound == pytest.approx(2.5 - 0.25 - 0.5 + 2 * (found.eps_m + found.eps_k), rel=1e-12)
    assert (found.route_b.name, found.route_b.probability) == ("B", 1 - 2 * 0.05)


def test_with_many_samples_both_routes_hold_and_the_lower_bound_is_chosen():
    found = account(sizes=MANY)
    assert found.route_a.applies
    assert found.route_b.applies
    assert (found.route_a.is_vacuous, found.route_b.is_vacuous) == (False, False)
    assert found.route is found.route_a  # 2.5 - 0.25 - 0.75 < 2.5 - 0.25 - 0.5
    assert not found.is_vacuous
    assert found.new_test > found.route_a.bound  # constant losses are no random samples: no promise to them


def test_the_other_route_is_chosen_where_its_bound_is_lower():
    found = account(sizes=MANY, jumpboard_train=losses(1.5, 1.5, **MANY))
    assert found.route is found.route_b


def test_a_route_that_says_something_is_preferred_to_a_lower_bound_that_does_not():
    # B: certain enough, promises little. A: a lower bound with no probability (delta takes it all).
    a = dataclasses.replace(account(sizes=MANY).route_a, bound=0.1, probability=0.0, is_vacuous=True)
    found = dataclasses.replace(account(sizes=MANY), route_a=a)
    assert found.route is found.route_b


def test_training_that_ended_above_its_jumpboard_rules_its_route_out():
    found = account(sizes=MANY, jumpboard_train=losses(0.75, 2.25, **MANY))
    assert found.route_b.unmet == "training ended 0.25 nats above its jumpboard on the training sample"
    assert found.route_a.applies
    assert found.route is found.route_a


def test_training_above_both_jumpboards_leaves_no_route():
    found = account(sizes=MANY, new=losses(1.9, 2.125, **MANY))
    assert found.route_a.unmet == "training ended 0.15 nats above its jumpboard on the training sample"
    assert found.route is None
    assert found.is_vacuous


def test_training_that_gained_nothing_is_enough():
    found = account(sizes=MANY, new=losses(1.5, 2.125, **MANY))
    assert found.delta_erm == 0.0
    assert found.route_b.applies


def test_a_margin_that_is_not_certain_rules_route_a_out():
    found = account(sizes=MANY, jumpboard_pop=losses(1.75, 2.5, **MANY))
    assert found.delta_r == 0.0
    assert found.route_a.unmet.startswith("the population margin is not certainly positive (lower limit -")
    assert found.route_a.probability == pytest.approx(-0.1, abs=1e-12)  # no margin, no Hoeffding
    assert found.route is found.route_b


def test_a_negative_margin_limit_never_adds_confidence():
    found = account(sizes=MANY, jumpboard_pop=losses(1.75, 3.5, **MANY))
    assert found.delta_r_lower < -0.9
    assert found.route_a.probability == pytest.approx(-0.1, abs=1e-12)


def test_a_bound_at_the_old_loss_or_above_is_vacuous():
    found = account(block=BlockClass(lipschitz=1.0, weight_norm=1.0, width=64, features=65))
    assert found.route_b.applies
    assert found.route_b.bound > 2.5
    assert found.route_b.is_vacuous
    assert found.is_vacuous


def test_a_bound_exactly_at_the_old_loss_is_vacuous():
    route = risk._route("B", bound=2.5, probability=0.9, old_test=2.5, delta_erm=0.0)
    assert route.is_vacuous
    assert not risk._route("B", bound=2.4999, probability=0.9, old_test=2.5, delta_erm=0.0).is_vacuous


def test_a_promise_without_probability_is_vacuous():
    assert account(sizes=MANY, delta=0.5).route_b.is_vacuous
    assert not account(sizes=MANY, delta=0.49).route_b.is_vacuous


def test_the_promises_hold_where_the_losses_are_random():
    # Real samples: losses of one sample under all four networks differ by shifts; nothing was fitted.
    rng = np.random.default_rng(0)
    held = []
    for _ in range(100):
        train_M, test_K = rng.uniform(1.0, 2.0, 3000), rng.uniform(1.0, 2.0, 3000)
        nets = {
            name: NetworkLosses(train_M=train_M - shift, test_K=test_K - shift)
            for name, shift in (("old", 0.0), ("jumpboard_pop", 0.4), ("jumpboard_train", 0.4), ("new", 0.7))
        }
        found = account(**nets, bound=2.0)
        held.append(found.new_test <= min(found.route_a.bound, found.route_b.bound))
        assert found.route_a.applies
        assert not found.is_vacuous
    assert all(held)


# --- the norm, words, JSON, refusals --------------------------------------------------------------


def test_the_normalisation_margin_is_the_smallest_rms_over_the_root_of_eps():
    assert account(smallest_rms=0.5, norm_eps=1e-4).normalisation_margin == pytest.approx(50.0, rel=1e-12)


@pytest.mark.parametrize(("rms", "eps"), [(None, 1e-5), (0.5, None), (None, None)])
def test_what_was_not_measured_of_the_norm_is_not_made_up(rms, eps):
    found = account(smallest_rms=rms, norm_eps=eps)
    assert found.normalisation_margin is None
    assert "normalisation: not measured" in found.summary()


def test_a_norm_without_eps_has_an_infinite_margin_and_null_in_json():
    found = account(smallest_rms=0.5, norm_eps=0.0)
    assert found.normalisation_margin == math.inf
    assert found.to_dict()["normalisation_margin"] is None


def test_the_dict_is_json_with_what_follows_from_the_fields():
    found = account(sizes=MANY, smallest_rms=0.5, norm_eps=1e-4)
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (data["route"], data["is_vacuous"], data["realised_change"]) == ("A", False, -0.375)
    assert data["route_a"]["bound"] == found.route_a.bound
    assert data["normalisation_margin"] == pytest.approx(50.0)
    fields = {f.name for f in dataclasses.fields(found)}
    assert set(data) == fields | {"route", "is_vacuous", "realised_change"}


def test_the_dict_names_no_route_where_none_applies():
    found = account(new=losses(1.9, 2.125), jumpboard_train=losses(1.5, 2.25))
    assert (found.to_dict()["route"], found.to_dict()["is_vacuous"]) == (None, True)


def test_the_summary_says_what_holds():
    text = account(sizes=MANY, smallest_rms=0.5, norm_eps=1e-4).summary()
    assert "route A holds: test loss <= 1.5" in text
    assert "(old network 2.5) with probability 0.9" in text
    assert "route A is the better one: it promises a decrease" in text
    assert "realised: test loss 2.5 -> 2.125 (-0.375) = -(+0.25 +0.5 -0.375), residual 0" in text
    assert "normalisation: smallest rms of the stream is 50 times sqrt(eps)" in text
    assert "inserted block only and all else frozen" in text


def test_the_summary_says_what_is_vacuous():
    text = account(block=BlockClass(lipschitz=1.0, weight_norm=1.0, width=64, features=65)).summary()
    assert "route B is vacuous: test loss <= " in text
    assert ": it promises nothing" in text


def test_the_summary_says_why_no_route_applies():
    text = account(new=losses(1.9, 2.125)).summary()
    assert "route B does not apply: training ended 0.4 nats above its jumpboard on the training sample" in text
    assert "no route applies" in text


def test_pytest_does_not_take_the_report_for_a_test():
    assert risk.TestRiskReport.__test__ is False


@pytest.mark.parametrize("bad", [-0.1, math.nan])
@pytest.mark.parametrize("split", ["train_M", "test_K"])
def test_a_loss_that_is_negative_or_no_number_is_refused(bad, split):
    new = losses(1.0, 1.0)
    getattr(new, split)[3] = bad
    with pytest.raises(ValueError, match=f"{split} of new has a loss that is negative or not a number"):
        account(new=new)


def test_networks_on_other_samples_are_refused():
    with pytest.raises(ValueError, match=r"test_K of jumpboard_pop has shape \(7,\), that of the old network \(200,\)"):
        account(jumpboard_pop=losses(1, 1, num_test=7))


def test_one_test_sample_is_refused():
    with pytest.raises(
        ValueError, match=r"test_K of the old network must be a vector of at least 2 losses, got \(1,\)"
    ):
        account(sizes={"num_test": 1})


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_a_bound_of_nothing_is_refused(bound):
    with pytest.raises(ValueError, match="must be above 0 nats"):
        account(bound=bound)


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_a_delta_outside_its_range_is_refused(delta):
    with pytest.raises(ValueError, match=r"delta .* must be in \(0, 1\)"):
        account(delta=delta)


# --- the fallback rule ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "jumpboard", "undone"),
    [(1.0, 2.0, False), (2.0, 2.0, False), (2.0001, 2.0, True), (math.nan, 2.0, True), (math.inf, 2.0, True)],
)
def test_training_is_undone_where_it_ended_above_the_jumpboard_or_nowhere(after, jumpboard, undone):
    assert fallback(after, jumpboard) is undone
