"""The parts of training: data and its order, learning rate, sums over shards, checkpoints."""

import gzip
import hashlib
import json
import logging
import math

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

from growth_service.core.schedule import AddBlock, AddUnits, SignalGuided
from growth_service.core.streams import stream_seed
from growth_service.errors import CheckpointError, DataNotFoundError, RankDisagreementError, SiteError, UserError
from growth_service.growth import growth_log, insert_block, widen
from growth_service.training import datasets
from growth_service.training.batches import DataPosition, chunks_of, next_indices, shards_of
from growth_service.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    newest,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from growth_service.training.config import TrialConfig
from growth_service.training.data import Split, open_splits, subset_size
from growth_service.training.datasets import prepare
from growth_service.training.evaluate import evaluate, loss_sum
from growth_service.training.gradients import ShardedGradients
from growth_service.training.growing import candidates, new_block, new_branch
from growth_service.training.optimizer import learning_rate, make_optimizer, set_learning_rate
from growth_service.training.ranks import Ranks, check_world, tree_sum, weights_digest

# --- data sets ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The prepared digits: their folder and description."""
    target = tmp_path_factory.mktemp("digits")
    return target, prepare("digits", folder=None, seed=0, target=target)


def numbered_images(num, *, classes=4, test=0):
    """A set in which every image is its own number, so that a test can tell where it went."""

    def images(start, count):
        numbers = np.arange(start, start + count)
        return np.stack([numbers // 256, numbers % 256], axis=1).astype(np.uint8).reshape(-1, 1, 1, 2)

    labels = np.random.default_rng(5).integers(0, classes, num + test)
    rest = (images(num, test), labels[num:]) if test else (None, None)
    return datasets._Raw(images(0, num), labels[:num], *rest, 255.0)


def numbers(inputs):
    """The inverse of ``numbered_images``."""
    return (inputs[:, 0, 0, 0].astype(int) * 256 + inputs[:, 0, 0, 1]).tolist()


@pytest.fixture
def split_of(monkeypatch, tmp_path):
    """Prepare a made-up set under the name of the digits; gives its arrays."""

    def prepared(raw, *, seed=0, limits=None):
        monkeypatch.setitem(datasets.LOADERS, "digits", lambda folder: raw)
        target = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        description = prepare("digits", folder=None, seed=seed, target=target, limits=limits)
        with np.load(target / "data.npz") as arrays:
            return dict(arrays), description

    return prepared


def test_the_digits_are_split_46_20_14_20(digits):
    assert digits[1]["sizes"] == {"train": 837, "probe": 360, "val": 240, "test": 360}


def test_splits_are_disjoint_and_miss_nothing(split_of):
    arrays, _ = split_of(numbered_images(500))
    seen = [n for part in ("train", "probe", "val", "test") for n in numbers(arrays[f"{part}_inputs"])]
    assert sorted(seen) == list(range(500))


def test_images_keep_their_labels(split_of):
    raw = numbered_images(300)
    arrays, _ = split_of(raw)
    for part in ("train", "probe", "val", "test"):
        assert raw.labels[numbers(arrays[f"{part}_inputs"])].tolist() == arrays[f"{part}_targets"].tolist()


def test_a_test_part_of_its_own_stays_the_test_split(split_of):
    arrays, description = split_of(numbered_images(500, test=77))
    assert description["sizes"] == {"train": 400, "probe": 50, "val": 50, "test": 77}
    assert numbers(arrays["test_inputs"]) == list(range(500, 577))


def test_limits_shorten_splits_and_mix_none(split_of):
    raw = numbered_images(500)
    full, short = split_of(raw)[0], split_of(raw, limits={"train": 100, "val": 7})[0]
    assert [len(short[f"{p}_targets"]) for p in ("train", "probe", "val", "test")] == [100, 100, 7, 100]
    assert numbers(short["train_inputs"]) == numbers(full["train_inputs"])[:100]


@pytest.mark.parametrize("size", [50, 100, 209, 418, 837])
def test_every_training_subset_holds_the_classes_in_their_shares(digits, size):
    splits = open_splits(digits[0])
    everything = torch.cat([p.targets for p in (splits.train, splits.probe, splits.val, splits.test)])
    shares = torch.bincount(everything, minlength=10) / len(everything)
    counts = torch.bincount(splits.train.targets[:size], minlength=10)
    # each class is spread evenly over the order, so a prefix is off by one and by its share of the others' ones
    assert float((counts - size * shares).abs().max()) <= 2.0


@pytest.mark.parametrize("part", ["probe", "val", "test"])
def test_every_split_holds_the_classes_in_their_shares(digits, part):
    splits = open_splits(digits[0])
    everything = torch.cat([p.targets for p in (splits.train, splits.probe, splits.val, splits.test)])
    targets = getattr(splits, part).targets
    wanted = torch.bincount(everything, minlength=10) / len(everything) * len(targets)
    assert float((torch.bincount(targets, minlength=10) - wanted).abs().max()) <= 4.0  # two ends, each off by two


def test_training_subsets_are_nested(digits):
    train = open_splits(digits[0]).train
    small, large = (torch.cat([x for x, _ in chunks_of(train, size=64, limit=n)]) for n in (100, 333))
    assert torch.equal(large[:100], small)
    assert torch.equal(large, train.inputs[:333])


def test_equal_seeds_give_equal_digests(digits, tmp_path):
    assert prepare("digits", folder=None, seed=0, target=tmp_path) == digits[1]


def test_another_seed_gives_another_digest(digits, tmp_path):
    assert prepare("digits", folder=None, seed=1, target=tmp_path)["digest"] != digits[1]["digest"]


def test_the_digest_is_that_of_the_stored_arrays(digits):
    target, description = digits
    with np.load(target / "data.npz") as arrays:
        stored = hashlib.sha256(b"".join(arrays[key].tobytes() for key in sorted(arrays)))
    assert stored.hexdigest() == description["digest"] == open_splits(target).digest


def test_a_data_set_is_prepared_once(digits, monkeypatch):
    target, description = digits
    monkeypatch.setitem(datasets.LOADERS, "digits", None)  # calling it would raise
    assert prepare("digits", folder=None, seed=0, target=target) == description


def test_inputs_are_scaled_to_plus_and_minus_one(digits):
    inputs = open_splits(digits[0]).train.inputs
    assert (float(inputs.min()), float(inputs.max()), tuple(inputs.shape[1:])) == (-1.0, 1.0, (1, 8, 8))


def test_an_unknown_data_set_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UserError, match="unknown data set 'mnist': use one of digits, fashion_mnist"):
        prepare("mnist", folder=None, seed=0, target=tmp_path)


@pytest.mark.parametrize(("share", "size"), [(1.0, 837), (0.5, 418), (0.25, 209), (0.001, 1)])
def test_a_share_is_a_whole_number_of_samples_and_at_least_one(share, size):
    assert subset_size(837, share) == size


# --- Fashion-MNIST --------------------------------------------------------------------------------


def idx_bytes(array):
    """The IDX format: zeros, type 8 (unsigned byte), number of axes, sizes in big-endian, data."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def fashion(tmp_path, monkeypatch):
    """A folder with a Fashion-MNIST of 60 and 20 tiny images, two files of it gzipped."""
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": rng.integers(0, 256, (60, 4, 3)),
        "train-labels-idx1-ubyte": np.arange(60) % 10,
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (20, 4, 3)),
        "t10k-labels-idx1-ubyte": np.arange(20) % 10,
    }
    for name, array in arrays.items():
        content = idx_bytes(array)
        if name.startswith("train"):
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (tmp_path / name).write_bytes(content)
    hashes = {name: hashlib.sha256(idx_bytes(array)).hexdigest() for name, array in arrays.items()}
    monkeypatch.setattr(datasets, "FASHION_FILES", hashes)
    return tmp_path, arrays


def test_fashion_mnist_is_read_from_plain_and_gzipped_files(fashion):
    folder, arrays = fashion
    raw = datasets.load_fashion_mnist(folder)
    for found, name in zip((raw.images[:, 0], raw.labels, raw.test_images[:, 0], raw.test_labels), arrays, strict=True):
        assert np.array_equal(found, arrays[name])


def test_fashion_mnist_is_split_80_10_10_beside_its_own_test_part(fashion):
    folder, arrays = fashion
    target = folder / "prepared"
    description = prepare("fashion_mnist", folder=str(folder), seed=0, target=target)
    assert description["sizes"] == {"train": 48, "probe": 6, "val": 6, "test": 20}
    assert (description["input_shape"], description["num_classes"]) == ([1, 4, 3], 10)
    wanted = torch.from_numpy(arrays["t10k-images-idx3-ubyte"] / 255.0 * 2 - 1).float()
    assert torch.allclose(open_splits(target).test.inputs[:, 0], wanted, atol=1e-6)  # float32


def test_a_folder_without_fashion_mnist_is_refused_with_the_names_of_its_files(fashion):
    folder, _ = fashion
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(
        DataNotFoundError, match=r"does not hold Fashion-MNIST: it needs train-images.*\(plain or \.gz\)"
    ):
        datasets.load_fashion_mnist(folder)


def test_a_file_of_something_else_is_refused(fashion):
    folder, _ = fashion
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(20)))
    with pytest.raises(DataNotFoundError, match=r"t10k-labels-idx1-ubyte is not Fashion-MNIST's.*sha256 differs"):
        datasets.load_fashion_mnist(folder)


def test_a_gzipped_file_that_was_cut_off_is_refused(fashion):
    folder, _ = fashion
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataNotFoundError, match=r"train-images-idx3-ubyte\.gz"):
        datasets.load_fashion_mnist(folder)


def test_without_files_and_network_three_ways_to_get_fashion_mnist_are_named(tmp_path, monkeypatch):
    import torchvision.datasets

    def offline(*_args, **_arguments):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(datasets, "FASHION_FOLDERS", (tmp_path / "nowhere",))
    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", offline)  # a test never goes on the network
    with pytest.raises(DataNotFoundError, match=r"nowhere.*apt-get install dataset-fashion-mnist; .*data\.folder; or"):
        datasets.load_fashion_mnist(None)


DEBIAN = datasets.FASHION_FOLDERS[0]


@pytest.mark.skipif(not DEBIAN.is_dir(), reason=f"Debian's dataset-fashion-mnist is not in {DEBIAN}")
def test_debians_fashion_mnist_is_what_it_should_be():
    raw = datasets.load_fashion_mnist(DEBIAN)
    assert (raw.images.shape, raw.test_images.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert np.bincount(raw.labels).tolist() == [6000] * 10
    assert np.bincount(raw.test_labels).tolist() == [1000] * 10


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


# --- learning rate --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("progress", "rate"),
    [
        (0.0, 0.1),  # the floor
        (0.1, 0.55),  # half way up: (0.1 + 1) / 2
        (0.2, 1.0),  # the peak, where the warm-up ends
        (0.4, 0.1 + 0.9 * (2 + math.sqrt(2)) / 4),  # a quarter down: (1 + cos(pi / 4)) / 2
        (0.6, 0.55),  # half way down
        (1.0, 0.1),  # the floor again
    ],
)
def test_the_rate_warms_up_in_a_line_and_comes_down_in_half_a_cosine(progress, rate):
    found = learning_rate(progress, peak=3.0, warmup_share=0.2, floor_share=0.1)
    assert found == pytest.approx(3.0 * rate, rel=1e-12)


def test_a_rate_without_warm_up_begins_at_its_peak():
    assert learning_rate(0.0, peak=0.01, warmup_share=0.0, floor_share=0.02) == pytest.approx(0.01, rel=1e-12)


def test_the_rate_of_all_groups_is_set():
    optimizer = make_optimizer(family("mlp"), settings("sgd"))
    set_learning_rate(optimizer, 0.123)
    assert [g["lr"] for g in optimizer.param_groups] == [0.123, 0.123]


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
    found = candidates(family("resnet"), SignalGuided(axes=axes, units=4), stage=0, seed=0)
    wanted = [("depth", site) for site in FAMILY_SITES["resnet"]] if "depth" in axes else []
    wanted += [("width", block) for block in FAMILY_BLOCKS["resnet"]] if "width" in axes else []
    assert [(c.kind, c.path) for c in found] == wanted


def test_a_policy_that_grows_data_alone_looks_at_depth():
    found = candidates(family("resnet"), SignalGuided(axes=("data",)), stage=0, seed=0)
    assert [(c.kind, c.path) for c in found] == [("depth", site) for site in FAMILY_SITES["resnet"]]


def test_a_step_at_a_module_that_is_no_site_is_refused():
    with pytest.raises(SiteError, match="head"):
        new_block(family("mlp"), AddBlock(site="head"), stage=0, seed=0)


def test_units_for_a_module_that_is_no_block_are_refused():
    with pytest.raises(SiteError, match="head"):
        new_branch(family("mlp"), AddUnits(block="head", units=2), stage=0, seed=0)


def test_copied_inner_weights_are_those_of_the_block_that_reads_the_stream():
    model = family("mlp")
    found = candidates(model, SignalGuided(axes=("depth",), inner="copy"), stage=0, seed=0)
    for candidate, near in zip(found, (0, 1, 1), strict=True):  # behind the last block: the last one
        block = model.get_submodule(f"groups.0.blocks.{near}.branch")
        assert torch.equal(candidate.block.inner.weight, block.inner.weight)
        assert candidate.block.is_zero
    assert [c.shared for c in found] == ["groups.0.blocks.0.branch", "groups.0.blocks.1.branch", None]


@pytest.mark.parametrize("change", [{"stage": 1}, {"seed": 1}])
def test_random_inner_weights_are_new_in_each_stage_and_for_each_seed(change):
    policy = SignalGuided(axes=("depth",))
    (first, *_), (other, *_), (again, *_) = (
        candidates(family("mlp"), policy, **{"stage": 0, "seed": 0} | c) for c in ({}, change, {})
    )
    assert torch.equal(first.block.inner.weight, again.block.inner.weight)
    assert not torch.equal(first.block.inner.weight, other.block.inner.weight)


def test_random_inner_weights_differ_from_site_to_site():
    found = candidates(family("mlp"), SignalGuided(axes=("depth",)), stage=0, seed=0)
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
    "a later format": (lambda folder: edit_manifest(folder, format_version=3), "format 3, this version reads 1, 2: update"),
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
