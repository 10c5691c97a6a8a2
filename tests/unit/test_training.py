"""The parts of training: order of data, learning rate, sums over shards, checkpoints."""

import json
import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch_helpers import (
    FAMILY_BLOCKS,
    FAMILY_SITES,
    FAMILY_SPECS,
    family,
    family_data,
    generator,
    normal,
    same,
    trial_config,
)

from growth_service.core.policies import Sight
from growth_service.core.rates import Window, rate_share
from growth_service.core.steps import AddBlock, AddUnits
from growth_service.core.streams import stream_seed
from growth_service.errors import CheckpointError, RankDisagreementError, SiteError, UserError
from growth_service.growth import growth_log, insert_block, widen
from growth_service.training.augment import augmented, check_augmentable
from growth_service.training.batches import DataPosition, next_indices, shards_of
from growth_service.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    newest,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from growth_service.training.config import TrialConfig
from growth_service.training.data import Split
from growth_service.training.evaluate import evaluate, loss_sum
from growth_service.training.gradients import ShardedGradients
from growth_service.training.growing import candidates, new_block, new_branch
from growth_service.training.optimizer import (
    Rates,
    fresh_parameters,
    make_optimizer,
    set_learning_rate,
    stage_rates,
)
from growth_service.training.ranks import Ranks, check_world, tree_sum, weights_digest

# --- batches --------------------------------------------------------------------------------------


def passes(*, subset, batch_size, num, seed=0):
    """The first ``num`` batches and their passes."""
    position, found = DataPosition(), []
    for _ in range(num):
        indices, position = next_indices(position, subset=subset, batch_size=batch_size, seed=seed)
        found.append((position.epoch, indices.tolist()))
    return found


def test_a_pass_takes_every_sample_once():
    batches = passes(subset=40, batch_size=8, num=10)
    for epoch in (0, 1):
        assert sorted(i for e, batch in batches if e == epoch for i in batch) == list(range(40))


def test_a_batch_never_crosses_passes():
    batches = passes(subset=20, batch_size=8, num=6)
    assert [e for e, _ in batches] == [0, 0, 1, 1, 2, 2]
    for epoch in range(3):
        seen = [i for e, batch in batches if e == epoch for i in batch]
        assert len(set(seen)) == len(seen) == 16


def test_the_next_batch_is_a_function_of_its_arguments():
    position = DataPosition(epoch=3, offset=8)
    first, second = (next_indices(position, subset=40, batch_size=8, seed=5) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1] == DataPosition(epoch=3, offset=16)
    assert torch.equal(next_indices(position, subset=40, batch_size=8, seed=5)[0], first[0])


def test_passes_differ():
    batches = passes(subset=32, batch_size=32, num=3)
    assert len({tuple(batch) for _, batch in batches}) == 3


def test_seeds_differ():
    assert passes(subset=32, batch_size=32, num=1, seed=1) != passes(subset=32, batch_size=32, num=1, seed=2)


def test_the_order_of_a_pass_is_the_stream_that_its_seed_names():
    """The position in the data needs no stored generator: pass 2 of a subset of 24 is this permutation."""
    indices, _ = next_indices(DataPosition(epoch=2), subset=24, batch_size=24, seed=9)
    assert indices.tolist() == np.random.default_rng(stream_seed(9, "epoch", 2, 24)).permutation(24).tolist()


def test_batches_stay_within_the_subset_in_force():
    assert max(i for _, batch in passes(subset=24, batch_size=8, num=9) for i in batch) == 23


def test_shards_are_the_batch_in_order():
    split = Split(normal(50, 3), torch.arange(50))
    indices = torch.tensor([5, 3, 40, 41, 2, 0, 7, 8])
    shards = shards_of(split, indices, num_shards=4)
    assert [targets.tolist() for _, targets in shards] == [[5, 3], [40, 41], [2, 0], [7, 8]]
    assert torch.equal(torch.cat([inputs for inputs, _ in shards]), split.inputs[indices])


# --- augmentation ---------------------------------------------------------------------------------


