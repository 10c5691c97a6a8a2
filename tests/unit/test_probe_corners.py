"""Corners of a probe that careful readers found broken."""

import math

import numpy as np
import pytest
import torch
from probe_runs import CROSS_ENTROPY, MLP, assert_close, batched, data, figures, run, until
from signal_twins import F64
from torch import nn
from torch_helpers import (
    ImageNet,
    VectorNet,
    assert_untouched,
    family,
    family_data,
    fingerprint,
    generator,
    normal,
)

from growth_service.blocks import Block, block_from_config
from growth_service.core.policies import Sight
from growth_service.errors import UserError
from growth_service.growth import new_units, widen
from growth_service.probing import Candidate, Looks, probe
from growth_service.probing.jumpboard import clipped_direction
from growth_service.probing.overlap import shared_samples
from growth_service.probing.sketch import MAX_NUMBERS, Sketch
from growth_service.training.growing import candidates

# --- what a careful reader broke ------------------------------------------------------------------


def linear_data(num, *, seed=0):
    """Labels that the inputs decide, so that something is useful."""
    x = normal(num, 9, seed=seed, dtype=F64).reshape(num, 1, 3, 3)
    return x, x.flatten(1)[:, :4].argmax(dim=1)


def test_the_best_of_several_sites_is_the_one_that_is_certified_again():
    model = family("mlp", dtype=F64)
    fresh = [linear_data(200, seed=77)]
    arguments = {"train_batches": [linear_data(300)], "loss": CROSS_ENTROPY, "reduction": "mean", "tolerance": 1e-3}
    report = probe(model, batches=[linear_data(300, seed=5)], fresh=fresh, **arguments)
    assert report.best is not None
    assert len(report.sites) == 3
    again = report.confirmed
    wanted = next(s for s in probe(model, batches=fresh, **arguments).sites if s.site == report.best.site)
    assert (again.site, again.added_flops) == (report.best.site, report.best.added_flops)
    assert again.s == pytest.approx(wanted.s, rel=1e-9)
    assert again.gain_lcl > wanted.gain_lcl  # alone, at the full level


def test_looks_of_a_shuffling_loader_use_each_sample_once():
    """A sample that came twice would look like agreement between two: pure noise would be certified."""
    inputs = normal(512, 5, seed=3, dtype=F64)
    targets = inputs @ normal(5, 6, seed=4).double()
    noise = normal(512, 6, seed=5, dtype=F64)

    class Shuffling:
        def __iter__(self):
            order = torch.randperm(512)
            return iter(batched(inputs[order], (targets + noise)[order], 50))

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(5, 6, bias=False)
            with torch.no_grad():
                self.stem.weight.copy_(normal(5, 6, seed=4).T)

        def forward(self, x):
            return self.stem(x)

    def squares(outputs, wanted):
        return 0.5 * (outputs - wanted).square().sum(dim=1)

    useful = 0
    for seed in range(8):
        torch.manual_seed(seed)
        block = block_from_config(MLP, generator=generator(seed)).to(F64)
        report = probe(
            Linear().to(F64), batches=Shuffling(), pool=[normal(300, 5, seed=90 + seed, dtype=F64)], sites=["stem"],
            blocks={"stem": block}, loss=squares, reduction="none", tolerance=0.0, looks=Looks(first=64),
        )  # fmt: skip
        useful += report.verdict == "useful"
    assert useful <= 2  # 8 x 0.05 expected; with samples used twice nearly all of them


@pytest.mark.parametrize("num", [65, 66, 67, 129])
def test_a_last_look_of_a_few_new_samples_is_no_trouble(num):
    report, looks = until(num, tolerance=1.0)
    assert report.num_samples == looks[-1].num_samples <= num


def test_small_looks_keep_their_rows_until_there_are_too_many():
    _, looks = until(2000, tolerance=1.0, first=4, most=256)
    assert looks[0].num_samples == 4


@pytest.mark.parametrize("with_pool", [True, False])
def test_a_stream_that_is_changed_in_place_later_is_seen_as_it_was_also_without_gradients(with_pool):
    class Plain(VectorNet):
        def top(self, z):
            return self.head(torch.relu(z))

    class InPlace(VectorNet):
        def top(self, z):
            return self.head(torch.relu_(z))

    pool = [data(100, seed=8)[0]] if with_pool else None
    found, wanted = (run(net=m().to(F64), pool=pool) for m in (InPlace, Plain))
    assert figures(found) == figures(wanted)


