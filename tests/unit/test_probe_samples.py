"""What a probe does with the samples it gets: order, batches, ranks, looks, several candidates, number types."""

import copy
import math

import numpy as np
import pytest
import torch
from signal_twins import F64, LOSSES
from torch import nn
from torch_helpers import (
    FAMILY_SITES,
    ImageNet,
    SequenceNet,
    VectorNet,
    assert_untouched,
    family,
    family_data,
    fingerprint,
    generator,
    normal,
)

from growth_service.blocks import Block, MLPBlock, block_from_config
from growth_service.core.confidence import spend
from growth_service.core.schedule import SignalGuided
from growth_service.errors import SiteError, UserError
from growth_service.growth import new_units, widen
from growth_service.models import build
from growth_service.probing import Candidate, Looks, probe
from growth_service.probing.jumpboard import clipped_direction
from growth_service.probing.overlap import shared_samples
from growth_service.probing.prepare import MAX_CHUNKS, chunk_size
from growth_service.probing.samples import counted
from growth_service.probing.sketch import MAX_NUMBERS, Sketch
from growth_service.training.growing import candidates

CROSS_ENTROPY = nn.CrossEntropyLoss()
MLP = {"type": "mlp", "width": 6, "hidden": 4}


def data(num, *, seed=0, dtype=F64):
    return normal(num, 5, seed=seed, dtype=dtype), torch.randint(0, 3, (num,), generator=generator(seed + 1))


def batched(inputs, targets, size):
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def run(*, net=None, held_out=None, train=None, **arguments):
    net = net or VectorNet().to(F64)
    block = block_from_config(MLP, generator=generator(9)).to(F64)
    arguments = {"sites": ["stem"], "blocks": {"stem": block}, "loss": CROSS_ENTROPY, "reduction": "mean"} | arguments
    if "candidates" in arguments:
        del arguments["sites"], arguments["blocks"]
    return probe(net, batches=held_out or [data(300, seed=5)], train_batches=train or [data(300)], **arguments)


def figures(report):
    found = report.to_dict()
    del found["protocol"]
    return found