def numbered_shards(*, num=64, side=8):
    """Images whose pixels are their places, in two shards."""
    image = torch.arange(float(side * side)).reshape(1, 1, side, side).expand(num, 3, side, side)
    return [(image[: num // 2], torch.arange(num // 2)), (image[num // 2 :], torch.arange(num // 2, num))]


def test_augmented_images_are_shifted_and_half_of_them_flipped():
    position = DataPosition(epoch=1, offset=64)
    shards = augmented(numbered_shards(), "crop_flip", seed=3, position=position)
    seen = set()
    for images, _ in shards:
        assert images.shape[1:] == (3, 8, 8)
        for image in images[:, 0]:
            middle = image[2:6, 2:6]  # away from the padded border
            flipped = bool(middle[0, 1] < middle[0, 0])
            plain = middle.flip(1) if flipped else middle
            assert torch.equal(plain[0, 1:] - plain[0, :-1], torch.ones(3))
            assert torch.equal(plain[1:, 0] - plain[:-1, 0], torch.full((3,), 8.0))
            seen.add((flipped, int(plain[0, 0])))
    assert {flipped for flipped, _ in seen} == {True, False}
    assert len({origin for _, origin in seen}) > 5
    assert [t.tolist() for _, t in shards] == [list(range(32)), list(range(32, 64))]


def test_augmentation_depends_on_seed_place_and_shard_alone():
    def once(**kwargs):
        given = {"seed": 3, "position": DataPosition(epoch=1, offset=64)} | kwargs
        return torch.cat([x for x, _ in augmented(numbered_shards(), "crop_flip", **given)])

    assert torch.equal(once(), once())
    assert not torch.equal(once(), once(seed=4))
    assert not torch.equal(once(), once(position=DataPosition(epoch=2, offset=64)))
    first, second = once().chunk(2)
    assert not torch.equal(first, second)
    shards = numbered_shards()
    assert augmented(shards, "none", seed=0, position=DataPosition()) is shards


def test_augmentation_is_for_images():
    with pytest.raises(UserError, match=r"for images \[C, H, W\]: samples have shape \[16\]"):
        check_augmentable("crop_flip", [16])
    check_augmentable("none", [16])
    check_augmentable("crop_flip", [3, 8, 8])


WHOLE = Window(0.0, 1.0)


# --- learning rate --------------------------------------------------------------------------------


def test_the_rate_of_all_groups_is_set():
    optimizer = make_optimizer(family("mlp"), settings("sgd"))
    set_learning_rate(optimizer, Rates(old=0.123, fresh=9.0))
    assert [g["lr"] for g in optimizer.param_groups] == [0.123, 0.123]


@pytest.mark.parametrize(
    ("rewarm", "first", "old", "fresh"),
    [
        ("whole", True, "warm", "warm"),
        ("whole", False, "warm", "warm"),
        ("new", True, "warm", "warm"),
        ("new", False, "steady", "warm"),
        ("none", True, "warm", "warm"),
        ("none", False, "steady", "steady"),
    ],
)
def test_what_warms_up_again_is_the_policys_choice(rewarm, first, old, fresh):
    given = {"learning_rate": 0.5, "warmup_share": 0.2, "floor_share": 0.1, "rewarm": rewarm}
    for progress in (0.0, 0.1, 0.7):
        rates = {
            name: rate_share(
                progress, shape="restarts", window=WHOLE, warmup_share=0.2, floor_share=0.1, decay_share=0.2,
                warm=name == "warm",
            )
            for name in ("warm", "steady")
        }  # fmt: skip
        assert stage_rates(progress, given, first=first, window=WHOLE, scale=2.0) == (rates[old], rates[fresh])


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_new_parameters_step_at_their_own_rate_and_come_home(kind):
    model = family("mlp")
    optimizer = make_optimizer(model, settings(kind))
    receipt = insert_block(model, site="groups.0.entry", generator=generator(), optimizer=optimizer)
    fresh = [p for n, p in model.named_parameters() if n in receipt.parameters]
    before = [list(g["params"]) for g in optimizer.param_groups]
    inputs, targets = family_data("mlp")
    nn.functional.cross_entropy(model(inputs), targets).backward()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    with fresh_parameters(optimizer, fresh):
        set_learning_rate(optimizer, Rates(old=0.0, fresh=0.1))
        optimizer.step()
        held = [p for g in optimizer.param_groups for p in g["params"]]
        assert len(held) == len(set(held)) == len(list(model.parameters()))
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, weights[n])}
    decayed = {n for n in receipt.parameters if n.endswith("inner.weight")}  # by weight decay, not by a gradient
    assert moved == {n for n in receipt.parameters if ".project." in n} | decayed
    assert [set(g["params"]) for g in optimizer.param_groups] == [set(g) for g in before]
    assert len(optimizer.param_groups) == 2


def settings(optimizer):
    return {"optimizer": optimizer, "learning_rate": 0.01, "momentum": 0.9, "weight_decay": 0.05}


def test_an_unknown_optimizer_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="unknown optimizer 'lion': use sgd or adamw"):
        make_optimizer(family("mlp"), settings("lion"))