def test_a_width_candidate_that_copies_all_units_of_a_widened_block_is_worth_nothing():
    model = family("mlp", dtype=F64)
    path = "groups.0.blocks.0.branch"
    widen(model, site=path, units=3, generator=generator(2))
    with torch.no_grad():
        extra = model.get_submodule(f"{path}.widened.0")
        extra.project.weight.copy_(0.1 * normal(*extra.project.weight.shape, seed=3))
    (candidate,) = (c for c in candidates(model, Sight(axes=("width",), units=3), stage=0, seed=0) if c.path == path)
    assert candidate.beside == (f"{path}.project", f"{path}.widened.0.project")
    candidate.block.load_state_dict(
        {k: torch.zeros_like(v) if "project" in k else v for k, v in extra.state_dict().items()}
    )
    held_out, train = linear_data(300, seed=5), linear_data(300)
    report = probe(
        model, batches=[held_out], train_batches=[train], pool=[train[0]], candidates=[candidate], loss=CROSS_ENTROPY,
        reduction="mean", ridge=0.0,
    )  # fmt: skip
    assert report.sites[0].s_plugin == pytest.approx(0.0, abs=1e-9 * report.sites[0].raw_rms ** 2)


def test_the_inflation_of_a_width_score_counts_the_features_that_are_taken_off():
    """Both old and new features are estimated from the pool; halves of the rest alone would show almost none of it."""
    model = family("mlp", dtype=F64)
    path = "groups.0.blocks.0.branch"
    block = new_units(model.get_submodule(path), units=2, generator=generator(1))
    held_out, pool = linear_data(400, seed=5), [linear_data(24, seed=6)[0]]
    arguments = {"batches": [held_out], "pool": pool, "loss": CROSS_ENTROPY, "reduction": "mean"}
    with_old = Candidate(path=path, block=block, kind="width", beside=(f"{path}.project",))
    first, second = (
        probe(model, candidates=[c], **arguments).sites[0]
        for c in (with_old, Candidate(path=path, block=block, kind="width"))
    )
    assert first.s_plugin / first.s > 1.2 * second.s_plugin / second.s or first.s < 0


def test_fewer_than_32_samples_get_no_verdict_but_a_note():
    site = run(held_out=[data(31, seed=5)], tolerance=1e6).sites[0]
    assert site.verdict == "undetermined"
    assert any("31 samples are too few for a verdict" in note for note in site.notes)
    assert run(held_out=[data(32, seed=5)], tolerance=1e6).sites[0].verdict == "saturated"


def test_the_block_that_is_handed_out_and_certified_again_is_that_of_the_best_candidate():
    """A small block has more gain per FLOP, but only the large one is certain above this tolerance."""
    blocks = [block_from_config(MLP | {"hidden": h}, generator=generator(h)).to(F64) for h in (1, 32)]
    arguments = {
        "held_out": [linear_vectors(300, seed=5)], "train": [linear_vectors(300)], "blocks": {"stem": blocks},
        "fresh": [linear_vectors(200, seed=77)],
    }  # fmt: skip
    small, large = run(**arguments, tolerance=1e-6).sites
    assert small.gain_per_flop > large.gain_per_flop
    assert small.gain_lcl < large.gain_lcl
    report = run(**arguments, tolerance=(small.gain_lcl + large.gain_lcl) / 2)
    assert report.best.block == blocks[1].config()
    assert report.blocks["depth", "stem"] is blocks[1]
    assert report.confirmed.added_flops == large.added_flops != small.added_flops


def linear_vectors(num, *, seed=0):
    x = normal(num, 5, seed=seed, dtype=F64)
    return x, x[:, :3].argmax(dim=1)


def test_the_order_of_sites_changes_no_figure_of_a_network_of_no_family():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(5, 6)
            self.blocks = nn.ModuleList(Layer() for _ in range(3))
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            z = self.stem(x)
            for block in self.blocks:
                z = block(z)
            return self.head(z)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(6, 6)

        def forward(self, z):
            return z + 0.1 * torch.tanh(self.inside(z))

    torch.manual_seed(0)
    net = Stack().to(F64)
    paths = ["stem", "blocks.0", "blocks.1", "blocks.2"]
    blocks = {p: block_from_config(MLP, generator=generator(9)).to(F64) for p in paths}
    first, other = (run(net=net, sites=order, blocks=blocks) for order in (paths, [paths[i] for i in (2, 0, 3, 1)]))
    assert other.r_max == first.r_max
    with torch.no_grad():  # an ordinary step: what each layer adds to what it reads (stem, of another shape, is none)
        z, ratios = net.stem(data(300)[0]), []
        for layer in net.blocks:
            ratios.append(float((layer(z) - z).norm() / z.norm()))
            z = layer(z)
    assert first.r_max == pytest.approx(min(max(sorted(ratios)[1], 0.05), 0.3), rel=1e-9)
    by_path = {s.site: s.to_dict() for s in other.sites}
    for site in first.sites:
        assert_close(by_path[site.site], site.to_dict())


