"""Probe, jumpboard and FLOP counter on live networks, against naive twins in float64.

The twins know neither hooks nor formulas: per-sample gradients come from one backward pass a
sample, tangents from setting one entry of the output projection to one at a time, the score from
least squares, cross-gradients from really inserting the block.

Tolerances: float64 all along, a few thousand well-scaled terms, so 1e-12 or better is expected;
the second moment squares the condition of the features, 1e-9 leaves room for that.
"""

import copy
import math

import numpy as np
import pytest
import torch
from signal_twins import (
    F64,
    LOSSES,
    gradient_rows,
    inserted_gradient,
    least_squares_score,
    naive_cross_gradients,
    naive_whitener,
    per_sample,
    stream,
    tangents,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch_helpers import (
    FAMILY_BLOCKS,
    FAMILY_SITES,
    ImageNet,
    SequenceNet,
    VectorNet,
    family,
    family_data,
    generator,
    normal,
)

from growth_service.blocks import MLPBlock, block_from_config, set_projection
from growth_service.growth import insert_block, new_units, widen
from growth_service.models import default_block_config, sites
from growth_service.models.flops import counted, flops_per_sample
from growth_service.probing import Candidate, jumpboard, probe
from growth_service.probing.jumpboard import clipped_direction

NUM = 24


def case(kind, *, bias=True, seed=0, num=NUM):
    """A network with one site ``stem``, a block for it, inputs and labels."""
    config, net, shape, targets = {
        "vector": ({"type": "mlp", "width": 6, "hidden": 4}, VectorNet(seed=seed), (5,), (num,)),
        "sequence": ({"type": "mlp", "width": 4, "hidden": 5}, SequenceNet(seed=seed), (7, 5), (num, 7)),
        "image": ({"type": "conv", "width": 4, "hidden": 4, "group_size": 2}, ImageNet(seed=seed), (2, 4, 4), (num,)),
    }[kind]
    block = block_from_config(config | {"bias": bias}, generator=generator(seed + 50)).to(F64)
    inputs = normal(num, *shape, seed=seed + 60, dtype=F64)
    return net.to(F64), block, inputs, torch.randint(0, 3, targets, generator=generator(seed + 70))


def measured(net, block, inputs, targets, *, site="stem", ridge=0.0, reduction="none", **arguments):
    """The certificate of one block, with the second moment from the inputs themselves."""
    arguments = {"batches": [(inputs, targets)], "train_batches": [(inputs, targets)], "pool": [inputs]} | arguments
    report = probe(
        net, sites=[site], blocks={site: block}, loss=LOSSES[reduction], reduction=reduction, ridge=ridge, **arguments
    )
    return report.sites[0]


# --- the score ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["vector", "sequence", "image"])
def test_the_plug_in_score_is_least_squares_on_the_explicit_jacobian(kind, bias):
    net, block, inputs, targets = case(kind, bias=bias)
    wanted = least_squares_score(gradient_rows(net, inputs, targets), tangents(block, stream(net, inputs)))
    assert measured(net, block, inputs, targets).s_plugin == pytest.approx(wanted, rel=1e-9)


def test_the_plug_in_score_is_exact_where_a_unit_has_more_numbers_than_are_kept():
    """40 x 111 numbers a unit are over the 4,096 that a row may have; the score itself must not be an estimate."""
    net, _, inputs, targets = case("vector")
    net.stem, net.head = nn.Linear(5, 40).to(F64), nn.Linear(40, 3).to(F64)
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=index))
    block = block_from_config({"type": "mlp", "width": 40, "hidden": 110}, generator=generator()).to(F64)
    g_NE = gradient_rows(net, inputs, targets)
    # 111 features interpolate 24 samples: all of the gradient can be expressed.
    assert measured(net, block, inputs, targets).s_plugin == pytest.approx(np.square(g_NE).sum(axis=1).mean(), rel=1e-9)


@pytest.mark.parametrize("kind", ["vector", "sequence", "image"])
def test_the_raw_gradient_sizes_are_those_of_single_samples(kind):
    net, block, inputs, targets = case(kind)
    norms_N = np.linalg.norm(gradient_rows(net, inputs, targets), axis=1)
    found = measured(net, block, inputs, targets)
    assert found.raw_rms == pytest.approx(math.sqrt(np.square(norms_N).mean()), rel=1e-12)
    assert found.ag_max == pytest.approx(norms_N.max(), rel=1e-12)