# --- sums over shards and ranks -------------------------------------------------------------------


def uneven_terms(num):
    """Terms over eight decades: every order of adding them rounds in its own way."""
    return [normal(200, seed=i) * 10.0 ** (normal(200, seed=50 + i) * 2) for i in range(num)]


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 8, 16])
def test_the_tree_sums_all_terms(num):
    terms = uneven_terms(num)
    wanted = torch.stack([t.double() for t in terms]).sum(dim=0)
    scale = torch.stack([t.abs() for t in terms]).sum(dim=0)
    # at most log2(16) = 4 roundings of 6e-8 on numbers no larger than the sum of sizes
    assert float(((tree_sum(terms) - wanted).abs() / scale).max()) < 4 * 6e-8


@pytest.mark.parametrize("num", [4, 8, 16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_tree_does_not_depend_on_how_ranks_share_the_terms(num, ranks):
    terms = uneven_terms(num)
    size = num // ranks
    parts = [tree_sum(terms[r * size : (r + 1) * size]) for r in range(ranks)]
    assert torch.equal(tree_sum(parts), tree_sum(terms))
    assert not torch.equal(sum(terms[1:], start=terms[0]), tree_sum(terms))  # one after the other differs: a sharp test


def plain_gradients(model, inputs, targets):
    found = torch.autograd.grad(nn.functional.cross_entropy(model(inputs), targets), list(model.parameters()))
    return dict(zip((n for n, _ in model.named_parameters()), found, strict=True))


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("name", list(FAMILY_SPECS))
def test_sharded_gradients_are_the_gradient_of_the_mean_loss(name, num_shards):
    model = family(name, dtype=torch.float64)
    inputs, targets = family_data(name, num=30, dtype=torch.float64)  # 4 shards: 8, 8, 8 and 6 samples
    shards = list(zip(inputs.chunk(num_shards), targets.chunk(num_shards), strict=True))
    loss = ShardedGradients(model, ranks=Ranks(), num_shards=num_shards).backward(shards, loss_sum)
    wanted = plain_gradients(model, inputs, targets)
    for key, parameter in model.named_parameters():
        # float64 sums of 30 terms in another order
        torch.testing.assert_close(parameter.grad, wanted[key], rtol=1e-12, atol=1e-15, msg=key)
    assert loss == pytest.approx(nn.functional.cross_entropy(model(inputs), targets).item(), rel=1e-12)


def test_gradients_of_a_second_batch_replace_those_of_the_first():
    model = family("mlp", dtype=torch.float64)
    gradients = ShardedGradients(model, ranks=Ranks(), num_shards=2)
    for seed in (1, 2):
        inputs, targets = family_data("mlp", seed=seed, dtype=torch.float64)
        gradients.backward(list(zip(inputs.chunk(2), targets.chunk(2), strict=True)), loss_sum)
    wanted = plain_gradients(model, inputs, targets)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[key], rtol=1e-12, atol=1e-15, msg=key)


@pytest.mark.parametrize("name", list(FAMILY_SPECS))
def test_half_precision_changes_the_passes_and_neither_weights_nor_gradients_types(name):
    model = family(name)
    inputs, targets = family_data(name, num=32)
    gradients = ShardedGradients(model, ranks=Ranks(), num_shards=1, precision="bf16")
    gradients.backward([(inputs, targets)], loss_sum)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(inputs)
    loss = loss_sum(outputs.float(), targets) / len(targets)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    plain = plain_gradients(model, inputs, targets)
    for (key, parameter), half in zip(model.named_parameters(), wanted, strict=True):
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, half), key
    assert any(not torch.equal(p.grad, plain[key]) for key, p in model.named_parameters())


