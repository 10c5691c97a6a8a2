"""Trials that begin alike run their beginning once, and give the records that they give alone."""

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from growth_service.core.decisions import Anneal
from growth_service.core.policies import BudgetAware, FixedSteps, SignalGuided
from growth_service.core.steps import AddBlock, AddData, Deepen
from growth_service.training import looking, stage, stage_cache
from growth_service.training.config import TrialConfig
from growth_service.training.ranks import Ranks
from growth_service.training.stage import extent_of
from growth_service.training.stage_cache import StageCache, stage_key
from growth_service.training.stage_loop import StageLoop, run_trial
from tests.torch_helpers import BY_SIGNAL, GROWS_ALL, prepared_digits, run_to_end, trial_config

DEEPER = AddBlock(site="groups.1.blocks.0", inner="copy")
BUDGET = 2_000_000_000


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepared_digits(tmp_path_factory.mktemp("data"))


@pytest.fixture
def ran(monkeypatch):
    """Stages that were really run, as (trial, stage)."""
    found = []
    run = stage.Stage.run

    def spy(self, **arguments):
        found.append((self.config.trial, self.number))
        return run(self, **arguments)

    monkeypatch.setattr(stage.Stage, "run", spy)
    return found


def configured(folder, *, data, policy=None, cache=None, trial="a", training=None, **changes):
    config = trial_config(folder / trial, data=data, policy=policy or FixedSteps(), budget_flops=BUDGET, **changes)
    fields = config.to_dict() | {"trial": trial, "training": config.training | (training or {})}
    where = None if cache is None else {"folder": str(cache), "limit_bytes": 1 << 30}
    return TrialConfig.from_dict(fields | {"cache": where})


def comparable(records):
    return [r.comparable() | {"trial": ""} for r in records]


@pytest.mark.parametrize("policy", [GROWS_ALL, BY_SIGNAL], ids=["fixed", "signal"])
def test_records_are_equal_with_the_cache_and_without(policy, data, tmp_path, ran):
    alone = run_to_end(configured(tmp_path / "alone", data=data, policy=policy))
    first = run_to_end(configured(tmp_path, data=data, policy=policy, cache=tmp_path / "cache", trial="first"))
    num_run = len(ran)
    second = run_to_end(configured(tmp_path, data=data, policy=policy, cache=tmp_path / "cache", trial="second"))
    assert comparable(alone) == comparable(first) == comparable(second)
    assert len(ran) == num_run  # nothing was run a third time
    assert [r.reused for r in second[:-1]] == [True] * (len(second) - 1)
    assert {r.trial for r in second} == {"second"}
    assert not any(r.reused for r in first[:-1])


def test_two_schedules_share_their_beginning_and_part_where_one_grows(data, tmp_path, ran):
    cache = tmp_path / "cache"
    plain = run_to_end(configured(tmp_path, data=data, cache=cache, trial="plain"))
    late = FixedSteps(steps=((1, (DEEPER,)),))
    grown = run_to_end(configured(tmp_path, data=data, policy=late, cache=cache, trial="grown"))
    assert ran == [("plain", 0), ("plain", 1), ("plain", 2), ("grown", 2)]
    assert [r.reused for r in grown[:-1]] == [True, True, False]
    assert (grown[1].decision["kind"], plain[1].decision["kind"]) == ("grow", "train_on")
    assert comparable(grown) == comparable(run_to_end(configured(tmp_path / "alone", data=data, policy=late)))


def test_what_comes_after_a_shared_step_of_the_network_is_shared_too(data, tmp_path, ran):
    """A schedule that doubles depth and one that does so and then adds data are one trial until the data."""
    cache = tmp_path / "cache"
    deeper = ((0, (Deepen(),)),)
    run_to_end(configured(tmp_path, data=data, policy=FixedSteps(steps=deeper), cache=cache, trial="x"))
    ran.clear()
    both = FixedSteps(steps=(*deeper, (1, (AddData(share=1.0),))))
    run_to_end(configured(tmp_path, data=data, policy=both, cache=cache, trial="y"))
    assert ran == [("y", 2)]


def test_a_stage_after_another_past_is_another_stage(data, tmp_path, ran):
    """Nothing grows after stage 1 in either, but one of them grew after stage 0."""
    cache = tmp_path / "cache"
    run_to_end(configured(tmp_path, data=data, cache=cache, trial="plain"))
    ran.clear()
    early = FixedSteps(steps=((0, (DEEPER,)),))
    grown = run_to_end(configured(tmp_path, data=data, policy=early, cache=cache, trial="grown"))
    assert ran == [("grown", 1), ("grown", 2)]
    assert grown[2].depth == 3


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        ({"seed": 1}, 0),
        ({"training": {"learning_rate": 0.001}}, 0),
        ({"training": {"rates": "cosine"}}, 0),
    ],
)
def test_another_seed_or_setting_is_another_stage(change, shared, data, tmp_path, ran):
    cache = tmp_path / "cache"
    run_to_end(configured(tmp_path, data=data, cache=cache, trial="x"))
    ran.clear()
    run_to_end(configured(tmp_path, data=data, cache=cache, trial="y", **change))
    assert len(ran) == 3 - shared


