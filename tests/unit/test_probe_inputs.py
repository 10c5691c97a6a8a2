"""A probe of networks in other number types, tied, frozen, with dropout; and of bad input."""

import numpy as np
import pytest
import torch
from probe_runs import CROSS_ENTROPY, MLP, batched, data, figures, run
from signal_twins import F64, LOSSES
from torch import nn
from torch_helpers import (
    SequenceNet,
    VectorNet,
    assert_untouched,
    family,
    family_data,
    fingerprint,
    generator,
    normal,
)

from growth_service.blocks import MLPBlock, block_from_config
from growth_service.errors import SiteError, UserError
from growth_service.probing import Candidate, probe
from growth_service.probing.samples import counted

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
