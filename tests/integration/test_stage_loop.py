"""The stage loop on real trials: the same history whatever interrupts it and however many share it.

Each trial takes about a second: 3 stages of a few batches on 320 digits. Trials that several
tests look at are run once.
"""

import json
import math
import re
import shutil
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch_helpers import (
    BY_SIGNAL,
    GROWS_ALL,
    comparable,
    prepared_digits,
    run_on_ranks,
    run_to_end,
    same,
    trial_config,
)

from growth_service.blocks import flatten_projection
from growth_service.core.decisions import Stop, TrainOn
from growth_service.core.policies import FixedSteps, sight_of
from growth_service.core.records import FinalRecord, StageRecord
from growth_service.core.steps import AddBlock, AddData
from growth_service.errors import RankDisagreementError, UserError
from growth_service.models import build
from growth_service.models.flops import FlopCounter, flops_per_sample
from growth_service.probing import Candidate, jumpboard
from growth_service.probing.jumpboard import clipped_direction
from growth_service.training import checkpoint, growing, stage
from growth_service.training.checkpoint import load_checkpoint
from growth_service.training.config import TrialConfig
from growth_service.training.data import open_splits
from growth_service.training.evaluate import loss_sum
from growth_service.training.growing import candidates, new_block
from growth_service.training.ranks import Ranks, weights_digest
from growth_service.training.stage_loop import run_trial