@pytest.mark.parametrize("options", [{"padding_mode": "circular"}, {"padding_mode": "reflect"}, {"groups": 2}])
def test_a_block_with_an_unusual_convolution_goes_through_jacobian_products(options):
    class Unusual(Block):
        type_name = f"unusual {options}"

        def __init__(self):
            super().__init__()
            self.project = nn.Conv2d(4, 4, 3, padding=1, bias=False, **options)
            nn.init.zeros_(self.project.weight)

        def features(self, z):
            return torch.tanh(z)

        def config(self):
            return {"type": self.type_name}

        @property
        def hidden(self):
            return 4

    net = ImageNet().to(F64)
    inputs, targets = normal(40, 2, 4, 4, dtype=F64), torch.randint(0, 3, (40,), generator=generator())
    block = Unusual().to(F64)
    found = run(net=net, held_out=[(inputs, targets)], train=[(inputs, targets)], blocks={"stem": block}).sites[0]
    z = net.stem(inputs).detach()
    CROSS_ENTROPY(net.top(z + block(z)), targets).backward()
    wanted = block.project.weight.grad.flatten().numpy()
    np.testing.assert_allclose(found.cross_gradient[0], wanted, rtol=0, atol=1e-10 * np.abs(wanted).max())


def test_a_block_whose_projection_has_moved_already_is_refused():
    block = block_from_config(MLP, generator=generator(9)).to(F64)
    with torch.no_grad():
        block.project.bias.fill_(0.1)
    with pytest.raises(UserError, match="the projection of the block for 'stem' is not zero"):
        run(blocks={"stem": block})


def test_a_general_block_with_dropout_and_batch_statistics_is_scored_in_eval_mode_and_left_alone():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop, self.up = nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6)
            nn.init.zeros_(self.up.weight)
            nn.init.zeros_(self.up.bias)

        def forward(self, z):
            return self.up(self.drop(torch.tanh(self.norm(z))))

    block, net = Moody().to(F64).train(), VectorNet().to(F64)
    before = fingerprint(block)
    assert run(net=net, blocks={"stem": block}).sites[0].s_plugin > 0
    assert_untouched(block, before)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(UserError, match="unknown reduction 'avg': what the loss does over samples is 'mean'"):
        run(reduction="avg")


def test_a_loader_that_draws_random_numbers_leaves_the_global_stream_alone():
    dataset = torch.utils.data.TensorDataset(*data(300, seed=5))
    loader = torch.utils.data.DataLoader(dataset, batch_size=50, shuffle=True)
    net = VectorNet().to(F64)
    before = torch.get_rng_state()
    run(held_out=loader, net=net)
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_alike_in_some_numbers_are_not_taken_for_the_same():
    """Sparse images agree in most pixels; a mask is the same for all."""
    train, held_out = torch.zeros(50, 1, 28, 28), torch.zeros(60, 1, 28, 28)
    train[:, 0, 1, 1] = torch.arange(50.0)
    held_out[:, 0, 1, 1] = torch.arange(40.0, 100.0)
    labels = torch.zeros(60, dtype=torch.long)
    assert shared_samples([(train, labels[:50])], [(held_out, labels)]) == 10
    masked = [[({"mask": torch.ones(len(x), 3), "x": x}, labels[: len(x)])] for x in (train, held_out)]
    assert shared_samples(*masked) == 10


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        ([(1, 2, 3)], r"each of batches must be a pair \(inputs, targets\), got a tuple of 3"),
        ([{"x": 1}], "must be a pair"),
        (7, "batches is a int: pass something that can be iterated"),
        (
            [(torch.zeros(40, 7, dtype=F64), torch.zeros(40, dtype=torch.long))],
            r"VectorNet cannot take inputs \(\d+, 7\)",
        ),
        ([(torch.zeros(40, 5), torch.zeros(40, dtype=torch.long))], r"cannot take inputs \(\d+, 5\) of torch.float32"),
    ],
)
def test_batches_of_another_structure_are_refused_with_what_they_must_be(held_out, message):
    with pytest.raises(UserError, match=message):
        run(held_out=held_out)


