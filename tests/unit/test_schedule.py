"""Growth schedules as values: equal, hashable, and the same after a trip through JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth_service.core.policies import FixedSteps, RandomSite, SignalGuided, Triggered
from growth_service.core.schedule import GrowthSchedule, InitialSize
from growth_service.core.steps import (
    AddBlock,
    AddChannels,
    AddData,
    AddHeads,
    AddUnits,
    Deepen,
    Widen,
    axis_of,
    change_from_dict,
    change_to_dict,
)
from growth_service.errors import UserError

SHARES = st.floats(0.001, 1.0)
PATHS = st.text(min_size=1, max_size=20)
CHANGES = st.one_of(
    st.builds(AddBlock, site=PATHS, inner=st.sampled_from(["random", "copy"]), jumpboard=st.booleans()),
    st.builds(AddUnits, block=PATHS, units=st.integers(1, 512)),
    st.builds(AddData, share=SHARES),
    st.builds(AddHeads, block=PATHS, heads=st.integers(1, 16)),
    st.builds(AddChannels, site=PATHS, channels=st.integers(1, 64)),
    st.builds(Deepen, times=st.integers(2, 4), exact=st.booleans()),
    st.builds(Widen, times=st.floats(1.1, 4)),
)


def allowed(due):
    """A step that changes outputs and a data step together are refused."""
    moves = any(getattr(c, "jumpboard", False) or not getattr(c, "exact", True) for c in due)
    return not (moves and any(isinstance(c, AddData) for c in due))


DUE = st.lists(CHANGES, max_size=3).filter(allowed)
POLICIES = st.one_of(
    st.builds(
        FixedSteps,
        steps=st.lists(st.tuples(st.integers(0, 9), DUE.map(tuple)), max_size=4, unique_by=lambda s: s[0]).map(tuple),
    ),
    st.builds(
        SignalGuided,
        axes=st.lists(st.sampled_from(["depth", "width", "data"]), unique=True).map(tuple),
        level=st.floats(0.001, 0.49),
        tolerance_nats=st.none() | st.floats(0, 5),
        data_factor=st.floats(1.01, 8),
        units=st.integers(1, 64),
        inner=st.sampled_from(["random", "copy"]),
        jumpboard=st.booleans(),
    ),
    st.builds(RandomSite, after=st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    st.builds(
        Triggered,
        trigger=st.sampled_from(["plateau", "ag_plateau", "tokens_per_param"]),
        threshold=st.floats(0.01, 100),
        changes=st.lists(CHANGES, min_size=1, max_size=2).filter(allowed).map(tuple),
        most=st.integers(1, 9),
    ),
)
SCHEDULES = st.builds(
    GrowthSchedule,
    name=st.text(max_size=12),
    initial=st.builds(
        InitialSize,
        blocks=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
        hidden=st.lists(st.integers(1, 99), min_size=1, max_size=3).map(tuple),
        data_share=SHARES,
    ),
    policy=POLICIES,
    num_stages=st.integers(1, 20),
)


def through_json(data):
    return json.loads(json.dumps(data))


@given(SCHEDULES)
def test_a_schedule_survives_json(schedule):
    assert GrowthSchedule.from_dict(through_json(schedule.to_dict())) == schedule


@given(SCHEDULES)
def test_a_schedule_survives_its_own_dict(schedule):
    assert GrowthSchedule.from_dict(schedule.to_dict()) == schedule


@given(SCHEDULES)
def test_reading_a_schedule_leaves_the_dict_as_it_was(schedule):
    data = through_json(schedule.to_dict())
    before = json.dumps(data)
    GrowthSchedule.from_dict(data)
    assert json.dumps(data) == before


@given(SCHEDULES)
def test_equal_schedules_have_equal_hashes(schedule):
    assert len({schedule, GrowthSchedule.from_dict(through_json(schedule.to_dict()))}) == 1


def test_the_dict_of_a_schedule_is_plain_json():
    schedule = GrowthSchedule(
        name="s", initial=InitialSize(blocks=(1,), hidden=(8,)), policy=SignalGuided(), num_stages=2
    )
    assert through_json(schedule.to_dict()) == schedule.to_dict()


@given(CHANGES)
def test_a_change_survives_json(change):
    assert change_from_dict(through_json(change_to_dict(change))) == change


@given(CHANGES)
def test_reading_a_change_leaves_the_dict_as_it_was(change):
    data = change_to_dict(change)
    change_from_dict(data)
    assert data == change_to_dict(change)


@pytest.mark.parametrize(
    ("change", "kind", "axis", "words"),
    [
        (AddBlock(site="groups.0.blocks.0"), "depth", "depth", "depth@groups.0.blocks.0"),
        (AddUnits(block="groups.0.blocks.0.branch", units=8), "width", "width", "width@groups.0.blocks.0.branch+8"),
        (AddHeads(block="groups.0.blocks.0.branch", heads=2), "heads", "width", "heads@groups.0.blocks.0.branch+2"),
        (AddChannels(site="groups.0.entry", channels=16), "stream", "stream", "stream@groups.0.entry+16"),
        (AddData(share=0.5), "data", "data", "data@0.50"),
        (Deepen(), "deepen", "depth", "depth*2"),
        (Deepen(exact=False, times=3), "deepen", "depth", "stack*3"),
        (Widen(times=1.5), "widen", "stream", "width*1.5"),
    ],
)
def test_a_change_knows_its_axis_and_reads_as_words(change, kind, axis, words):
    assert (axis_of(change), str(change), change_to_dict(change)["kind"]) == (axis, words, kind)


def test_a_change_of_an_earlier_version_is_read():
    data = {"axis": "width", "block": "groups.0.blocks.0.branch", "units": 8}
    assert change_from_dict(data) == AddUnits(block="groups.0.blocks.0.branch", units=8)


def test_equal_shares_end_at_one_and_given_ones_are_summed():
    even = GrowthSchedule(name="x", initial=InitialSize(blocks=(1,), hidden=(4,)), policy=FixedSteps(), num_stages=3)
    assert even.stage_ends() == (pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0)
    assert even.with_shares((0.5, 0.2, 0.3)).stage_ends() == (0.5, pytest.approx(0.7), 1.0)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.5, 0.6, -0.1), (0.5, 0.2, 0.2)])
def test_shares_that_are_no_division_of_the_budget_are_refused(shares):
    with pytest.raises(UserError, match="3 positive numbers that sum to 1"):
        GrowthSchedule(
            name="x", initial=InitialSize(blocks=(1,), hidden=(4,)), policy=FixedSteps(), num_stages=3, shares=shares
        )


def test_a_new_block_is_random_and_not_moved_unless_asked():
    assert AddBlock(site="stem") == AddBlock(site="stem", inner="random", jumpboard=False)


def test_fixed_steps_are_due_after_their_stage_alone():
    deeper, more = AddBlock(site="stem"), AddData(share=1.0)
    policy = FixedSteps(steps=((0, (deeper,)), (2, (deeper, more))))
    assert [policy.after(s) for s in range(4)] == [(deeper,), (), (deeper, more), ()]


def test_fixed_steps_without_a_step_grow_nothing():
    assert FixedSteps().after(0) == ()


def test_two_entries_for_one_stage_are_both_due_or_refused():
    deeper, more = AddBlock(site="stem"), AddData(share=1.0)
    try:
        policy = FixedSteps(steps=((1, (deeper,)), (1, (more,))))
    except ValueError:
        return
    assert set(policy.after(1)) == {deeper, more}


def test_a_signal_guided_schedule_may_grow_all_axes_at_level_5_percent():
    policy = SignalGuided()
    assert (policy.axes, policy.level, policy.tolerance_nats) == (("depth", "width", "data"), 0.05, None)
