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


async def take(exchange, lane, workers="w0"):
    """As a lane's first rank does."""
    found = await exchange.take(lane, workers)
    if "trial" in found:
        await exchange.begin(lane, found["trial"]["trial"])
    return found


async def queue(exchange, names):
    for name in names:
        await exchange.follow(name, {"trial": name}, 0)


def test_a_trial_goes_to_a_lane_its_records_to_the_follower_and_the_verdict_back():
    async def scene(exchange):
        following = asyncio.create_task(exchange.follow("a", {"trial": "a"}, 0))
        assert await take(exchange, 0) == {"trial": {"trial": "a"}}
        await exchange.offer(0, "a", metrics(number=1))
        assert await following == [metrics(number=1)]
        waiting = asyncio.create_task(exchange.verdict(0, "a", 0))
        await exchange.post("a", 0, {"kind": "train_on"})
        await exchange.post("a", 0, {"kind": "stop"})  # the first one stands
        assert await waiting == {"kind": "train_on"}
        await exchange.offer(0, "a", metrics("final", 2))
        assert await exchange.follow("a", {"trial": "a"}, 1) == [metrics("final", 2)]
        assert [e.what for e in await exchange.close()] == ["up", "took", "record", "verdict", "end"]

    play(scene)


def test_calls_come_back_empty_when_there_is_no_news():
    async def scene(exchange):
        assert await take(exchange, 0) == {}
        assert await exchange.follow("a", {"trial": "a"}, 0) == []
        assert await exchange.verdict(0, "a", 0) is None

    play(scene)


def test_trials_wait_in_the_order_in_which_they_came_and_each_lane_gets_another():
    async def scene(exchange):
        await queue(exchange, "abc")
        first = await take(exchange, 1)
        second = await take(exchange, 0)
        await exchange.offer(1, "a", metrics("final"))
        third = await take(exchange, 1)
        return [found["trial"]["trial"] for found in (first, second, third)]

    assert play(scene) == ["a", "b", "c"]


def test_a_follower_that_was_started_again_hears_everything_and_queues_nothing():
    async def scene(exchange):
        await queue(exchange, "a")
        await take(exchange, 0)
        await exchange.offer(0, "a", metrics(number=1))
        assert await exchange.follow("a", {"trial": "a"}, 1) == []
        assert await exchange.follow("a", {"trial": "a"}, 0) == [metrics(number=1)]
        assert await take(exchange, 1) == {}

    play(scene)


def test_a_lane_whose_workers_died_gets_its_trial_again_until_that_was_too_often():
    async def scene(exchange):
        await queue(exchange, "ab")
        assert (await take(exchange, 0, "w0"))["trial"]["trial"] == "a"
        assert (await take(exchange, 0, "w1"))["trial"]["trial"] == "a"  # died once
        await exchange.stumble("a", "RuntimeError: out of memory")
        await exchange.stumble("a", "RuntimeError: connection closed by peer")  # of another rank, because of the first
        assert (await take(exchange, 0, "w2"))["trial"]["trial"] == "b"  # died twice
        return await exchange.follow("a", {"trial": "a"}, 0)

    assert reasons(play(scene)) == ["RuntimeError: out of memory (its workers died 2 times)"]


def test_workers_that_died_before_they_had_a_trial_cost_it_nothing():
    async def scene(exchange):
        await queue(exchange, "a")
        for workers in ("w0", "w1", "w2", "w3"):
            assert await exchange.take(0, workers) == {"trial": {"trial": "a"}}  # and none of them begins

    play(scene, restarts=0)


def test_what_dead_workers_still_ask_for_is_void():
    async def scene(exchange):
        stale = asyncio.create_task(exchange.take(0, "dead"))
        await asyncio.sleep(0)
        fresh = asyncio.create_task(take(exchange, 0, "alive"))
        await asyncio.sleep(0)
        await queue(exchange, "ab")
        assert await fresh == {"trial": {"trial": "a"}}
        assert await stale == {}
        assert await take(exchange, 1) == {"trial": {"trial": "b"}}  # nothing was lost

    play(scene, patience_s=0.5)


def test_a_trial_that_nobody_follows_leaves_the_queue_or_ends():
    async def scene(exchange):
        await queue(exchange, "ab")
        await take(exchange, 0)
        await exchange.offer(0, "a", metrics())
        await exchange.abandon("a")
        await exchange.abandon("b")
        assert (await exchange.verdict(0, "a", 0))["kind"] == "stop"
        await exchange.offer(0, "a", metrics("final"))
        assert await take(exchange, 0) == {}

    play(scene)


def test_the_trial_of_a_lost_lane_goes_to_another_and_without_one_all_that_wait_fail():
    async def scene(exchange):
        await exchange.expect(0)
        await exchange.expect(1)
        await queue(exchange, "abc")
        await take(exchange, 0)
        await exchange.lane_lost(0, "no room")  # while lane 1 still starts
        assert (await take(exchange, 1))["trial"]["trial"] == "a"
        assert await exchange.lost() is None
        await exchange.lane_lost(1, "no memory")
        assert await exchange.lost() == "no memory"
        found = [reasons(await exchange.follow(name, {"trial": name}, 0)) for name in "abcd"]
        assert found == [["no memory"]] * 4  # d came when nobody was left
        await exchange.expect(2)
        assert await take(exchange, 2) == {}  # none of them is left for a later lane
        await queue(exchange, "e")
        assert (await take(exchange, 2))["trial"]["trial"] == "e"

    play(scene)


def test_a_closed_exchange_ends_lanes_but_not_the_trials_that_wait():
    async def scene(exchange):
        await queue(exchange, "a")
        await exchange.close()
        assert await take(exchange, 0) == {"trial": {"trial": "a"}}
        await exchange.offer(0, "a", metrics("final"))
        assert await take(exchange, 0) == {"closed": True}

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
