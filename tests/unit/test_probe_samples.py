"""What a probe does with the samples it gets: order, batches, ranks, looks, several candidates, number types."""

import copy
import math

import numpy as np
import pytest
import torch
from probe_runs import CROSS_ENTROPY, MLP, assert_close, batched, data, figures, run, until
from signal_twins import F64
from torch_helpers import (
    FAMILY_SITES,
    VectorNet,
    family,
    family_data,
    generator,
    normal,
)

from growth_service.blocks import block_from_config
from growth_service.core.confidence import spend
from growth_service.errors import UserError
from growth_service.models import build
from growth_service.probing import Looks, probe
from growth_service.probing.prepare import MAX_CHUNKS, chunk_size

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