def of_two_budgets(folder, *, data, policy=None):
    """A trial, one of twice the budget whose first two stages end where the other's do, and that one without a cache."""
    steady = {"rates": "wsd", "decay_share": 0.25, "rewarm": "none"}
    found = {}
    for trial, ends in (("short", (0.4, 0.6, 1.0)), ("long", (0.2, 0.3, 1.0)), ("alone", (0.2, 0.3, 1.0))):
        cache = None if trial == "alone" else folder / "cache"
        config = configured(folder, data=data, policy=policy, cache=cache, trial=trial, training=steady, data_share=1.0)
        schedule = config.schedule | {"shares": [ends[0], ends[1] - ends[0], 1 - ends[1]]}
        budget = BUDGET if trial == "short" else 2 * BUDGET
        found[trial] = run_to_end(
            TrialConfig.from_dict(config.to_dict() | {"schedule": schedule, "budget_flops": budget})
        )
    return found


def test_steady_stages_are_shared_by_trials_of_different_budgets(data, tmp_path, ran):
    """Up to the decay, a trial of twice the budget is the same trial."""
    found = of_two_budgets(tmp_path, data=data)
    assert [number for trial, number in ran if trial == "long"] == [2]
    assert comparable(found["long"]) == comparable(found["alone"])


def test_a_stage_after_which_nobody_looked_is_not_one_after_which_a_larger_budget_looks(
    data, tmp_path, ran, monkeypatch
):
    monkeypatch.setattr(looking, "could_pay", lambda size, *, left, **_: left > BUDGET)
    policy = BudgetAware(look_share=0.9, confidence=1 - 1e-9)  # looks, and never grows
    found = of_two_budgets(tmp_path, data=data, policy=policy)
    assert [bool(s.certificates) for s in found["short"][:-1]] == [False, False, False]
    assert [bool(s.certificates) for s in found["long"][:-1]] == [True, True, False]
    assert [number for trial, number in ran if trial == "long"] == [0, 1, 2]
    assert comparable(found["long"]) == comparable(found["alone"])


def test_a_damaged_entry_is_run_again_and_put_right(data, tmp_path, ran, caplog):
    cache = tmp_path / "cache"
    first = run_to_end(configured(tmp_path, data=data, cache=cache, trial="x"))
    shutil.rmtree(tmp_path / "x")  # entries share their files with the trial that wrote them
    for weights in cache.glob("*/000/weights.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    ran.clear()
    second = run_to_end(configured(tmp_path, data=data, cache=cache, trial="y"))
    assert ran == [("y", 0)]
    assert "is damaged" in caplog.text
    assert comparable(first) == comparable(second)
    ran.clear()
    run_to_end(configured(tmp_path, data=data, cache=cache, trial="z"))
    assert ran == []


def test_a_resumed_trial_takes_over_the_stages_that_it_still_has_to_run(data, tmp_path, ran):
    cache = tmp_path / "cache"
    whole = run_to_end(configured(tmp_path, data=data, policy=GROWS_ALL, cache=cache, trial="x"))
    config = configured(tmp_path, data=data, policy=GROWS_ALL, cache=cache, trial="y")
    run_to_end(config)
    shutil.rmtree(tmp_path / "y" / "stages" / "002")
    (tmp_path / "y" / "final.json").unlink()
    ran.clear()
    assert comparable(run_to_end(config)) == comparable(whole)
    assert ran == []


def test_one_runs_and_the_others_wait(tmp_path):
    cache, key = StageCache(tmp_path / "cache", limit_bytes=1 << 30), stage_key(what="a stage")
    folder = tmp_path / "000"
    folder.mkdir()
    (folder / "weights").write_text("x")
    holder, seen = cache.claim(key), []

    def wait():
        claim = cache.claim(key)
        seen.append(claim.found)
        claim.release()

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    assert (seen, holder.found) == ([], None)
    holder.publish(folder)
    holder.release()
    waiting.join(10)
    assert seen == [tmp_path / "cache" / key]
    assert (seen[0] / "000" / "weights").read_text() == "x"


def test_a_claim_that_comes_to_nothing_leaves_the_stage_to_the_next(tmp_path):
    cache, key = StageCache(tmp_path / "cache", limit_bytes=1 << 30), stage_key(what="a stage")
    cache.claim(key).release()
    following = cache.claim(key)
    assert following.found is None
    following.release()


def test_the_least_recently_used_entries_make_room(tmp_path):
    cache = StageCache(tmp_path / "cache", limit_bytes=2500)
    folder = tmp_path / "000"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(1000))
    keys = [stage_key(number=n) for n in range(3)]
    for key in keys[:2]:
        claim = cache.claim(key)
        claim.publish(folder)
        claim.release()
        time.sleep(0.02)
    cache.claim(keys[0]).release()  # used again
    time.sleep(0.02)
    claim = cache.claim(keys[2])
    claim.publish(folder)
    claim.release()
    assert {p.name for p in (tmp_path / "cache").iterdir()} == {keys[0], keys[2], "locks"}