def test_parameters_added_since_get_gradients_after_a_rewrap():
    model = family("mlp", dtype=torch.float64)
    gradients = ShardedGradients(model, ranks=Ranks(), num_shards=2)
    insert_block(model, site="groups.0.entry", generator=generator())
    gradients.rewrap()
    inputs, targets = family_data("mlp", dtype=torch.float64)
    gradients.backward(list(zip(inputs.chunk(2), targets.chunk(2), strict=True)), loss_sum)
    assert model.get_parameter("groups.0.entry.grown.0.project.weight").grad.any()


@pytest.mark.parametrize(("world_size", "num_shards"), [(1, 1), (1, 3), (2, 4), (4, 4), (2, 2), (4, 8)])
def test_a_number_of_workers_that_shares_the_shards_evenly_is_taken(world_size, num_shards):
    check_world(world_size, num_shards=num_shards)


@pytest.mark.parametrize(("world_size", "num_shards"), [(3, 4), (3, 3), (8, 4), (2, 1)])
def test_a_number_of_workers_that_breaks_the_tree_is_refused(world_size, num_shards):
    with pytest.raises(UserError, match=f"{world_size} workers cannot share the {num_shards} shards.*training.shards"):
        check_world(world_size, num_shards=num_shards)


def test_one_rank_agrees_with_itself():
    Ranks().agree("abc", what="now")


def test_a_rank_that_disagrees_is_named(monkeypatch):
    ranks = Ranks()
    monkeypatch.setattr(ranks, "map", lambda _function, _items: ["aaaa", "aaaa", "bbbb"])
    with pytest.raises(RankDisagreementError, match=r"rank 2 holds other weights than rank 0 after stage 1 \(bbbb aga"):
        ranks.agree("aaaa", what="after stage 1")


def test_the_digest_of_weights_sees_every_bit_and_every_name():
    model = family("mlp")
    digest = weights_digest(model)
    with torch.no_grad():
        model.get_parameter("head.bias")[2] = 1e-45
    assert weights_digest(model) != digest
    assert weights_digest(nn.Sequential(nn.Linear(1, 1))) != weights_digest(nn.ModuleDict({"1": nn.Linear(1, 1)}))


# --- candidates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [("depth",), ("width",), ("depth", "width", "data")])
def test_candidates_are_new_blocks_at_every_site_and_new_units_in_every_block_that_may_grow(axes):
    found = candidates(family("resnet"), Sight(axes=axes, units=4), stage=0, seed=0)
    wanted = [("depth", site) for site in FAMILY_SITES["resnet"]] if "depth" in axes else []
    wanted += [("width", block) for block in FAMILY_BLOCKS["resnet"]] if "width" in axes else []
    assert [(c.kind, c.path) for c in found] == wanted


def test_a_policy_that_grows_data_alone_looks_at_depth():
    found = candidates(family("resnet"), Sight(axes=("data",)), stage=0, seed=0)
    assert [(c.kind, c.path) for c in found] == [("depth", site) for site in FAMILY_SITES["resnet"]]


def test_a_step_at_a_module_that_is_no_site_is_refused():
    with pytest.raises(SiteError, match="head"):
        new_block(family("mlp"), AddBlock(site="head"), stage=0, seed=0)


def test_units_for_a_module_that_is_no_block_are_refused():
    with pytest.raises(SiteError, match="head"):
        new_branch(family("mlp"), AddUnits(block="head", units=2), stage=0, seed=0)


def test_copied_inner_weights_are_those_of_the_block_that_reads_the_stream():
    model = family("mlp")
    found = candidates(model, Sight(axes=("depth",), inner="copy"), stage=0, seed=0)
    for candidate, near in zip(found, (0, 1, 1), strict=True):  # behind the last block: the last one
        block = model.get_submodule(f"groups.0.blocks.{near}.branch")
        assert torch.equal(candidate.block.inner.weight, block.inner.weight)
        assert candidate.block.is_zero
    assert [c.shared for c in found] == ["groups.0.blocks.0.branch", "groups.0.blocks.1.branch", None]


@pytest.mark.parametrize("change", [{"stage": 1}, {"seed": 1}])
def test_random_inner_weights_are_new_in_each_stage_and_for_each_seed(change):
    policy = Sight(axes=("depth",))
    (first, *_), (other, *_), (again, *_) = (
        candidates(family("mlp"), policy, **{"stage": 0, "seed": 0} | c) for c in ({}, change, {})
    )
    assert torch.equal(first.block.inner.weight, again.block.inner.weight)
    assert not torch.equal(first.block.inner.weight, other.block.inner.weight)