POLICIES = {"fixed": GROWS_ALL, "signal": BY_SIGNAL}
BUDGETS = {"fixed": 2_000_000_000, "signal": 3_000_000_000}
"""Enough for a few batches in each stage; looks and certificates cost more than they train."""
NOTHING_GROWS = FixedSteps()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of the prepared digits."""
    return prepared_digits(tmp_path_factory.mktemp("data"))


class StepCounter:
    """Counts optimiser steps of the process; raises before one, where it is told to."""

    def __init__(self, *, raise_at=None):
        self.steps, self.raise_at = 0, raise_at

    def __enter__(self):
        self.handle = register_optimizer_step_pre_hook(self._count)
        return self

    def __exit__(self, *_):
        self.handle.remove()

    def _count(self, *_):
        if self.steps == self.raise_at:
            raise Interrupted
        self.steps += 1


class Interrupted(BaseException):
    """Comes from outside, like a signal: nothing in the loop may catch it."""


def configured(name, folder, *, data):
    """The trial of a policy in a folder."""
    return trial_config(folder, data=data, policy=POLICIES[name], budget_flops=BUDGETS[name])


class Trial(NamedTuple):
    """A trial that nothing disturbed."""

    name: str
    config: TrialConfig
    records: list[StageRecord | FinalRecord]
    steps: int


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data):
    """One trial for each policy."""
    found = {}
    for name in POLICIES:
        config = configured(name, tmp_path_factory.mktemp(name) / "trial", data=data)
        with StepCounter() as counter:
            records = run_to_end(config)
        found[name] = Trial(name, config, records, counter.steps)
    return found


@pytest.fixture(params=list(POLICIES))
def trial(request, undisturbed):
    """Each of them."""
    return undisturbed[request.param]


# --- what the trials are, so that the tests below test something ---------------------------------


def test_the_fixed_trial_grows_depth_width_and_data(undisturbed):
    records = undisturbed["fixed"].records
    steps = " ".join(word for r in records[:-1] for word in r.step)
    assert all(word in steps for word in ("depth@", "(jumpboard ", "width@", "stream@", "data@1.00"))
    assert [(r.depth, r.width, r.train_samples) for r in records[:-1]] == [(2, 16, 160), (3, 24, 160), (4, 36, 320)]
    assert not any(r.fallback for r in records[:-1])


def test_the_guided_trial_grows_where_a_certificate_says_so(undisturbed):
    records = undisturbed["signal"].records[:-1]
    for record, following in pairwise(records):
        useful = {c["site"] for c in record.certificates if c["verdict"] == "useful"}
        grown = {re.split(r"\.(?:grown|widened)\.", receipt["path"])[0] for receipt in following.receipts}
        assert grown <= useful
    assert any(record.receipts for record in records)


def test_the_block_that_was_scored_is_the_block_that_is_inserted(undisturbed):
    """Its inner weights are random, so only the same stream gives the same block; its projection has moved since."""
    _, config, records, _ = undisturbed["signal"]
    stages = Path(config.folder) / "stages"
    checked = 0
    for record in records[:-1]:
        for receipt in (r for r in record.receipts if r["kind"] == "insert"):
            site = receipt["path"].rpartition(".grown.")[0]
            looked_at = load_checkpoint(stages / f"{record.stage - 1:03d}").model
            scored = candidates(looked_at, sight_of(BY_SIGNAL), stage=record.stage - 1, seed=config.seed)
            block = next(c.block for c in scored if c.path == site)
            inserted = load_checkpoint(stages / f"{record.stage:03d}-jumpboard").model.get_submodule(receipt["path"])
            assert torch.equal(inserted.inner.weight, block.inner.weight)
            checked += 1
    assert checked


def test_a_trial_learns(undisturbed):
    first, *_, last, final = undisturbed["fixed"].records
    assert last.loss_train < first.loss_train < math.log(10)
    assert final.loss_test < math.log(10)


# --- one seed, one history ------------------------------------------------------------------------


def test_equal_configurations_give_equal_records(trial, data, tmp_path):
    again = run_to_end(configured(trial.name, tmp_path / "again", data=data))
    assert comparable(again) == comparable(trial.records)


def test_the_global_random_streams_do_not_matter(undisturbed, data, tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12345)
        again = run_to_end(trial_config(tmp_path / "again", data=data))
    assert comparable(again) == comparable(undisturbed["fixed"].records)


@pytest.mark.parametrize("seed", ["seed", "base_seed"])
def test_another_seed_gives_other_weights(undisturbed, data, tmp_path, seed):
    loop = run_trial(trial_config(tmp_path / "other", data=data, **{seed: 77}), ranks=Ranks())
    assert next(loop).digest != undisturbed["fixed"].records[0].digest


# --- interruptions --------------------------------------------------------------------------------


@pytest.mark.parametrize("stages_done", [1, 2, 3])
def test_a_trial_that_is_dropped_between_stages_goes_on_as_if_it_were_not(trial, data, tmp_path, stages_done):
    config = configured(trial.name, tmp_path / "trial", data=data)
    loop = run_trial(config, ranks=Ranks())
    for _ in range(stages_done):
        next(loop)
    loop.close()
    again = run_to_end(config)
    assert comparable(again) == comparable(trial.records)
    assert {r.attempt for r in again[:-1]} == {0}  # no stage was begun and lost


def interrupt_training(config, *, step):
    with StepCounter(raise_at=step), pytest.raises(Interrupted):
        run_to_end(config)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_trial_that_is_killed_while_training_goes_on_as_if_it_were_not(trial, data, tmp_path, share):
    config = configured(trial.name, tmp_path / "trial", data=data)
    interrupt_training(config, step=int(share * trial.steps))
    again = run_to_end(config)
    assert comparable(again) == comparable(trial.records)
    assert again[-2].attempt == 1


@pytest.fixture
def kept_always(monkeypatch):
    """Keep a stage that is under way before each of its steps but the first."""
    monkeypatch.setattr(stage, "EVERY_STEPS", 1)
    monkeypatch.setattr(stage, "HEARTBEAT_S", 0.0)


@pytest.mark.usefixtures("kept_always")
@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
def test_a_long_stage_goes_on_from_where_it_was_kept(trial, data, tmp_path, share):
    config = replace(configured(trial.name, tmp_path / "trial", data=data), checkpoint_s=0.0)
    killed_at = int(share * trial.steps)
    interrupt_training(config, step=killed_at)
    with StepCounter() as counter:
        again = run_to_end(config)
    assert comparable(again) == comparable(trial.records)
    assert counter.steps == trial.steps - killed_at  # not one step was done twice
    assert again[-1].flops_wasted == 0
    assert not list((tmp_path / "trial" / "stages").glob("*under-way"))


@pytest.mark.usefixtures("kept_always")
def test_only_what_came_after_the_stage_was_kept_is_lost(undisturbed, data, tmp_path, monkeypatch):
    config = replace(trial_config(tmp_path / "trial", data=data), checkpoint_s=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(stage, "EVERY_STEPS", 2)
        interrupt_training(config, step=3)
        again = run_to_end(config)
    assert comparable(again) == comparable(undisturbed["fixed"].records)
    assert again[-1].flops_wasted == batch_flops(config)


@pytest.mark.usefixtures("kept_always")
def test_a_kill_while_a_stage_is_kept_counts_what_was_told(undisturbed, data, tmp_path, monkeypatch):
    """What the older one holds is not lost, and what came after it is."""
    config, calls = replace(trial_config(tmp_path / "trial", data=data), checkpoint_s=0.0), []
    real = checkpoint.save_file

    def dying(*arguments):
        calls.append(arguments)
        if len(calls) == 5:  # weights and optimiser of the first two times: the third is not written
            raise Interrupted
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", dying)
        patch.setattr(stage, "HEARTBEAT_S", math.inf)
        with pytest.raises(Interrupted):
            run_to_end(config)
    again = run_to_end(config)
    assert comparable(again) == comparable(undisturbed["fixed"].records)
    assert again[-1].flops_wasted == batch_flops(config)


@pytest.mark.usefixtures("kept_always")
def test_a_stage_whose_beginning_is_damaged_starts_over(undisturbed, data, tmp_path):
    config = replace(trial_config(tmp_path / "trial", data=data), checkpoint_s=0.0)
    interrupt_training(config, step=first_steps(undisturbed) + 2)
    (tmp_path / "trial" / "stages" / "001-jumpboard" / "weights.safetensors").write_bytes(b"")
    assert comparable(run_to_end(config)) == comparable(undisturbed["fixed"].records)


def first_steps(undisturbed):
    """Optimiser steps of the first stage of the fixed trial."""
    first = undisturbed["fixed"].records[0]
    return round(first.targets_seen / undisturbed["fixed"].config.training["batch_size"])


@pytest.mark.usefixtures("kept_always")
def test_a_stage_is_not_kept_before_its_time(data, tmp_path):
    config = trial_config(tmp_path / "trial", data=data)
    interrupt_training(config, step=3)
    assert not list((tmp_path / "trial" / "stages").glob("*under-way"))


@pytest.mark.usefixtures("kept_always")
@pytest.mark.parametrize("harm", ["damaged", "of another stage"])
def test_what_was_kept_of_another_stage_or_is_damaged_is_not_used(undisturbed, data, tmp_path, harm):
    config = replace(trial_config(tmp_path / "trial", data=data), checkpoint_s=0.0)
    interrupt_training(config, step=3)
    (kept,) = (tmp_path / "trial" / "stages").glob("*under-way")
    if harm == "damaged":
        (kept / "weights.safetensors").write_bytes(b"")
    else:
        config = replace(config, training=config.training | {"weight_decay": 0.5})
    with StepCounter() as counter:
        again = run_to_end(config)
    assert (comparable(again) == comparable(undisturbed["fixed"].records)) is (harm == "damaged")
    assert counter.steps == undisturbed["fixed"].steps


# saves of the fixed trial: 000, 001-jumpboard, 001, 002-jumpboard, 002
@pytest.mark.parametrize("save", [0, 1, 2, 3, 4])
def test_a_trial_that_is_killed_while_saving_goes_on_as_if_it_were_not(undisturbed, data, tmp_path, monkeypatch, save):
    config, calls = trial_config(tmp_path / "trial", data=data), []
    real = checkpoint.save_file

    def dying(*arguments):
        calls.append(arguments)
        if len(calls) == 2 * save + 2:  # a checkpoint has two such files: the first is written, the second is not
            raise Interrupted
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", dying)
        with pytest.raises(Interrupted):
            run_to_end(config)
    assert comparable(run_to_end(config)) == comparable(undisturbed["fixed"].records)


def test_a_trial_goes_on_from_the_checkpoint_before_a_damaged_one(undisturbed, data, tmp_path, caplog):
    _, config, records, _ = undisturbed["fixed"]
    folder = tmp_path / "trial"
    shutil.copytree(config.folder, folder)
    (folder / "final.json").unlink()
    weights = folder / "stages" / "002" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    again = run_to_end(trial_config(folder, data=data))
    assert comparable(again) == comparable(records)
    assert "Going back to the checkpoint before" in caplog.text


def test_a_finished_trial_says_the_same_again_without_training(trial):
    with StepCounter() as counter:
        assert comparable(run_to_end(trial.config)) == comparable(trial.records)
    assert counter.steps == 0


@pytest.fixture
def beats_always(monkeypatch):
    """Say how far the stage is after every step, not every two seconds."""
    monkeypatch.setattr(stage, "HEARTBEAT_S", 0.0)


def batch_flops(config):
    """What one batch costs before anything has grown."""
    model = build(config.base["spec"], seed=0)
    return config.training["batch_size"] * flops_per_sample(model, torch.zeros(1, 1, 8, 8)).train


@pytest.mark.usefixtures("beats_always")
def test_work_that_is_lost_is_counted_outside_the_budget(undisturbed, data, tmp_path):
    config = trial_config(tmp_path / "trial", data=data)
    interrupt_training(config, step=3)
    again = run_to_end(config)
    assert (again[-1].flops_wasted, again[0].attempt) == (3 * batch_flops(config), 1)
    assert again[-1].budget == undisturbed["fixed"].records[-1].budget


@pytest.mark.usefixtures("beats_always")
def test_work_that_is_lost_twice_in_a_stage_is_counted_twice(data, tmp_path):
    config = trial_config(tmp_path / "trial", data=data)
    interrupt_training(config, step=3)
    interrupt_training(config, step=2)
    first = next(run_trial(config, ranks=Ranks()))
    assert (first.flops_wasted, first.attempt) == (5 * batch_flops(config), 2)


@pytest.mark.usefixtures("beats_always")
def test_work_that_is_lost_in_one_stage_is_not_counted_again_in_the_next(data, tmp_path):
    config = trial_config(tmp_path / "trial", data=data)
    interrupt_training(config, step=3)
    loop = run_trial(config, ranks=Ranks())
    next(loop)
    with StepCounter(raise_at=0), pytest.raises(Interrupted):
        next(loop)
    told = json.loads((tmp_path / "trial" / "progress.json").read_text())
    _, second, *_ = run_to_end(config)
    assert (second.flops_wasted, second.attempt) == (3 * batch_flops(config) + told["flops"], 2)


# --- several processes ----------------------------------------------------------------------------


def run_shared(rank, *, data, folder):
    """On each rank: both trials, and of two ranks the second goes its own way; leaves what it saw as JSON."""
    seen = {}
    for name in POLICIES:
        config = configured(name, Path(folder) / name, data=data)
        seen[name] = [r.comparable() for r in run_trial(config, ranks=Ranks())]
    if Ranks().world_size == 2:
        seen["stray training"] = stray_training(rank, data=data, folder=folder)
        seen["stray growth"] = stray_growth(rank, data=data, folder=folder)
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(seen))


def told(config):
    """The error with which a trial ends; an empty text where it ends well."""
    try:
        list(run_trial(config, ranks=Ranks()))
    except RankDisagreementError as error:
        return str(error)
    return ""


def stray_training(rank, *, data, folder):
    """Rank 1's weights are moved a little after each step of its own."""

    def move(optimizer, *_):
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].add_(1e-3)

    handle = register_optimizer_step_post_hook(move) if rank == 1 else None
    try:
        return told(trial_config(Path(folder) / "stray-training", data=data, num_stages=1, budget_flops=500_000_000))
    finally:
        if handle is not None:
            handle.remove()