def assert_close(found, wanted, *, rel=1e-9):
    """Same figures, at any depth; sums in another order round differently."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_close(found[key], wanted[key], rel=rel)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_close(a, b, rel=rel)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=rel, abs=1e-12)
    elif not isinstance(wanted, str):  # sentences hold rounded figures
        assert found == wanted


# --- batches and ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [7, 64, 300])
def test_the_split_into_batches_changes_no_figure_where_rows_are_sums_over_chunks(size):
    """300 samples make 30 chunks of 10; batches of 7 cut through all of them."""
    held_out, train = data(300, seed=5), data(300)
    wanted = figures(run(held_out=[held_out], train=[train]))
    assert_close(figures(run(held_out=batched(*held_out, size), train=batched(*train, size))), wanted)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_any_number_of_ranks_gives_equal_bits(workers):
    """A mapper that works off its share of the lanes as that many ranks would; order of results is fixed."""
    held_out, train = batched(*data(300, seed=5), 16), batched(*data(300), 16)

    def mapper(function, items):
        results = [None] * len(items)
        for rank in range(workers):
            for index in range(rank, len(items), workers):
                results[index] = function(items[index])
        return results

    def alone(function, items):
        return [function(item) for item in items]

    found, wanted = (run(held_out=held_out, train=train, mapper=m) for m in (mapper, alone))
    assert found.to_dict() == wanted.to_dict()
    assert_close(figures(found), figures(run(held_out=held_out, train=train)))  # without ranks: to rounding


def test_fewer_batches_than_ranks_are_no_trouble():
    report = run(mapper=lambda function, items: [function(item) for item in items])
    assert report.num_samples == 300


def test_a_loader_of_unknown_length_gives_the_figures_of_its_list():
    class Loader:
        """Can be iterated again and again, and has no length."""

        def __init__(self, batches):
            self._batches = batches

        def __iter__(self):
            return iter(self._batches)

    held_out, train = batched(*data(300, seed=5), 50), batched(*data(300), 50)
    assert figures(run(held_out=Loader(held_out), train=Loader(train))) == figures(run(held_out=held_out, train=train))


def test_an_iterator_is_kept_as_a_list():
    held_out = batched(*data(300, seed=5), 50)
    assert figures(run(held_out=iter(held_out))) == figures(run(held_out=held_out))


def test_inputs_may_be_keyword_arguments():
    class Keyed(VectorNet):
        def forward(self, *, x, scale):
            return super().forward(x * scale[:, None])

    held_out, train = data(300, seed=5), data(300)
    keyed = [[({"x": x, "scale": torch.ones(len(x), dtype=F64)}, y)] for x, y in (held_out, train)]
    found = run(net=Keyed().to(F64), held_out=keyed[0], train=keyed[1])
    assert_close(figures(found), figures(run(held_out=[held_out], train=[train])))


@pytest.mark.parametrize("num", [4, 31, 32, 33, 64, 65, 300, 5000])
def test_rows_are_as_many_as_allowed_and_cover_all_samples(num):
    size = chunk_size(num)
    rows = math.ceil(num / size)
    assert rows <= MAX_CHUNKS
    assert rows > min(num, MAX_CHUNKS) / 2


def test_samples_sorted_by_class_are_noticed_and_nothing_is_certified():
    inputs, targets = data(1200, seed=5)
    order = targets.argsort(stable=True)
    shuffled, in_order = run(held_out=[(inputs, targets)]), run(held_out=[(inputs[order], targets[order])])
    assert not any("sorted" in note for note in shuffled.sites[0].notes)
    assert any("sorted" in note and "shuffle" in note for note in in_order.sites[0].notes)
    assert in_order.verdict == "undetermined"


def test_held_out_samples_that_were_trained_on_are_counted_and_the_consequence_is_named():
    held_out, train = data(300, seed=5), data(300)
    mixed = torch.cat([train[0][:7], held_out[0]]), torch.cat([train[1][:7], held_out[1]])
    note = run(held_out=[mixed], train=[train]).notes[0]
    assert note.startswith("7 of 307 held-out samples are among the training samples")
    assert "say nothing about new data" in note
    assert run(held_out=[held_out], train=[train]).notes == ()


def test_progress_is_told_until_all_samples_are_done():
    seen = []
    run(held_out=batched(*data(300, seed=5), 100), train=batched(*data(300), 50), progress=lambda *a: seen.append(a))
    assert seen[0] == (50, 600)
    assert seen[-1] == (600, 600)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# --- a pool and no training samples ---------------------------------------------------------------


def test_without_training_samples_the_direction_comes_from_the_held_out_ones_and_transfer_is_unknown():
    report = run(train=None, pool=[data(200, seed=3)[0]])
    with_training = probe_with_pool_only()
    site = with_training.sites[0]
    assert with_training.num_train == 0
    assert site.transfer == 0.0
    assert site.to_dict()["transfer_ucl"] is None
    assert np.abs(site.descent_direction.matrix_DK).max() > 0
    assert float((site.descent_direction.matrix_DK * site.cross_gradient).sum()) < 0
    assert report.num_train == 300


def probe_with_pool_only():
    block = block_from_config(MLP, generator=generator(9)).to(F64)
    return probe(
        VectorNet().to(F64), batches=[data(300, seed=5)], pool=[data(200, seed=3)[0]], sites=["stem"],
        blocks={"stem": block}, loss=CROSS_ENTROPY, reduction="mean",
    )  # fmt: skip


def test_a_small_pool_is_noted():
    report = run(train=[data(4)])
    assert any("5 features comes from 4 samples" in note for note in report.sites[0].notes)


# --- several candidates, a choice certified again -------------------------------------------------


def test_several_blocks_at_a_site_are_scored_in_one_pass_as_they_are_alone():
    blocks = [block_from_config(MLP, generator=generator(i)).to(F64) for i in range(3)]
    together = run(blocks={"stem": blocks}).sites
    assert [s.name for s in together] == ["0", "1", "2"]
    for site, block in zip(together, blocks, strict=True):
        alone = run(blocks={"stem": block}).sites[0]
        assert site.s == pytest.approx(alone.s, rel=1e-12)
        assert site.predicted_gain_ucl == pytest.approx(alone.predicted_gain_ucl, rel=1e-12)  # each at the full level
        assert site.lcl < alone.lcl  # one of many: at a third of it


def test_copied_and_drawn_inner_weights_are_candidates_side_by_side():
    model, batch = family("mlp", dtype=F64), family_data("mlp", dtype=F64)
    both = probe(
        model, batches=[batch], train_batches=[batch], loss=CROSS_ENTROPY, reduction="mean", inner=("copy", "random")
    )
    assert [(s.site, s.name) for s in both.sites] == [(p, n) for p in FAMILY_SITES["mlp"] for n in ("copy", "random")]


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_features_taken_from_the_networks_own_forward_pass_are_those_of_the_copy(name):
    model, batch = family(name, dtype=F64), family_data(name, dtype=F64, num=60)
    arguments = {"batches": [batch], "train_batches": [batch], "loss": CROSS_ENTROPY, "reduction": "mean"}
    shared = probe(model, **arguments)
    blocks = {path: copy.deepcopy(block) for (_, path), block in shared.blocks.items()}
    computed = probe(model, blocks=blocks, sites=list(FAMILY_SITES[name]), **arguments)
    for a, b in zip(shared.sites, computed.sites, strict=True):
        assert_close(a.to_dict(), b.to_dict())
        np.testing.assert_allclose(a.cross_gradient, b.cross_gradient, rtol=1e-12, atol=1e-15)


def test_features_of_a_copied_transformer_share_its_heads_and_compute_their_own_units():
    spec = {
        "family": "gpt", "vocab": 11, "context": 6, "widths": [8], "blocks": [2], "hidden": [12], "heads": 2,
    }  # fmt: skip
    model = build(spec, seed=0).to(F64)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):  # norms too: at birth both of a block are alike
            parameter.copy_(0.5 * normal(*parameter.shape, seed=index))
    tokens = torch.randint(0, 11, (60, 7), generator=generator(1))
    batch = tokens[:, :-1], tokens[:, 1:]

    def loss(logits, targets):
        return CROSS_ENTROPY(logits.flatten(0, 1), targets.flatten())

    arguments = {"batches": [batch], "train_batches": [batch], "loss": loss, "reduction": "mean"}
    shared = probe(model, **arguments)
    blocks = {path: copy.deepcopy(block) for (_, path), block in shared.blocks.items()}
    computed = probe(model, blocks=blocks, sites=list(blocks), **arguments)
    by_path = {site.site: site for site in computed.sites}
    for site in shared.sites:
        wanted = by_path[site.site].cross_gradient
        np.testing.assert_allclose(site.cross_gradient, wanted, rtol=0, atol=1e-10 * np.abs(wanted).max())


def test_the_best_of_several_is_certified_again_on_fresh_samples():
    fresh = data(200, seed=77)
    report = run(fresh=[fresh], tolerance=1e-6)
    assert report.best is not None
    alone = run(held_out=[fresh], tolerance=1e-6).sites[0]
    assert report.confirmed is not None
    assert (report.confirmed.num_samples, report.confirmed.s) == (200, pytest.approx(alone.s, rel=1e-12))


def test_nothing_is_certified_again_where_nothing_is_useful():
    assert run(fresh=[data(200, seed=77)], tolerance=1e6).confirmed is None


# --- looks ----------------------------------------------------------------------------------------


def until(num, *, tolerance, first=64, most=None):
    """The report and the looks at up to ``num`` samples."""
    looks = Looks(first=first, most=most)
    report = run(held_out=batched(*data(num, seed=5), 48), tolerance=tolerance, looks=looks)
    return report, report.looks


def test_looking_stops_as_soon_as_there_is_a_verdict():
    report, looks = until(2000, tolerance=1e-6)
    assert report.verdict == "useful"
    assert [look.verdict for look in looks] == ["undetermined"] * (len(looks) - 1) + ["useful"]
    assert looks[-1].num_samples == report.num_samples < 2000


def test_each_look_doubles_the_samples_and_spends_its_share_of_the_level():
    gain = until(2000, tolerance=1e-6)[0].sites[0].predicted_gain
    _, looks = until(2000, tolerance=0.97 * gain)  # at the gain itself: undetermined for long
    assert [look.num_samples for look in looks] == [64, 128, 256, 512, 1024, 2000][: len(looks)]
    assert len(looks) > 2
    assert [look.level for look in looks] == [spend(0.05, look=j) for j in range(len(looks))]
    assert sum(look.level for look in looks) < 0.05


def test_the_last_of_several_looks_is_a_probe_of_all_its_samples():
    gain = until(2000, tolerance=1e-6)[0].sites[0].predicted_gain
    report, looks = until(1024, tolerance=0.97 * gain)
    assert looks[-1].num_samples == 1024
    once = run(held_out=[data(1024, seed=5)], tolerance=0.97 * gain, level=looks[-1].level)
    assert_close(report.sites[0].to_dict(), once.sites[0].to_dict())


def test_looks_end_at_the_most_samples_allowed():
    gain = until(2000, tolerance=1e-6)[0].sites[0].predicted_gain
    _, looks = until(2000, tolerance=0.97 * gain, most=200)
    assert looks[-1].num_samples <= 200


def test_a_first_look_too_small_for_a_certificate_is_refused():
    with pytest.raises(UserError, match="first look of 3 samples must have at least 4"):
        Looks(first=3)


# --- number types, tied and frozen weights, dropout ------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_a_network_in_few_bits_is_probed_with_sums_in_more(dtype, tolerance):
    """bfloat16 has 8 bits: streams and gradients are off by up to a per cent, features and sums are not."""
    wanted = run().sites[0]
    net = VectorNet().to(dtype)
    held_out, train = ((x.to(dtype), y) for x, y in (data(300, seed=5), data(300)))
    block = block_from_config(MLP, generator=generator(9))
    found = run(net=net, held_out=[held_out], train=[train], blocks={"stem": block}).sites[0]
    assert found.s_plugin == pytest.approx(wanted.s_plugin, rel=tolerance)
    assert found.descent_direction.matrix_DK.dtype == np.float32


def test_rows_in_half_precision_give_the_same_certificate(monkeypatch):
    """As if every cross-gradient were too long to be kept whole."""
    held_out, train = ((x.float(), y) for x, y in (data(600, seed=5), data(300)))
    block = block_from_config(MLP, generator=generator(9))
    kwargs = {"net": VectorNet(), "held_out": [held_out], "train": [train], "blocks": {"stem": block}}
    exact = run(**kwargs).sites[0]
    monkeypatch.setattr("growth_service.probing.sketch.MAX_EXACT", 1)
    packed = run(**kwargs).sites[0]
    assert packed.noise_sd == pytest.approx(exact.noise_sd, rel=0.1)
    assert packed.noise_sd != exact.noise_sd
    assert packed.s == pytest.approx(exact.s, abs=0.1 * exact.noise_sd)


def test_a_network_that_writes_into_its_stream_has_the_ordinary_step_of_one_that_does_not():
    """It runs twice on the first batch, to find out; what its blocks did is counted once."""

    class Net(nn.Module):
        def __init__(self, *, in_place):
            super().__init__()
            self.in_place = in_place
            self.stem, self.mid = nn.Linear(5, 6), nn.Linear(6, 6)
            self.block, self.head = MLPBlock(6, 4), nn.Linear(6, 3)
            for i, p in enumerate(self.parameters()):
                p.data.copy_(0.5 * torch.randn(p.shape, generator=generator(i)))
            self.block.project.weight.data.mul_(0.2)

        def forward(self, x):
            z = self.mid(self.stem(x))
            delta = self.block(z.clone())
            return self.head(z.add_(delta) if self.in_place else z + delta)

    batches = [((4 * x if i else x).float(), y) for i, (x, y) in enumerate(data(40, seed=s) for s in (3, 4, 5))]
    found = [
        probe(Net(in_place=flag), batches=batches, train_batches=batches, loss=nn.CrossEntropyLoss(), reduction="mean",
              blocks={"stem": MLPBlock(6, 4), "mid": MLPBlock(6, 4)})
        for flag in (False, True)
    ]  # fmt: skip
    assert 0.05 < found[0].r_max < 0.3  # not at its limits
    assert found[0].r_max == found[1].r_max


def test_a_candidate_in_bfloat16_is_scored_too():
    net = VectorNet().to(torch.bfloat16)
    held_out, train = ((x.to(torch.bfloat16), y) for x, y in (data(300, seed=5), data(300)))
    block = block_from_config(MLP, generator=generator(9)).to(torch.bfloat16)
    found = run(net=net, held_out=[held_out], train=[train], blocks={"stem": block}).sites[0]
    assert found.s_plugin == pytest.approx(run().sites[0].s_plugin, rel=0.3)


def test_default_candidates_of_a_half_precision_network_are_in_single_precision():
    model, (inputs, targets) = family("mlp").to(torch.bfloat16), family_data("mlp")
    batch = inputs.to(torch.bfloat16), targets
    report = probe(model, batches=[batch], train_batches=[batch], loss=CROSS_ENTROPY, reduction="mean")
    assert {p.dtype for b in report.blocks.values() for p in b.parameters()} == {torch.float32}


def test_a_frozen_network_is_probed_like_any_other():
    frozen = VectorNet().to(F64)
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    assert figures(run(net=frozen)) == figures(run())


def test_tied_weights_are_no_trouble():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(6, 6)
            self.place = nn.Identity()
            self.again = self.stem

        def forward(self, x):
            return self.again(self.place(torch.tanh(self.stem(x))))

    net = Tied().to(F64)
    inputs, targets = normal(40, 6, dtype=F64), torch.randint(0, 6, (40,), generator=generator())
    before = fingerprint(net)
    block = block_from_config(MLP, generator=generator(9)).to(F64)
    found = run(
        net=net, sites=["place"], blocks={"place": block}, held_out=[(inputs, targets)], train=[(inputs, targets)]
    )
    assert found.sites[0].s_plugin > 0
    assert_untouched(net, before)


def test_a_network_in_training_mode_with_dropout_is_probed_without_it():
    class Dropping(VectorNet):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def top(self, z):
            return super().top(self.drop(z))

    assert figures(run(net=Dropping().to(F64).train())) == figures(run())


def test_a_network_that_draws_random_numbers_in_eval_mode_leaves_the_stream_of_others_alone():
    class Noisy(VectorNet):
        def top(self, z):
            return super().top(z + 1e-9 * torch.randn_like(z))

    net = Noisy().to(F64)
    before = fingerprint(net)
    run(net=net)
    assert_untouched(net, before)


# --- bad input ------------------------------------------------------------------------------------


def test_targets_of_another_shape_are_refused_with_both_shapes():
    inputs, _ = data(20)
    with pytest.raises(UserError, match=r"loss cannot take outputs \(\d+, 3\) and targets \(\d+, 2\)"):
        run(held_out=[(inputs, torch.zeros(20, 2, dtype=torch.long))])


def test_a_loss_of_another_shape_than_its_reduction_is_refused():
    with pytest.raises(UserError, match=r"with reduction 'sum' the loss must give one number, got shape \(300,\)"):
        run(loss=LOSSES["none"], reduction="sum")
    with pytest.raises(UserError, match="with reduction 'none' the loss must give one number"):
        run(loss=LOSSES["sum"], reduction="none")


@pytest.mark.parametrize("level", [0.0, 0.5, -1.0])
def test_a_level_out_of_range_is_refused(level):
    with pytest.raises(UserError, match=r"level .* must be in \(0, 0\.5\)"):
        run(level=level)


def test_a_negative_ridge_is_refused():
    with pytest.raises(UserError, match="ridge -1 must be 0 or more"):
        run(ridge=-1)


def test_unknown_inner_weights_are_refused():
    model, batch = family("mlp"), family_data("mlp")
    with pytest.raises(UserError, match="unknown inner weights 'zeros': use 'copy', 'random' or both"):
        probe(model, batches=[batch], train_batches=[batch], loss=CROSS_ENTROPY, reduction="mean", inner="zeros")


def test_a_stream_that_is_not_finite_is_refused_with_its_place():
    class Broken(VectorNet):
        def __init__(self):
            super().__init__()
            self.side = nn.Identity()

        def top(self, z):
            self.side(z / 0.0)  # infinite, but the loss does not see it
            return super().top(z)

    block = block_from_config(MLP, generator=generator(9)).to(F64)
    with pytest.raises(UserError, match="features at 'side' are not finite"):
        run(net=Broken().to(F64), sites=["side"], blocks={"side": block})


def test_a_place_whose_features_are_all_zero_is_saturated_and_says_why():
    class Dead(MLPBlock):
        type_name = "dead"

        def features(self, z):
            return torch.zeros(*z.shape[:-1], 4, dtype=z.dtype)

    block = Dead(6, 4, bias=False).to(F64)
    site = run(blocks={"stem": block}).sites[0]
    assert (site.s_plugin, site.s, site.verdict) == (0.0, 0.0, "saturated")
    assert any("all features of the block are zero" in note for note in site.notes)


def test_a_place_on_which_the_loss_does_not_depend_is_saturated():
    class Beside(VectorNet):
        def __init__(self):
            super().__init__()
            self.side = nn.Linear(5, 6)
            self._draw(0)

        def forward(self, x):
            self.side(x)
            return super().forward(x)

    block = block_from_config(MLP, generator=generator(9)).to(F64)
    site = run(net=Beside().to(F64), sites=["side"], blocks={"side": block}).sites[0]
    assert (site.raw_rms, site.verdict) == (0.0, "saturated")


def test_a_projection_beside_that_does_not_fit_is_refused():
    candidate = Candidate(path="stem", block=block_from_config(MLP, generator=generator(9)).to(F64), beside=("head",))
    with pytest.raises(SiteError, match="'head' writes 3 channels, the block at 'stem' writes 6"):
        run(candidates=[candidate])


def test_something_beside_that_is_no_projection_is_refused():
    net = SequenceNet().to(F64)
    net.extra = nn.Identity()
    block = block_from_config({"type": "mlp", "width": 4, "hidden": 4}, generator=generator(9)).to(F64)
    with pytest.raises(SiteError, match="'extra' is a Identity beside a Linear"):
        run(net=net, candidates=[Candidate(path="stem", block=block, beside=("extra",))])


def test_samples_are_counted_and_an_empty_loader_is_refused():
    assert counted(batched(*data(10), 4), what="batches", need="", labelled=True).num == 10
    with pytest.raises(UserError, match="batches is empty: at least one"):
        counted([], what="batches", need="at least one", labelled=True)


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
    (candidate,) = (
        c for c in candidates(model, SignalGuided(axes=("width",), units=3), stage=0, seed=0) if c.path == path
    )
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