def test_random_inner_weights_differ_from_site_to_site():
    found = candidates(family("mlp"), Sight(axes=("depth",)), stage=0, seed=0)
    assert len({tuple(c.block.inner.weight.flatten().tolist()) for c in found}) == len(found)


# --- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 100, 300])
def test_an_evaluation_is_the_mean_over_the_samples(limit):
    model = family("mlp")
    inputs, targets = family_data("mlp", num=600)
    found = evaluate(model, Split(inputs, targets), ranks=Ranks(), limit=limit)
    logits, wanted = model(inputs[:limit]).double(), targets[:limit]
    assert found.loss == pytest.approx(nn.functional.cross_entropy(logits, wanted).item(), rel=1e-12)
    assert found.accuracy == (logits.argmax(dim=1) == wanted).double().mean().item()


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_looks_in_eval_mode_and_puts_the_mode_back(training):
    class Loud(nn.Module):
        def forward(self, x):
            assert not self.training
            return x

    model = nn.Sequential(Loud()).train(training)
    evaluate(model, Split(normal(5, 3), torch.zeros(5, dtype=torch.long)), ranks=Ranks())
    assert model.training == training


# --- checkpoints ----------------------------------------------------------------------------------


def grown_trial(optimizer="adamw", *, steps=3):
    """A grown network with an optimiser that has seen some steps: what a stage leaves behind."""
    model = family("resnet")
    made = make_optimizer(model, settings(optimizer))
    train(model, made, steps=steps)
    insert_block(model, site="groups.0.entry", generator=generator(1), optimizer=made)
    widen(model, site="groups.1.blocks.0.branch", units=4, generator=generator(2), optimizer=made)
    train(model, made, steps=steps)
    return model, made