def stray_growth(rank, *, data, folder):
    """Rank 1 draws the inner weights of the new block from another stream."""
    real = growing.stream_seed
    if rank == 1:
        growing.stream_seed = lambda seed, *purpose: real(seed + 1, *purpose)
    policy = FixedSteps(steps=((0, (AddBlock(site="groups.0.blocks.0"),)),))
    try:
        return told(trial_config(Path(folder) / "stray-growth", data=data, policy=policy, num_stages=2))
    finally:
        growing.stream_seed = real


@pytest.fixture(scope="module")
def shared(tmp_path_factory, data):
    """By number of ranks: what each rank saw."""
    found = {}
    for world_size in (2, 4):
        folder = tmp_path_factory.mktemp(f"ranks-{world_size}")
        run_on_ranks(partial(run_shared, data=data, folder=str(folder)), world_size=world_size, tmp_path=folder)
        found[world_size] = [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(world_size)]
    return found


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_several_ranks_give_the_records_and_weights_of_one(undisturbed, shared, policy, world_size):
    """Digests of the weights are among what is compared."""
    wanted = json.loads(json.dumps(comparable(undisturbed[policy].records)))
    for seen in shared[world_size]:
        assert seen[policy] == wanted


def test_a_rank_that_trains_other_weights_is_named(shared):
    for seen in shared[2]:
        assert seen["stray training"].startswith("rank 1 holds other weights than rank 0 after stage 0")