@pytest.mark.parametrize("kind", ["vector", "sequence", "image"])
def test_the_debiased_score_is_the_mean_product_of_whitened_gradients_of_different_samples(kind):
    net, block, inputs, targets = case(kind)
    held_out, held_out_targets = case(kind, seed=300)[2:]
    q_QQ, inflation = naive_whitener(block, stream(net, inputs), ridge=0.01)
    psi_NQ = naive_cross_gradients(net, block, held_out, held_out_targets) @ q_QQ
    n = len(psi_NQ)
    products = [float(psi_NQ[i] @ psi_NQ[j]) for i in range(n) for j in range(n) if i != j]
    found = measured(net, block, inputs, targets, batches=[(held_out, held_out_targets)], ridge=0.01)
    # absolute scale: the sum cancels down to T from terms of the size of its noise
    assert found.s == pytest.approx(np.mean(products) / inflation, rel=1e-9, abs=1e-9 * found.noise_sd)
    norm = math.sqrt(float(stream(net, inputs).square().sum()) / n)
    assert found.kappa == pytest.approx(norm * math.sqrt(max(found.s, 0.0)), rel=1e-9)


@pytest.mark.parametrize("kind", ["vector", "sequence", "image"])
def test_the_transfer_is_the_held_out_slope_along_the_training_direction(kind):
    net, block, inputs, targets = case(kind)
    held_out, held_out_targets = case(kind, seed=300)[2:]
    q_QQ, inflation = naive_whitener(block, stream(net, inputs), ridge=0.01)
    train_Q = naive_cross_gradients(net, block, inputs, targets).mean(axis=0) @ q_QQ
    held_out_Q = naive_cross_gradients(net, block, held_out, held_out_targets).mean(axis=0) @ q_QQ
    found = measured(net, block, inputs, targets, batches=[(held_out, held_out_targets)], ridge=0.01)
    assert found.s_train == pytest.approx(float(train_Q @ train_Q), rel=1e-9)
    wanted = float(train_Q @ held_out_Q) / math.sqrt(train_Q @ train_Q) / math.sqrt(inflation)
    assert found.transfer == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("kind", ["vector", "sequence", "image"])
def test_the_descent_direction_solves_the_normal_equations(kind):
    net, block, inputs, targets = case(kind)
    found = measured(net, block, inputs, targets, ridge=0.01)
    q_QQ, _ = naive_whitener(block, stream(net, inputs), ridge=0.01)
    gradient_Q = naive_cross_gradients(net, block, inputs, targets).mean(axis=0)
    wanted = -(gradient_Q @ q_QQ @ q_QQ).reshape(found.descent_direction.matrix_DK.shape)
    np.testing.assert_allclose(found.descent_direction.matrix_DK, wanted, rtol=1e-9, atol=1e-9 * np.abs(wanted).max())


# --- the cross-gradient ---------------------------------------------------------------------------


def family_candidates(model, name, dtype):
    depth = [
        Candidate(
            path=s.path, block=block_from_config(default_block_config(model, s), generator=generator(i)).to(dtype)
        )
        for i, s in enumerate(sites(model))
    ]
    units = 3 if name == "mlp" else 4
    width = [
        Candidate(
            path=path, kind="width",
            block=new_units(model.get_submodule(path), units=units, generator=generator(70)).to(dtype),
        )
        for path in FAMILY_BLOCKS[name]
    ]  # fmt: skip
    return depth + width


# float32: 6e-8 a rounding, grown by sums over a few hundred terms in another order than autograd's
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_the_cross_gradient_is_the_gradient_of_the_inserted_zero_projection(name, dtype, tolerance):
    model = family(name, dtype=dtype)
    inputs, targets = family_data(name, dtype=dtype)
    chosen = family_candidates(model, name, dtype)
    report = probe(
        model, batches=[(inputs, targets)], train_batches=[(inputs[:9], targets[:9]), (inputs[9:], targets[9:])],
        loss=nn.CrossEntropyLoss(), reduction="mean", candidates=chosen,
    )  # fmt: skip
    assert len(report.sites) == len(FAMILY_SITES[name]) + len(FAMILY_BLOCKS[name])
    for candidate, found in zip(chosen, report.sites, strict=True):
        wanted = inserted_gradient(model, candidate, inputs, targets)
        np.testing.assert_allclose(found.cross_gradient, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["vector", "sequence", "image"])