def train(model, optimizer, *, steps):
    inputs, targets = family_data("resnet")
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def checkpoint_of(model, optimizer, **changes):
    fields = {
        "model": model,
        "base": {"spec": FAMILY_SPECS["resnet"], "seed": 3},
        "optimizer_state": optimizer_tensors(optimizer, model),
        "streams": {"position": {"epoch": 2, "offset": 64}, "data_share": 0.5},
        "history": [{"stage": 0, "loss_val": 1.25}],
    }
    return Checkpoint(**fields | changes)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint on disk, and what was saved."""
    model, optimizer = grown_trial()
    folder = tmp_path / "stages" / "001"
    save_checkpoint(folder, checkpoint_of(model, optimizer))
    return folder, model, optimizer


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_checkpoint_gives_back_every_bit(tmp_path, kind):
    model, optimizer = grown_trial(kind)
    save_checkpoint(tmp_path / "000", checkpoint_of(model, optimizer))
    found = load_checkpoint(tmp_path / "000")
    assert same(dict(found.model.state_dict()), dict(model.state_dict()))
    assert growth_log(found.model) == growth_log(model)
    wanted = optimizer_tensors(optimizer, model)
    assert same(dict(sorted(found.optimizer_state.items())), dict(sorted(wanted.items())))
    assert (found.base, found.streams, found.history) == (
        {"spec": FAMILY_SPECS["resnet"], "seed": 3},
        {"position": {"epoch": 2, "offset": 64}, "data_share": 0.5},
        [{"stage": 0, "loss_val": 1.25}],
    )


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path, kind):
    model, optimizer = grown_trial(kind)
    save_checkpoint(tmp_path / "000", checkpoint_of(model, optimizer))
    found = load_checkpoint(tmp_path / "000")
    again = make_optimizer(found.model, settings(kind))
    restore_optimizer(again, found.model, found.optimizer_state)
    train(model, optimizer, steps=3)
    train(found.model, again, steps=3)
    assert same(dict(found.model.state_dict()), dict(model.state_dict()))


def test_optimizer_state_is_kept_by_the_name_of_its_parameter():
    model, optimizer = grown_trial("adamw")
    tensors = optimizer_tensors(optimizer, model)
    assert {k.rpartition("/")[0] for k in tensors} == {n for n, _ in model.named_parameters()}
    weight = model.get_parameter("groups.0.entry.grown.0.project.weight")
    assert torch.equal(tensors["groups.0.entry.grown.0.project.weight/exp_avg"], optimizer.state[weight]["exp_avg"])
    assert float(tensors["groups.0.entry.grown.0.project.weight/step"]) == 3.0
    assert float(tensors["head.weight/step"]) == 6.0


def test_optimizer_state_of_a_parameter_that_is_gone_is_refused():
    model, optimizer = grown_trial()
    with pytest.raises(CheckpointError, match=r"'groups\.0\.entry\.grown\.0\.[a-z.]+' has no parameter"):
        restore_optimizer(
            make_optimizer(family("resnet"), settings("adamw")), family("resnet"), optimizer_tensors(optimizer, model)
        )


def test_a_kill_while_saving_leaves_nothing_that_is_taken_for_a_checkpoint(saved):
    folder, model, optimizer = saved
    partial = folder.with_name(".002.partial")
    partial.mkdir()
    (partial / "weights.safetensors").write_bytes(b"half")
    assert len(newest(folder.parent).history) == 1
    save_checkpoint(folder.with_name("002"), checkpoint_of(model, optimizer, history=[{}, {}]))
    assert len(newest(folder.parent).history) == 2


def test_the_newest_checkpoint_is_that_of_the_last_stage_not_a_jumpboard(saved):
    folder, model, optimizer = saved
    for name, history in {"000": [], "010": [{}] * 10, "002": [{}, {}], "011-jumpboard": [{}] * 11}.items():
        save_checkpoint(folder.with_name(name), checkpoint_of(model, optimizer, history=history))
    assert len(newest(folder.parent).history) == 10


def test_a_trial_without_checkpoints_has_no_newest_one(tmp_path):
    assert newest(tmp_path / "stages") is None


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-20])


def edit_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES = {
    "a flipped bit in the weights": (
        lambda folder: flip_a_bit(folder / "weights.safetensors"), r"weights\.safetensors is damaged or missing",
    ),
    "a flipped bit in the optimiser": (
        lambda folder: flip_a_bit(folder / "optimizer.safetensors"), r"optimizer\.safetensors is damaged or missing",
    ),
    "a missing file": (lambda folder: (folder / "streams.json").unlink(), r"streams\.json is damaged or missing"),
    "a cut-off manifest": (lambda folder: cut_off(folder / "manifest.json"), "is no complete checkpoint: its manifest"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "is no complete checkpoint: its manifest"),
    "a later format": (lambda folder: edit_manifest(folder, format_version=4), "format 4, this version reads 1, 2, 3: update"),
    "another log": (lambda folder: edit_manifest(folder, growth_log=[]), "do not fit its growth log"),
    "an empty manifest": (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest"),
    "a manifest without hashes": (lambda folder: edit_manifest(folder, sha256=None), "manifest"),
    "a log of another network": (
        lambda folder: edit_manifest(
            folder,
            growth_log=[
                {"kind": "insert", "path": "stem.grown.0", "block": {"type": "mlp", "width": 4, "hidden": 4},
                 "parameters": [], "parameters_added": 0, "output_change": None}
            ],
        ),
        "growth log",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_checkpoint_is_refused(saved, damage):
    folder, _, _ = saved
    break_it, text = DAMAGES[damage]
    break_it(folder)
    with pytest.raises(CheckpointError, match=text):
        load_checkpoint(folder)


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(saved, damage, caplog):
    folder, model, optimizer = saved
    save_checkpoint(folder.with_name("002"), checkpoint_of(model, optimizer, history=[{}, {}]))
    DAMAGES[damage][0](folder.with_name("002"))
    with caplog.at_level(logging.WARNING):
        found = newest(folder.parent)
    assert len(found.history) == 1
    assert "Going back to the checkpoint before" in caplog.text


def test_where_all_checkpoints_are_damaged_there_is_none(saved, caplog):
    folder, _, _ = saved
    flip_a_bit(folder / "weights.safetensors")
    assert newest(folder.parent) is None
    assert str(folder) in caplog.text


# --- configuration --------------------------------------------------------------------------------


def test_a_trial_configuration_survives_json(tmp_path):
    config = trial_config(tmp_path, data="somewhere")
    assert TrialConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_trial_configuration_of_another_version_is_refused(tmp_path):
    data = trial_config(tmp_path, data="somewhere").to_dict() | {"version": 7}
    with pytest.raises(ValueError, match="version 7, this code reads 1"):
        TrialConfig.from_dict(data)