def test_a_rank_that_grows_other_weights_is_named(shared):
    for seen in shared[2]:
        assert seen["stray growth"].startswith("rank 1 holds other weights than rank 0 after growing for stage 1")


def test_a_number_of_shards_that_the_ranks_cannot_share_is_refused(data, tmp_path):
    ranks = Ranks()
    ranks.world_size = 3
    with pytest.raises(UserError, match="3 workers cannot share the 4 shards"):
        run_trial(trial_config(tmp_path / "trial", data=data), ranks=ranks).send(None)


# --- compute --------------------------------------------------------------------------------------


def test_the_account_balances_in_every_record(trial):
    _, config, records, _ = trial
    for record in records:
        budget = record.budget
        assert budget["total_flops"] == config.budget_flops
        assert budget["spent_flops"] + budget["reserved_flops"] + budget["free_flops"] == budget["total_flops"]
        assert min(budget.values()) >= 0
        assert record.flops_total == budget["spent_flops"]


def test_more_is_spent_in_each_stage_up_to_almost_all(trial):
    _, config, records, _ = trial
    spent = [r.flops_total for r in records]
    assert spent == sorted(set(spent))
    assert spent[-1] > 0.9 * config.budget_flops


def test_a_trial_that_only_trains_spends_its_batches_and_evaluations(data, tmp_path):
    config = trial_config(tmp_path / "trial", data=data, policy=NOTHING_GROWS, num_stages=2)
    with StepCounter() as counter:
        records = run_to_end(config)
    forward = flops_per_sample(build(config.base["spec"], seed=0), torch.zeros(1, 1, 8, 8)).forward
    evaluated = 2 * (160 + 96) + 96  # twice the training subset and validation, once test
    assert records[-1].flops_total == counter.steps * batch_flops(config) + evaluated * forward