def test_what_the_loss_does_over_samples_changes_no_figure(kind):
    net, block, inputs, targets = case(kind)
    none, total, mean = (measured(net, block, inputs, targets, reduction=r) for r in ("none", "sum", "mean"))
    assert_equal_figures(total, none)
    assert_equal_figures(mean, none)


# --- what must not matter -------------------------------------------------------------------------


def split(inputs, targets, sizes):
    return list(zip(inputs.split(sizes), targets.split(sizes), strict=True))


def assert_equal_figures(found, wanted):
    """All numbers of two certificates, and what they are about."""
    noise = wanted.noise_sd  # T and its limits cancel from terms of this size
    for name, value in wanted.to_dict().items():
        near = pytest.approx(value, rel=1e-9, abs=1e-9 * noise) if isinstance(value, float) else value
        assert found.to_dict()[name] == near, name


@pytest.mark.parametrize("sizes", [[8, 8, 8], [7, 17]])
@pytest.mark.parametrize("kind", ["vector", "sequence", "image"])
@pytest.mark.parametrize("has_pool", [True, False])
def test_the_split_into_batches_changes_no_figure(kind, sizes, has_pool):
    net, block, inputs, targets = case(kind)

    def certificate(parts):
        pool = [part for part, _ in parts] if has_pool else None
        return measured(net, block, inputs, targets, batches=parts, train_batches=parts, ridge=0.01, pool=pool)

    assert_equal_figures(certificate(split(inputs, targets, sizes)), certificate([(inputs, targets)]))


