"""Rules that look at one simple number."""

import pytest

from growth_service.core.decisions import Grow, Past, Reading, TrainOn
from growth_service.core.policies import FixedSteps, RandomSite, Sight, SignalGuided, Triggered, sight_of
from growth_service.core.rules import decide
from growth_service.core.steps import AddBlock, Deepen
from growth_service.errors import UserError

SITES = ("groups.0.entry", "groups.0.blocks.0", "groups.0.blocks.1")


def reading(*, stage=1, losses=(), ag=(), grew=(), **changes):
    num = max(len(losses), len(ag), 1)
    past = tuple(
        Past(
            loss_val=losses[i] if losses else 1.0,
            ag_max=ag[i] if ag else None,
            grew=i in grew,
        )
        for i in range(num)
    )
    facts = {"stage": stage, "num_stages": 9, "spent_flops": 10, "budget_flops": 100, "data_share": 1.0,
             "tolerance_nats": 0.01, "past": past, "sites": SITES}  # fmt: skip
    return Reading(**facts | changes)


def triggered(trigger, threshold, **changes):
    return Triggered(trigger=trigger, threshold=threshold, changes=(Deepen(),), **changes)


@pytest.mark.parametrize(("losses", "grows"), [((1.0, 0.97), False), ((1.0, 0.99), True), ((1.0, 1.1), True)])
def test_a_plateau_of_the_loss_grows(losses, grows):
    decision = decide(reading(losses=losses), triggered("plateau", 0.02))
    assert isinstance(decision, Grow if grows else TrainOn)
    assert "validation loss fell by" in decision.reason


def test_one_loss_is_no_plateau():
    assert isinstance(decide(reading(losses=(1.0,)), triggered("plateau", 0.02)), TrainOn)


@pytest.mark.parametrize(
    ("ag", "grows"), [((5.0,), True), ((5.0, 4.0), True), ((5.0, 4.9), False), ((4.0, 5.0), False)]
)
def test_depth_is_added_while_the_largest_activation_gradient_falls(ag, grows):
    assert isinstance(decide(reading(ag=ag), triggered("ag_plateau", 0.1)), Grow if grows else TrainOn)


@pytest.mark.parametrize(("seen", "grows"), [(999, False), (1000, False), (1001, True)])
def test_many_targets_for_each_parameter_grow(seen, grows):
    decision = decide(reading(targets_seen=seen, params=10), triggered("tokens_per_param", 100))
    assert isinstance(decision, Grow if grows else TrainOn)


def test_a_trigger_ends_after_its_last_time():
    now = reading(losses=(1.0, 1.0, 1.0), grew=(0, 1))
    assert isinstance(decide(now, triggered("plateau", 0.02, most=3)), Grow)
    late = decide(now, triggered("plateau", 0.02, most=2))
    assert isinstance(late, TrainOn)
    assert "grew 2 times already" in late.reason


def test_a_random_site_is_drawn_by_the_seed_and_the_stage():
    policy = RandomSite(after=(1, 2))
    drawn = {decide(reading(seed=s), policy).changes[0].site for s in range(30)}
    assert drawn == set(SITES)
    assert decide(reading(seed=4), policy) == decide(reading(seed=4), policy)
    stages = [decide(reading(seed=s, stage=t), policy).changes[0].site for s in range(9) for t in (1, 2)]
    assert stages[::2] != stages[1::2]
    assert isinstance(decide(reading(stage=0), policy), TrainOn)
    assert decide(reading(), RandomSite(after=(1,), inner="random")).changes[0] == AddBlock(
        site=decide(reading(), policy).changes[0].site, inner="random"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [({"trigger": "loss"}, "plateau, ag_plateau or tokens_per_param"), ({"threshold": 0.0}, "above 0"),
     ({"changes": ()}, "changes to take"), ({"most": 0}, "at most 0")],
)  # fmt: skip
def test_a_trigger_that_could_do_nothing_is_refused(change, words):
    with pytest.raises(UserError, match=words):
        Triggered(**{"trigger": "plateau", "threshold": 0.1, "changes": (Deepen(),)} | change)


def test_only_policies_that_need_certificates_look():
    assert sight_of(FixedSteps()) is None
    assert sight_of(triggered("plateau", 0.02)) is None
    assert sight_of(triggered("ag_plateau", 0.02)) == Sight(axes=("depth",))
    assert sight_of(SignalGuided(units=4, inner="copy", level=0.1, tolerance_nats=0.3)) == Sight(
        axes=("depth", "width", "data"), units=4, inner="copy", level=0.1, tolerance_nats=0.3
    )
