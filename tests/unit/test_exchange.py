"""The exchange between trials, lanes and the study, and the account of the lanes' time, without Ray."""

import asyncio
import json

import pytest

from growth_service.orchestration.exchange import Exchange
from growth_service.orchestration.profile import Event, profile_of
from tests.factories import stage_record


def play(scene, *, restarts=1, patience_s=0.05):
    """Run a scene with an exchange of its own; every call in it returns soon."""

    async def run():
        return await asyncio.wait_for(scene(Exchange(restarts=restarts, patience_s=patience_s)), 5)

    return asyncio.run(run())


def metrics(kind="stage", number=0):
    return {"kind": kind, "loss_val": 1.0, "record": json.dumps({"number": number})}


def reasons(found):
    return [json.loads(m["record"])["reason"] for m in found if m["kind"] == "failed"]


def test_a_trial_goes_to_a_lane_its_records_to_the_follower_and_the_verdict_back():
    async def scene(exchange):
        following = asyncio.create_task(exchange.follow("a", {"trial": "a"}, 0))
        assert await exchange.take(0) == {"trial": {"trial": "a"}}
        await exchange.offer(0, "a", metrics(number=1))
        assert await following == [metrics(number=1)]
        waiting = asyncio.create_task(exchange.verdict(0, "a", 0))
        await exchange.post("a", 0, {"kind": "train_on"})
        await exchange.post("a", 0, {"kind": "stop"})  # the first one stands
        assert await waiting == {"kind": "train_on"}
        await exchange.offer(0, "a", metrics("final", 2))
        assert await exchange.follow("a", {"trial": "a"}, 1) == [metrics("final", 2)]
        assert [e.what for e in await exchange.timeline()] == ["up", "took", "record", "verdict", "end"]

    play(scene)


def test_calls_come_back_empty_when_there_is_no_news():
    async def scene(exchange):
        assert await exchange.take(0) == {}
        assert await exchange.follow("a", {"trial": "a"}, 0) == []
        assert await exchange.verdict(0, "a", 0) is None

    play(scene)


def test_trials_wait_in_the_order_in_which_they_came_and_each_lane_gets_another():
    async def scene(exchange):
        for name in "abc":
            await exchange.follow(name, {"trial": name}, 0)
        first = await exchange.take(1)
        second = await exchange.take(0)
        await exchange.offer(1, "a", metrics("final"))
        third = await exchange.take(1)
        return [found["trial"]["trial"] for found in (first, second, third)]

    assert play(scene) == ["a", "b", "c"]


def test_a_follower_that_was_started_again_hears_everything_and_queues_nothing():
    async def scene(exchange):
        await exchange.follow("a", {"trial": "a"}, 0)
        await exchange.take(0)
        await exchange.offer(0, "a", metrics(number=1))
        assert await exchange.follow("a", {"trial": "a"}, 1) == []
        assert await exchange.follow("a", {"trial": "a"}, 0) == [metrics(number=1)]
        assert await exchange.take(1) == {}

    play(scene)


def test_a_lane_whose_workers_died_gets_its_trial_again_until_that_was_too_often():
    async def scene(exchange):
        await exchange.follow("a", {"trial": "a"}, 0)
        await exchange.follow("b", {"trial": "b"}, 0)
        assert (await exchange.take(0))["trial"]["trial"] == "a"
        assert (await exchange.take(0))["trial"]["trial"] == "a"  # died once
        await exchange.stumble("a", "RuntimeError: out of memory")
        assert (await exchange.take(0))["trial"]["trial"] == "b"  # died twice
        return await exchange.follow("a", {"trial": "a"}, 0)

    assert reasons(play(scene)) == ["RuntimeError: out of memory (workers started 2 times)"]


def test_a_lost_lane_fails_its_own_trial_and_the_last_one_all_that_wait():
    async def scene(exchange):
        for name in "abcd":
            await exchange.follow(name, {"trial": name}, 0)
        await exchange.take(0)
        await exchange.take(1)
        await exchange.lane_lost(0, "no room")
        assert reasons(await exchange.follow("a", {}, 0)) == ["no room"]
        assert await exchange.follow("c", {}, 0) == []  # lane 1 may still run it
        await exchange.lane_lost(1, "no memory")
        found = [reasons(await exchange.follow(name, {"trial": name}, 0)) for name in "bcde"]
        assert found == [["no memory"]] * 4  # e came when nobody was left

    play(scene)


def test_a_closed_exchange_ends_lanes_but_not_the_trials_that_wait():
    async def scene(exchange):
        await exchange.follow("a", {"trial": "a"}, 0)
        await exchange.close()
        assert await exchange.take(0) == {"trial": {"trial": "a"}}
        await exchange.offer(0, "a", metrics("final"))
        assert await exchange.take(0) == {"closed": True}

    play(scene)


def test_the_time_of_all_lanes_is_split_without_a_rest():
    events = [
        Event(3.0, 0, "up"), Event(4.0, 0, "took", "a"), Event(5.0, 1, "up"), Event(24.0, 0, "record", "a"),
        Event(26.0, 0, "verdict", "a"), Event(27.0, 0, "end", "a"), Event(28.0, 0, "took", "b"),
        Event(38.0, 0, "end", "b"),
    ]  # fmt: skip
    stages = [
        stage_record(trial="a", stage_s=19.0, overhead_s=5.0, grow_s=2.0),
        stage_record(trial="b", stage_s=8.0, overhead_s=1.0, grow_s=0.5),
        stage_record(trial="b", stage_s=8.0, overhead_s=8.0, reused=True),
    ]
    parts = {p.what: p for p in profile_of(events, stages, started=0.0, ended=40.0, lanes=2)}
    assert {what: part.seconds for what, part in parts.items()} == {
        "training": 21.0, "growing": 2.5, "evaluating and looking": 3.5,
        "between stages (checkpoints, waiting for shared stages)": 4.0,
        "start of workers": 8.0, "waiting for a trial": 39.0, "waiting for a verdict": 2.0,
    }  # fmt: skip
    assert sum(p.share for p in parts.values()) == pytest.approx(1.0)


def test_a_study_that_needed_no_lane_has_no_profile():
    assert profile_of([], [], started=0.0, ended=5.0, lanes=0) == []