def probe_sites(model, name, paths, **arguments):
    inputs, targets = family_data(name, dtype=F64)
    batches = [(inputs, targets)]
    return probe(
        model, batches=batches, train_batches=batches, sites=paths, loss=nn.CrossEntropyLoss(), reduction="mean",
        **arguments,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_the_order_of_sites_changes_no_figure_of_given_blocks(name):
    model, paths = family(name, dtype=F64), FAMILY_SITES[name]
    blocks = {c.path: c.block for c in family_candidates(model, name, F64) if c.kind == "depth"}
    forwards, backwards = (probe_sites(model, name, p, blocks=blocks).sites for p in (paths, paths[::-1]))
    for found, wanted in zip(backwards[::-1], forwards, strict=True):
        assert_equal_figures(found, wanted)


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_the_order_of_sites_changes_no_figure_of_default_blocks(name):
    model, paths = family(name, dtype=F64), FAMILY_SITES[name]
    forwards, backwards = (probe_sites(model, name, p).sites for p in (paths, paths[::-1]))
    for found, wanted in zip(backwards[::-1], forwards, strict=True):
        assert_equal_figures(found, wanted)


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_other_candidates_change_no_figure_of_a_candidate(name):
    """All are measured in one pass: a zero block sees nothing of the others."""
    model, inputs = family(name, dtype=F64), family_data(name, dtype=F64)
    chosen = family_candidates(model, name, F64)

    def run(some):
        return probe(
            model, batches=[inputs], train_batches=[inputs], loss=nn.CrossEntropyLoss(), reduction="mean",
            candidates=some,
        )  # fmt: skip

    together = run(chosen).sites
    for alone, found in ((run([c]).sites[0], s) for c, s in zip(chosen, together, strict=True)):
        assert alone.s == pytest.approx(found.s, rel=1e-9, abs=1e-9 * found.noise_sd)
        np.testing.assert_allclose(alone.cross_gradient, found.cross_gradient, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("factor", [0.01, 10.0, 100.0])
def test_kappa_does_not_change_where_the_stream_is_scaled_and_its_readers_undo_it(factor):
    class Scaled(VectorNet):
        def top(self, z):
            return super().top(z / factor)

    net, block, inputs, targets = case("vector")
    block.norm.eps = 0.0  # else the block itself knows the scale
    scaled = Scaled().to(F64)
    scaled.load_state_dict(net.state_dict())
    with torch.no_grad():
        scaled.stem.weight.mul_(factor)
        scaled.stem.bias.mul_(factor)
    before, after = measured(net, block, inputs, targets), measured(scaled, block, inputs, targets)
    assert before.kappa > 0
    for name in ("kappa", "kappa_ucl", "predicted_gain", "transfer_gain", "eta", "snr", "realizable_share"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-9), name
    assert after.s * factor**2 == pytest.approx(before.s, rel=1e-9)
    assert after.ag_max * factor == pytest.approx(before.ag_max, rel=1e-9)  # the raw gradient is not scale-free


def test_the_score_does_not_change_where_features_are_mixed():
    """phi -> M phi by an orthogonal mix of the units before a linear activation: the same tangent space."""

    class Linearised(MLPBlock):
        def features(self, z):
            return self.inner(self.norm(z))

    net, _, inputs, targets = case("vector")
    block = Linearised(6, 4).to(F64)
    block.reset(generator())
    mixed = copy.deepcopy(block)
    mix = normal(4, 4, seed=9, dtype=F64) + 3 * torch.eye(4, dtype=F64)
    with torch.no_grad():
        mixed.inner.weight.copy_(mix @ block.inner.weight)
        mixed.inner.bias.copy_(mix @ block.inner.bias)
    before, after = (measured(net, b, inputs, targets) for b in (block, mixed))
    assert after.s_plugin == pytest.approx(before.s_plugin, rel=1e-9)


# --- the verdict ----------------------------------------------------------------------------------


class Reader(nn.Module):
    """``out = z``: with a squared loss the activation gradient is ``z - target``, whatever a test wants it to be."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 6)
        with torch.no_grad():
            self.stem.weight.copy_(normal(6, 5, seed=1))
            self.stem.bias.copy_(normal(6, seed=2))

    def forward(self, x):
        return self.stem(x)


def half_squares(outputs, targets):
    """With a floor of one nat, since predicted gains are capped at the loss."""
    return 1.0 + 0.5 * (outputs - targets).square().sum(dim=1)


def judged(gradient_of):
    """Probe a network whose activation gradients are ``gradient_of(phi, noise)``, of size 0.1 a sample."""
    net = Reader().to(F64)
    block = block_from_config({"type": "mlp", "width": 6, "hidden": 4}, generator=generator(5)).to(F64)
    inputs = normal(512, 5, seed=6, dtype=F64)
    with torch.no_grad():
        z, phi = net(inputs), block.features(net(inputs))
    phi = torch.cat([phi, torch.ones(512, 1, dtype=F64)], dim=1)
    g = gradient_of(phi, normal(512, 6, seed=7, dtype=F64))
    g = 0.1 * g / g.square().sum(dim=1).mean().sqrt()
    batches = [(inputs, z - g)]
    return probe(
        net, batches=batches, train_batches=batches, loss=half_squares, reduction="none", sites=["stem"],
        blocks={"stem": block}, ridge=0.0, tolerance=0.01,
    )  # fmt: skip


def test_a_planted_signal_that_the_block_can_express_is_useful():
    report = judged(lambda phi, noise: -phi @ normal(5, 6, seed=8, dtype=F64))
    assert report.verdict == "useful"
    assert report.best is not None
    assert report.best.realizable_share == pytest.approx(1.0, rel=0.05)  # debiased: 1 up to K/n = 1 %


def test_a_gradient_of_equal_size_that_the_features_cannot_express_is_saturated():
    def off_the_features(phi, noise):
        return noise - phi @ torch.linalg.lstsq(phi, noise).solution

    report = judged(off_the_features)
    assert np.abs(report.sites[0].cross_gradient).max() < 1e-12  # G = 0 exactly, up to rounding
    assert report.sites[0].raw_rms == pytest.approx(0.1, rel=1e-9)
    assert report.verdict == "saturated"


def test_a_network_at_the_optimum_of_its_loss_is_saturated():
    net = Reader().to(F64)
    inputs = normal(32, 5, dtype=F64)
    with torch.no_grad():
        batches = [(inputs, net(inputs))]
    report = probe(net, batches=batches, train_batches=batches, loss=half_squares, reduction="none", sites=["stem"])
    assert report.verdict == "saturated"
    assert report.sites[0].kappa_ucl == 0.0


# --- the jumpboard --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vector", "sequence", "image"])
def test_a_small_step_along_the_projected_direction_lowers_the_loss_as_predicted(kind):
    net, block, inputs, targets = case(kind)
    found = measured(net, block, inputs, targets)
    leap = jumpboard(
        net, site="stem", block=block, direction=found.descent_direction.matrix_DK, batches=[(inputs, targets)],
        loss=LOSSES["sum"], reduction="sum",
    )  # fmt: skip
    relative, loss = leap.tried[0]
    assert relative == 1e-3
    norm = math.sqrt(float(stream(net, inputs).square().sum()) / NUM)
    # r * kappa is the first order; curvature bends it by about 1 % at a relative step of 1e-3 (MATH.md 3.2)
    assert 0.97 <= (leap.loss_before - loss) / (relative * norm * math.sqrt(found.s_plugin)) <= 1.03


@pytest.mark.parametrize("kind", ["vector", "sequence", "image"])
def test_the_jumpboard_is_the_network_with_its_step_really_inserted(kind):
    net, block, inputs, targets = case(kind)
    direction = measured(net, block, inputs, targets).descent_direction.matrix_DK
    leap = jumpboard(
        net, site="stem", block=block, direction=direction, batches=split(inputs, targets, [10, 14]),
        loss=LOSSES["mean"], reduction="mean",
    )  # fmt: skip
    assert leap.relative_step > 0
    grown, inserted = copy.deepcopy(net), copy.deepcopy(block)
    insert_block(grown, site="stem", block=inserted, generator=generator())
    set_projection(inserted.project, torch.from_numpy(leap.matrix_DK))
    with torch.no_grad():
        assert float(LOSSES["mean"](grown(inputs), targets)) == pytest.approx(leap.loss_after, rel=1e-12)
        assert float(LOSSES["mean"](net(inputs), targets)) == pytest.approx(leap.loss_before, rel=1e-12)
        z = stream(net, inputs)
        assert float(inserted(z).norm() / z.norm()) == pytest.approx(leap.relative_step, rel=1e-9)


def test_the_direction_of_a_jumpboard_clips_the_gradients_of_a_few_samples():
    """Gradients longer than 99 % of all are shortened to that length before they are averaged."""

    def energy(outputs, _targets):
        return outputs.square().sum(dim=1)

    net, _, inputs, targets = case("vector", num=150)
    # 15 features: all 150 samples enter the second moment
    block = block_from_config({"type": "mlp", "width": 6, "hidden": 14}, generator=generator(50)).to(F64)
    inputs[3] *= 40.0  # one sample far away, with a gradient far longer than the others
    g_NE, jac_NEQ = gradient_rows(net, inputs, targets, loss=energy), tangents(block, stream(net, inputs))
    norms_N = np.linalg.norm(g_NE, axis=1)
    limit = np.quantile(norms_N, 0.99)
    clipped_NE = g_NE * np.minimum(1.0, limit / norms_N)[:, None]
    q_QQ, _ = naive_whitener(block, stream(net, inputs), ridge=0.01)
    wanted = -(np.einsum("neq,ne->q", jac_NEQ, clipped_NE) / 150) @ q_QQ @ q_QQ

    found, _ = clipped_direction(
        net, candidate=Candidate(path="stem", block=block), batches=split(inputs, targets, [70, 80]),
        loss=energy, reduction="none", ridge=0.01, mapper=lambda function, items: [function(i) for i in items],
    )  # fmt: skip

    assert norms_N.max() > 2 * limit
    np.testing.assert_allclose(found.flatten(), wanted, rtol=1e-9, atol=1e-9 * np.abs(wanted).max())


def test_the_jumpboard_takes_the_best_step_of_its_grid():
    net, block, inputs, targets = case("vector")
    direction = measured(net, block, inputs, targets).descent_direction.matrix_DK
    leap = jumpboard(
        net, site="stem", block=block, direction=direction, batches=[(inputs, targets)], loss=per_sample,
        reduction="none",
    )  # fmt: skip
    assert (leap.relative_step, leap.loss_after) == min(leap.tried, key=lambda t: t[1])
    assert leap.loss_after < leap.loss_before


def test_the_jumpboard_of_an_uphill_direction_is_the_old_network():
    net, block, inputs, targets = case("vector")
    uphill = -measured(net, block, inputs, targets).descent_direction.matrix_DK
    leap = jumpboard(
        net, site="stem", block=block, direction=uphill, batches=[(inputs, targets)], loss=per_sample, reduction="none"
    )
    assert (leap.relative_step, leap.loss_after) == (0.0, leap.loss_before)
    assert not leap.matrix_DK.any()


# --- compute --------------------------------------------------------------------------------------


def grown_family(name):
    model = family(name)
    insert_block(model, site=FAMILY_SITES[name][-1], generator=generator(1))
    widen(model, site=FAMILY_BLOCKS[name][0], units=2, generator=generator(2))
    return model


@pytest.mark.parametrize("build", [family, grown_family])
@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_the_flop_counter_counts_what_torch_counts(name, build):
    model, (inputs, _) = build(name), family_data(name, num=7)
    with FlopCounterMode(display=False) as forward:
        model(inputs)
    with FlopCounterMode(display=False) as both:
        model(inputs).sum().backward()
    assert counted(lambda: model(inputs)) == forward.get_total_flops()
    assert counted(lambda: model(inputs).sum().backward()) == both.get_total_flops()


@pytest.mark.parametrize("build", [family, grown_family])
@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_a_batch_costs_its_samples_times_the_cost_of_one(name, build):
    model, (inputs, _) = build(name), family_data(name, num=7)
    with FlopCounterMode(display=False) as forward:
        model(inputs)
    with FlopCounterMode(display=False) as both:
        model(inputs).sum().backward()
    cost = flops_per_sample(model, inputs[:1])
    assert (7 * cost.forward, 7 * cost.train) == (forward.get_total_flops(), both.get_total_flops())


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_the_flops_that_a_candidate_promises_to_add_are_what_its_insertion_adds(name):
    model, (inputs, targets) = family(name), family_data(name)
    chosen = family_candidates(model, name, torch.float32)
    report = probe(
        model, batches=[(inputs, targets)], train_batches=[(inputs, targets)], loss=nn.CrossEntropyLoss(),
        reduction="mean", candidates=chosen,
    )  # fmt: skip
    before = flops_per_sample(model, inputs[:1]).train
    for candidate, found in zip(chosen, report.sites, strict=True):
        grown, block = copy.deepcopy(model), copy.deepcopy(candidate.block)
        if candidate.kind == "depth":
            insert_block(grown, site=candidate.path, block=block, generator=generator())
        else:
            widen(grown, site=candidate.path, units=block, generator=generator())
        assert flops_per_sample(grown, inputs[:1]).train - before == found.added_flops


# --- held-out gain of a jumpboard and of a short trial --------------------------------------------


def test_the_held_out_gain_is_that_of_the_network_with_the_step_inserted():
    net, block, inputs, targets = case("vector")
    held_out, held_out_targets = case("vector", seed=300)[2:]
    direction = measured(net, block, inputs, targets).descent_direction.matrix_DK
    leap = jumpboard(
        net, site="stem", block=block, direction=direction, batches=[(inputs, targets)], loss=LOSSES["mean"],
        reduction="mean", held_out=split(held_out, held_out_targets, [7, 17]),
    )  # fmt: skip
    grown, inserted = copy.deepcopy(net), copy.deepcopy(block)
    insert_block(grown, site="stem", block=inserted, generator=generator())
    set_projection(inserted.project, torch.from_numpy(leap.matrix_DK))
    with torch.no_grad():
        before, after = (float(LOSSES["mean"](n(held_out), held_out_targets)) for n in (net, grown))
    assert leap.held_out_gain == pytest.approx(before - after, rel=1e-9)
    assert (leap.trial_gain, leap.trial_steps) == (None, 0)


def test_a_short_trial_on_the_projection_alone_gains_more_on_its_own_samples_and_changes_nothing_else():
    net, block, inputs, targets = case("vector", num=120)
    direction = measured(net, block, inputs, targets).descent_direction.matrix_DK
    before = {k: v.clone() for k, v in [*net.state_dict().items(), *block.state_dict().items()]}
    gains = [
        jumpboard(
            net, site="stem", block=block, direction=direction, batches=split(inputs, targets, 40),
            loss=LOSSES["mean"], reduction="mean", held_out=[(inputs, targets)], trial_steps=steps,
        )
        for steps in (1, 60)
    ]  # fmt: skip
    assert gains[1].held_out_gain < gains[0].trial_gain < gains[1].trial_gain
    for name, value in [*net.state_dict().items(), *block.state_dict().items()]:
        assert torch.equal(value, before[name]), name


def test_a_trial_without_held_out_samples_is_refused():
    net, block, inputs, targets = case("vector")
    direction = measured(net, block, inputs, targets).descent_direction.matrix_DK
    with pytest.raises(ValueError, match="a trial is judged on samples it was not trained on: pass held_out"):
        jumpboard(
            net, site="stem", block=block, direction=direction, batches=[(inputs, targets)], loss=per_sample,
            reduction="none", trial_steps=3,
        )  # fmt: skip


def test_a_jumpboard_of_a_block_without_a_projection_is_refused():
    net, _, inputs, targets = case("vector")
    with pytest.raises(ValueError, match="a jumpboard moves an output projection: Linear has none"):
        jumpboard(
            net, site="stem", block=nn.Linear(6, 6), direction=np.zeros((6, 6)), batches=[(inputs, targets)],
            loss=per_sample, reduction="none",
        )  # fmt: skip