def test_what_is_spent_is_what_torch_ran(undisturbed, data, tmp_path):
    with FlopCounter() as counter:
        *_, last, final = run_to_end(trial_config(tmp_path / "trial", data=data))
    forward = forward_flops(Path(tmp_path / "trial" / "stages" / f"{last.stage:03d}"))
    # free are two looks at up to 64 samples around each of 4 receipts, and counting one sample per network
    assert 0 <= counter.flops - final.flops_total <= 4 * 2 * 64 * forward
    assert final.flops_total == undisturbed["fixed"].records[-1].flops_total


def forward_flops(folder):
    """What one sample costs a stored network."""
    return flops_per_sample(load_checkpoint(folder).model, torch.zeros(1, 1, 8, 8)).forward


# too little for all that the schedule asks for, at several places
@pytest.mark.parametrize(
    ("policy", "budget_mflop"), [("fixed", 350), ("fixed", 600), ("fixed", 1000), ("signal", 900), ("signal", 1500)]
)
def test_a_small_budget_is_refused_at_once_or_ends_the_trial_in_order(data, tmp_path, policy, budget_mflop):
    total = budget_mflop * 1_000_000
    config = trial_config(tmp_path / "trial", data=data, policy=POLICIES[policy], budget_flops=total)
    records, refusal = [], ""
    try:
        records += run_trial(config, ranks=Ranks())
    except UserError as error:
        refusal = str(error)
    if refusal:
        assert "does not pay for one batch" in refusal
        assert not (tmp_path / "trial" / "stages").exists()  # nothing was spent on a trial that cannot end
        return
    *stages, last, final = records
    assert isinstance(final, FinalRecord)
    assert all(isinstance(r, StageRecord) for r in [*stages, last])
    assert final.budget["spent_flops"] <= total
    forward = forward_flops(tmp_path / "trial" / "stages" / f"{last.stage:03d}")
    lost = 0 if final.cause == "schedule" else final.flops_total - last.flops_total - 96 * forward
    assert final.flops_total - last.flops_total - lost == 96 * forward  # the test evaluation is paid in full
    assert lost >= 0  # and so is the stage that could not be finished


def test_a_batch_larger_than_the_subset_in_force_is_refused(data, tmp_path):
    with pytest.raises(UserError, match=r"training\.batch_size 32 is larger than the 16 training samples in force"):
        run_to_end(trial_config(tmp_path / "trial", data=data, data_share=0.05))


# --- the ledger -----------------------------------------------------------------------------------