def test_an_entry_in_use_is_not_dropped(tmp_path):
    cache = StageCache(tmp_path / "cache", limit_bytes=1500)
    folder = tmp_path / "000"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(1000))
    first, second = stage_key(number=0), stage_key(number=1)
    held = cache.claim(first)
    held.publish(folder)
    other = cache.claim(second)
    other.publish(folder)
    assert (tmp_path / "cache" / first).is_dir()
    for claim in (held, other):
        claim.release()


def test_a_key_depends_on_every_value_and_on_the_code(monkeypatch):
    key = stage_key(a=1, b=[2])
    assert key == stage_key(b=[2], a=1)
    assert key != stage_key(a=1, b=[3])
    monkeypatch.setattr(stage_cache, "numerics_version", lambda: "other")
    assert key != stage_key(a=1, b=[2])


def test_the_version_of_the_numerics_covers_what_trains_and_what_probes():
    root = Path(stage_cache.__file__).parents[1]
    assert all((root / package / "__init__.py").is_file() for package in stage_cache.NUMERICS)


def test_cached_records_are_plain_json(data, tmp_path):
    run_to_end(configured(tmp_path, data=data, cache=tmp_path / "cache", trial="x"))
    history = next((tmp_path / "cache").glob("*/002/history.json"))
    assert [r["stage"] for r in json.loads(history.read_text())] == [0, 1, 2]


def test_a_trial_that_ends_early_at_its_full_rate_decays_first(data, tmp_path):
    """A quarter of what was spent so far, so that the decay is the last fifth of the whole, as planned trials have."""
    saturated = SignalGuided(axes=("depth",), tolerance_nats=50.0)
    steady = {"rates": "wsd", "decay_share": 0.2}
    config = configured(tmp_path, data=data, policy=saturated, training=steady, num_stages=6)
    *stages, final = run_to_end(config)
    assert [s.decision["kind"] for s in stages] == ["anneal", "stop"]
    assert (final.cause, stages[1].certificates) == ("saturated", [])
    assert stages[1].flops_total == pytest.approx(stages[0].flops_total / 0.8, rel=0.05)
    restarts = configured(tmp_path, data=data, policy=saturated, num_stages=6, trial="restarts")
    assert [s.decision["kind"] for s in run_to_end(restarts)[:-1]] == ["stop"]  # its stages end annealed


def test_a_trial_that_ends_while_its_rate_decays_decays_on_from_there(data, tmp_path):
    config = configured(tmp_path, data=data, training={"rates": "wsd", "decay_share": 0.5}, num_stages=5)
    loop = run_trial(config, ranks=Ranks())
    for _ in range(4):
        record = next(loop)
    loop.close()
    state = StageLoop(config, ranks=Ranks()).state
    state.decision = Anneal(cause="saturated", reason="x")
    extent = extent_of(state, config.growth_schedule())
    assert extent.window == (pytest.approx(0.8), 1.0)
    assert extent.until == pytest.approx(record.flops_total / 0.8, rel=1e-6)
    assert extent.last


def test_a_cache_that_cannot_be_used_costs_no_stage(data, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file in the way")
    records = run_to_end(configured(tmp_path, data=data, cache=tmp_path / "cache", trial="x"))
    assert comparable(records) == comparable(run_to_end(configured(tmp_path / "alone", data=data)))
    assert "Running without the stage cache" in caplog.text


def test_several_that_make_room_at_once_do_not_stumble(tmp_path):
    folder = tmp_path / "000"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(2000))
    with ThreadPoolExecutor(4) as pool:
        for found in [pool.submit(publish_many, tmp_path / "cache", folder, first) for first in range(4)]:
            found.result()


def publish_many(cache, folder, first):
    for number in range(first, 200, 4):
        claim = StageCache(cache, limit_bytes=5000).claim(stage_key(number=number))
        claim._publish(folder)
        claim.release()