def test_batches_that_come_only_once_though_they_look_like_more_are_refused():
    class Once:
        def __init__(self, batches):
            self._batches = list(batches)

        def __iter__(self):
            found, self._batches = self._batches, []
            return iter(found)

    for looks in (None, Looks(first=64)):
        with pytest.raises(UserError, match=r"\d+ samples when they were counted and 0 when they were used"):
            run(held_out=Once(batched(*data(300, seed=5), 100)), looks=looks)


def test_a_pool_of_pairs_is_refused():
    with pytest.raises(UserError, match="each of pool must be inputs alone"):
        run(pool=[data(20)])


def test_several_random_draws_are_candidates_of_their_own():
    model, batch = family("mlp", dtype=F64), family_data("mlp", dtype=F64, num=60)
    report = probe(
        model, batches=[batch], train_batches=[batch], loss=CROSS_ENTROPY, reduction="mean", inner=("random",) * 3
    )
    assert [s.name for s in report.sites[:3]] == ["random 0", "random 1", "random 2"]
    assert len({s.s_plugin for s in report.sites[:3]}) == 3


def test_the_direction_of_a_jumpboard_is_finite_where_nearly_all_gradients_vanish():
    inputs = data(200, dtype=torch.float32)[0]
    block = block_from_config(MLP, generator=generator(9))

    def one_sample(outputs, wanted):
        return outputs.square().sum(dim=1) * (wanted < 0)

    labels = torch.ones(200, dtype=torch.long)
    labels[0] = -1
    direction, _ = clipped_direction(
        VectorNet(), candidate=Candidate(path="stem", block=block), batches=[(inputs, labels)], loss=one_sample,
        reduction="none", ridge=1e-3, mapper=lambda function, items: [function(item) for item in items],
    )  # fmt: skip
    assert np.isfinite(direction).all()


def test_the_gain_of_new_units_is_a_step_relative_to_the_stream_that_they_read():
    """Not to what the block adds, which is smaller: depth and width must be measured with one rod."""
    model = family("mlp", dtype=F64)
    path = "groups.0.blocks.0.branch"
    block = new_units(model.get_submodule(path), units=2, generator=generator(1))
    held_out, train = linear_data(300, seed=5), linear_data(300)
    site = probe(
        model, batches=[held_out], train_batches=[train], pool=[train[0]], loss=CROSS_ENTROPY, reduction="mean",
        candidates=[Candidate(path=path, block=block, kind="width")],
    ).sites[0]  # fmt: skip
    with torch.no_grad():
        z = model.groups[0].entry(train[0].flatten(1))
    norm = float(z.square().sum(dim=1).mean().sqrt())
    assert site.kappa == pytest.approx(norm * math.sqrt(max(site.s, 0.0)), rel=1e-9)


@pytest.mark.parametrize("rows", [100, 300])
def test_a_sketch_of_a_large_cross_gradient_keeps_inner_products_in_expectation(rows):
    """100 rows keep their own places, 300 are added up in 256 buckets; 60 sketches, four standard errors."""
    features = 40_000 // rows
    root = normal(features, features, seed=1, dtype=F64).numpy() / features**0.5
    x, y = (normal(rows, features, seed=s, dtype=F64) for s in (2, 3))
    y = x + y
    wanted = float(((x.numpy() @ root) * (y.numpy() @ root)).sum())
    found = []
    for seed in range(60):
        sketch = Sketch(root, shape=(rows, features), seed=seed, like=x)
        assert sketch.numbers <= MAX_NUMBERS
        assert len(sketch(x)) == sketch.numbers
        found.append(float(sketch(x) @ sketch(y)))
    assert len(set(found)) > 50
    assert np.mean(found) == pytest.approx(wanted, abs=4 * np.std(found) / math.sqrt(60))
    assert np.std(found) < 0.1 * wanted


def test_a_sketch_of_a_small_cross_gradient_is_the_whitened_one_itself():
    root, x = normal(7, 7, seed=1, dtype=F64), normal(3, 7, seed=2, dtype=F64)
    assert torch.equal(Sketch(root.numpy(), shape=(3, 7), seed=0, like=x)(x), (x @ root).flatten())