def losses_of(folder, data, *, train_samples):
    """Loss on the training subset and on validation of a stored network, by plain torch."""
    model, splits = load_checkpoint(folder).model.eval(), open_splits(Path(data))
    with torch.no_grad():
        return [
            nn.functional.cross_entropy(model(inputs).double(), targets).item()
            for inputs, targets in (
                (splits.train.inputs[:train_samples], splits.train.targets[:train_samples]),
                splits.val,
            )
        ]


def test_every_ledger_is_that_of_the_stored_networks(trial, data):
    _, config, records, _ = trial
    stages = Path(config.folder) / "stages"
    grown = [r for r in records[:-1] if r.ledger is not None]
    assert grown
    for record in grown:
        names = {
            "old": f"{record.stage - 1:03d}",
            "jumpboard": f"{record.stage:03d}-jumpboard",
            "new": f"{record.stage:03d}",
        }
        for who, name in names.items():
            on_train, on_val = losses_of(stages / name, data, train_samples=record.train_samples)
            # float32 networks in batches of another size
            assert record.ledger[f"{who}_train"] == pytest.approx(on_train, abs=1e-6), (record.stage, who)
            assert record.ledger[f"{who}_val"] == pytest.approx(on_val, abs=1e-6), (record.stage, who)


def test_the_terms_of_every_ledger_add_up(trial):
    records = trial.records
    for ledger in (r.ledger for r in records[:-1] if r.ledger is not None):
        gained = ledger["old_val"] - ledger["new_val"]
        assert gained == pytest.approx(ledger["delta_r"] + ledger["delta_erm"] - ledger["gamma"], abs=1e-9)
        assert abs(ledger["residual"]) <= 1e-9
        assert ledger["delta_erm"] >= 0


def test_a_jumpboard_takes_its_direction_and_its_size_from_different_training_samples(undisturbed, data):
    """From even and from odd ones, of the first 64."""
    _, config, _, _ = undisturbed["fixed"]
    stages = Path(config.folder) / "stages"
    before, after = (load_checkpoint(stages / name).model for name in ("000", "001-jumpboard"))
    train = open_splits(Path(data)).train
    even, odd = ([(train.inputs[first:64:2], train.targets[first:64:2])] for first in (0, 1))
    change = GROWS_ALL.after(0)[0]
    block = new_block(before, change, stage=0, seed=config.seed)
    common = {"loss": loss_sum, "reduction": "sum"}
    direction, _ = clipped_direction(
        before,
        candidate=Candidate(path=change.site, block=block),
        batches=even,
        ridge=1e-3,
        mapper=Ranks().map,
        **common,
    )
    leap = jumpboard(before, site=change.site, block=block, direction=direction, batches=odd, **common)
    found = after.get_submodule(f"{change.site}.grown.0").project
    assert torch.equal(flatten_projection(found), torch.from_numpy(leap.matrix_DK).float())


def test_a_step_that_keeps_the_function_has_the_old_network_for_its_jumpboard(undisturbed):
    _, second, third = undisturbed["fixed"].records[:3]
    assert third.ledger["jumpboard_val"] == third.ledger["old_val"]
    assert third.ledger["jumpboard_train"] == third.ledger["old_train"]
    assert second.ledger["jumpboard_train"] < second.ledger["old_train"]  # the jumpboard step itself lowers the loss


def test_receipts_say_that_insertions_changed_nothing_and_jumpboards_something(trial):
    records = trial.records
    receipts = [receipt for r in records[:-1] for receipt in r.receipts]
    assert {r["output_change"] for r in receipts if r["kind"] in ("insert", "widen")} == {0.0}
    assert all(r["output_change"] > 0 for r in receipts if r["kind"] == "jumpboard")
    assert any(r["kind"] == "jumpboard" for r in receipts)


def test_a_jumpboard_step_and_a_data_step_after_the_same_stage_are_refused():
    changes = (AddBlock(site="groups.1.blocks.0", jumpboard=True), AddData(share=1.0))
    with pytest.raises(UserError, match="a jumpboard step, plain stacking. and a data step are both due after stage 0"):
        FixedSteps(steps=((0, changes),))
    with pytest.raises(UserError, match="after stage 2"):
        FixedSteps(steps=((2, changes[:1]), (2, changes[1:])))
    FixedSteps(steps=((0, changes[:1]), (1, changes[1:])))


# --- ends -----------------------------------------------------------------------------------------


def test_a_stop_from_outside_ends_the_trial_with_its_cause(undisturbed, data, tmp_path):
    config = trial_config(tmp_path / "trial", data=data)
    records = run_to_end(config, verdicts=[Stop(cause="pruned", reason="three times as high as the best")])
    assert [type(r) for r in records] == [StageRecord, FinalRecord]
    final = records[-1]
    assert (final.cause, final.reason, final.num_stages) == ("pruned", "three times as high as the best", 1)
    assert final.digest == undisturbed["fixed"].records[0].digest


def test_any_other_verdict_lets_the_trial_go_on(undisturbed, data, tmp_path):
    records = run_to_end(trial_config(tmp_path / "trial", data=data), verdicts=[TrainOn(reason="fine"), None])
    assert comparable(records) == comparable(undisturbed["fixed"].records)


def test_a_trial_that_was_stopped_from_outside_says_the_same_again(data, tmp_path):
    config = trial_config(tmp_path / "trial", data=data)
    records = run_to_end(config, verdicts=[Stop(cause="pruned", reason="too high")])
    assert comparable(run_to_end(config)) == comparable(records)


def test_a_stop_that_is_sent_again_while_old_records_are_repeated_ends_the_trial(undisturbed, data, tmp_path):
    config = trial_config(tmp_path / "trial", data=data)
    loop = run_trial(config, ranks=Ranks())
    next(loop)
    loop.close()
    records = run_to_end(config, verdicts=[Stop(cause="pruned", reason="too high")])
    assert (records[-1].cause, records[-1].num_stages) == ("pruned", 1)


def test_the_last_record_says_what_the_last_checkpoint_holds(trial):
    _, config, records, _ = trial
    found = load_checkpoint(Path(config.folder) / "stages" / "002")
    assert found.history[-1] == records[-2].to_dict()
    assert records[-1].digest == records[-2].digest
    assert (records[-1].cause, records[-1].num_stages) == ("schedule", 3)


def test_training_that_ends_above_the_jumpboard_is_undone(data, tmp_path):
    config = trial_config(tmp_path / "trial", data=data, num_stages=2, learning_rate=0.01)
    first = next(run_trial(config, ranks=Ranks()))
    wild = trial_config(tmp_path / "trial", data=data, num_stages=2, learning_rate=5.0)  # goes on from there
    _, record, final = run_to_end(wild)
    stages = Path(config.folder) / "stages"
    jumpboard, new = (load_checkpoint(stages / name) for name in ("001-jumpboard", "001"))
    assert record.fallback
    assert same(dict(new.model.state_dict()), dict(jumpboard.model.state_dict()))
    assert record.loss_train == record.ledger["jumpboard_train"] < first.loss_train
    assert record.loss_val == record.ledger["jumpboard_val"]
    assert (record.ledger["delta_erm"], record.ledger["fallback"]) == (0.0, True)
    assert final.digest == record.digest


def test_training_that_ends_above_the_stage_before_is_undone_and_goes_on_at_half_the_rate(data, tmp_path):
    arguments = {"data": data, "policy": NOTHING_GROWS, "num_stages": 3}
    first = next(run_trial(trial_config(tmp_path / "trial", **arguments), ranks=Ranks()))
    rates = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    loop = run_trial(trial_config(tmp_path / "trial", learning_rate=5.0, **arguments), ranks=Ranks())
    _, second = next(loop), next(loop)
    first_rates, rates = rates, []
    third = next(loop)
    handle.remove()
    assert (second.fallback, second.digest, second.loss_train) == (True, first.digest, first.loss_train)
    assert third.fallback
    assert max(first_rates) == pytest.approx(5.0, rel=0.05)  # a stage of a few steps may step over its peak
    assert max(rates) == pytest.approx(2.5, rel=0.05)
    stages = Path(tmp_path / "trial" / "stages")
    assert [load_checkpoint(stages / n).streams["rate_scale"] for n in ("000", "001", "002")] == [1.0, 0.5, 0.25]
    assert load_checkpoint(stages / "001").optimizer_state == {}  # it failed, so it starts anew


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 1e4), ("sgd", 1e30), ("adamw", 1e30)])
def test_a_diverging_trial_ends_in_order(data, tmp_path, optimizer, rate):
    records = run_to_end(trial_config(tmp_path / "trial", data=data, optimizer=optimizer, learning_rate=rate))
    final = records[-1]
    assert final.cause in ("diverged", "schedule")
    assert final.cause == "diverged" or all(r.fallback for r in records[1:-1])
    assert all(math.isfinite(r.loss_val) and math.isfinite(r.loss_train) for r in records[:-1])
    assert final.budget["spent_flops"] <= final.budget["total_flops"]


def with_a_number_missing(data, target, *, sample):
    """The same data with one training sample that is not a number."""
    shutil.copytree(data, target)
    with np.load(target / "data.npz") as arrays:
        changed = dict(arrays)
    changed["train_inputs"] = changed["train_inputs"].astype(np.float32)
    changed["train_inputs"][sample] = np.nan
    np.savez(target / "data.npz", **changed)
    return str(target)


def test_a_trial_that_diverges_at_once_ends_with_its_first_network(data, tmp_path):
    config = trial_config(tmp_path / "trial", data=with_a_number_missing(data, tmp_path / "data", sample=7))
    (final,) = run_to_end(config)
    assert (final.cause, final.num_stages) == ("diverged", 0)
    assert "was not finite" in final.reason or "is not finite" in final.reason
    model = build(config.base["spec"], seed=config.base["seed"])
    assert weights_digest(model) == final.digest


def test_a_trial_that_diverges_later_ends_with_the_network_before(undisturbed, data, tmp_path):
    """Sample 250 comes in with the data step after the second stage."""
    data = with_a_number_missing(data, tmp_path / "data", sample=250)
    records = run_to_end(trial_config(tmp_path / "trial", data=data))
    assert comparable(records[:-1]) == comparable(undisturbed["fixed"].records[:2])
    final = records[-1]
    assert (final.cause, final.num_stages) == ("diverged", 2)
    assert final.digest == records[1].digest
    assert math.isfinite(final.loss_test)
    assert final.flops_total > records[1].flops_total  # what the lost stage cost is paid


@pytest.mark.parametrize("batches", [1, 3])
def test_a_stage_that_diverges_is_paid_for(data, tmp_path, batches):
    """All gradients of the first step are finite; the weights after it are not."""
    config = trial_config(
        tmp_path / "trial", data=data, policy=NOTHING_GROWS, num_stages=1, optimizer="sgd", learning_rate=1e38,
        warmup_share=0.0,
    )  # fmt: skip
    forward = flops_per_sample(build(config.base["spec"], seed=0), torch.zeros(1, 1, 8, 8)).forward
    evaluations = forward * (160 + 96 + 96)
    config = replace(config, budget_flops=evaluations + batches * batch_flops(config))
    with StepCounter() as counter:
        (final,) = run_to_end(config)
    assert (final.cause, counter.steps) == ("diverged", 1)
    assert final.flops_total >= 96 * forward + batch_flops(config)


def test_a_trial_that_diverged_says_the_same_again(data, tmp_path):
    config = trial_config(tmp_path / "trial", data=with_a_number_missing(data, tmp_path / "data", sample=250))
    records = run_to_end(config)
    assert comparable(run_to_end(config)) == comparable(records)


def test_the_configuration_is_kept_beside_the_checkpoints(trial):
    config = trial.config
    assert json.loads((Path(config.folder) / "trial.json").read_text()) == json.loads(json.dumps(config.to_dict()))


# --- what warms up again --------------------------------------------------------------------------


@pytest.mark.parametrize("rewarm", ["new", "none"])
def test_a_trial_may_warm_up_in_another_way_after_growing(undisturbed, data, tmp_path, rewarm):
    """The first stage always warms up and is the same; later ones are not, and repeat exactly."""
    config = trial_config(tmp_path / "one", data=data, rewarm=rewarm)
    records = run_to_end(config)
    whole = undisturbed["fixed"].records
    assert records[0].comparable() == whole[0].comparable()
    assert records[1].loss_val != whole[1].loss_val
    again = run_to_end(trial_config(tmp_path / "two", data=data, rewarm=rewarm))
    assert comparable(again) == comparable(records)
    if rewarm == "new":
        none = run_to_end(trial_config(tmp_path / "three", data=data, rewarm="none"))
        assert none[1].loss_val != records[1].loss_val


def test_a_trial_on_augmented_images_repeats_exactly_and_is_another_one(undisturbed, data, tmp_path):
    one, two = (run_to_end(trial_config(tmp_path / n, data=data, augment="crop_flip")) for n in ("one", "two"))
    assert comparable(one) == comparable(two)
    assert one[0].loss_train != undisturbed["fixed"].records[0].loss_train
