"""Attention heads, averages that follow, optimisers that share a network, baselines that do not preserve."""

import copy

import numpy as np
import pytest
import torch
from test_stream_width import inputs_of, loss_of, named, network, train
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel
from torch_helpers import assert_untouched, fingerprint, generator

from growth_service import load_network, save_network
from growth_service.blocks import ConvBlock, MLPBlock, TransformerBlock, block_from_config
from growth_service.core.receipts import Receipt
from growth_service.errors import SiteError, UserError
from growth_service.growth import (
    duplicate_units,
    follow,
    growth_log,
    insert_block,
    merge,
    rebuild,
    remove_block,
    remove_units,
    widen,
    widen_stream,
)
from growth_service.growth.transplant import adopt
from growth_service.models import build, sites
from growth_service.models.sites import blocks_of

BRANCH = "groups.0.blocks.0.branch"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["gpt", "gpt-rotary-rms"])
def test_new_heads_change_no_output_and_no_old_gradient(name, training):
    model, x = network(name).train(training), inputs_of(name)
    before = model(x)
    old = torch.autograd.grad(loss_of(model, name), list(model.parameters()))
    names = list(named(model))
    receipt = widen(model, site=BRANCH, heads=3, generator=generator(), check_batch=x)
    assert receipt.output_change == 0.0
    assert torch.equal(model(x), before)
    after = torch.autograd.grad(loss_of(model, name), [named(model)[n] for n in names])
    assert all(torch.equal(a, b) for a, b in zip(after, old, strict=True))
    assert receipt.block["type"] == "heads"
    assert (receipt.block["heads"], receipt.block["head_dim"]) == (3, 4)


@pytest.mark.parametrize("name", ["gpt", "gpt-rotary-rms"])
def test_heads_that_copy_the_old_ones_compute_what_they_do(name):
    """With the host's own matrices in the branch, a host without heads of its own would be the same."""
    model = network(name)
    host = model.get_submodule(BRANCH)
    widen(model, site=BRANCH, heads=2, generator=generator())
    branch = host.widened["0"]
    for part in ("query", "key", "value"):
        branch.get_submodule(part).load_state_dict(host.get_submodule(part).state_dict())
    z = torch.randn(3, 7, 8, generator=generator(1))
    torch.testing.assert_close(branch.features(z), host.features(z)[..., :8])


def test_new_units_of_a_transformer_block_read_the_stream_through_its_second_norm():
    model = network("gpt")
    host = model.get_submodule(BRANCH)
    widen(model, site=BRANCH, units=12, generator=generator())
    branch = host.widened["0"]
    branch.inner.load_state_dict(host.inner.state_dict())
    z = torch.randn(3, 7, 8, generator=generator(1))
    torch.testing.assert_close(branch.features(z), host.features(z)[..., 8:])


def test_gated_units_are_added_to_a_gated_block():
    model = network("gpt-rotary-rms")
    block = TransformerBlock(8, 2, 6, gated=True, activation="silu", norm="rms", bias=False)
    path = insert_block(model, site="groups.0.entry", block=block, generator=generator()).path
    receipt = widen(model, site=path, units=5, generator=generator(), check_batch=inputs_of("gpt-rotary-rms"))
    assert (receipt.output_change, receipt.block["gated"], receipt.block["activation"]) == (0.0, True, "silu")


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [({"heads": 2}, "no attention heads"), ({}, "one of the two"), ({"units": 2, "heads": 2}, "one of the two")],
)
def test_heads_are_refused_where_there_are_none(kwargs, text):
    model = network("mlp")
    before = fingerprint(model)
    with pytest.raises(UserError, match=text):
        widen(model, site=BRANCH, generator=generator(), **kwargs)
    assert_untouched(model, before)


# --- copies that follow ---------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [copy.deepcopy, AveragedModel])
@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt"])
def test_an_average_takes_the_steps_that_its_network_took(name, wrap):
    model, x = network(name), inputs_of(name)
    average = wrap(model)
    inner = average.module if wrap is AveragedModel else average
    with torch.no_grad():
        for p in inner.parameters():
            p.mul_(0.9)
    before = inner(x).detach()
    insert_block(model, site="groups.0.entry", generator=generator(1))
    widen(model, site=BRANCH, units=4, generator=generator(2))
    follow(average, model)
    assert torch.equal(inner(x), before)
    widen_stream(model, site="groups.0.entry", channels=4, generator=generator(3))
    remove_units(model, site=BRANCH, units=[0, 1])
    taken = follow(average, model)
    assert [r.kind for r in taken] == ["stream", "shrink"]
    assert growth_log(inner) == growth_log(model)
    assert [(n, p.shape) for n, p in inner.named_parameters()] == [(n, p.shape) for n, p in model.named_parameters()]
    new = [n for r in growth_log(model)[:2] for n in r.parameters if "grown" in n or "widened" in n]
    assert all(torch.equal(named(inner)[n], named(model)[n]) for n in new if n in named(inner))
    if wrap is AveragedModel:
        average.update_parameters(model)


def test_a_copy_that_has_grown_in_another_way_is_refused():
    model = network("mlp")
    other = copy.deepcopy(model)
    insert_block(model, site="groups.0.entry", generator=generator())
    insert_block(other, site="groups.0.blocks.1", generator=generator())
    with pytest.raises(UserError, match="not the first of the network's 1"):
        follow(other, model)


# --- optimisers -----------------------------------------------------------------------------------


def test_a_new_parameter_joins_the_group_of_its_nearest_relative():
    model = network("mlp")
    first = [p for n, p in model.named_parameters() if n.startswith("groups.0.blocks.1")]
    rest = [p for p in model.parameters() if all(p is not q for q in first)]
    optimizer = optim.AdamW([{"params": rest, "lr": 1e-2}, {"params": first, "lr": 1e-4}])
    near = insert_block(model, site="groups.0.blocks.1", generator=generator(), optimizer=optimizer)
    far = insert_block(model, site="groups.0.blocks.0", generator=generator(), optimizer=optimizer)
    groups = [{id(p) for p in g["params"]} for g in optimizer.param_groups]
    assert all(id(named(model)[n]) in groups[1] for n in near.parameters)
    assert all(id(named(model)[n]) in groups[0] for n in far.parameters)


def test_two_optimisers_share_a_network_as_muon_and_adamw_do():
    model, name = network("gpt"), "gpt"
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n]
    rest = [p for p in model.parameters() if all(p is not q for q in hidden)]
    muon, adamw = optim.Muon(hidden, lr=1e-2), optim.AdamW(rest, lr=1e-3)

    def step():
        for one in (muon, adamw):
            one.zero_grad()
        loss_of(model, name).backward()
        for one in (muon, adamw):
            one.step()

    step()
    known = {n: copy.deepcopy({**muon.state, **adamw.state}[p]) for n, p in named(model).items()}
    path = insert_block(model, site="groups.0.blocks.0", generator=generator(), optimizer=[muon, adamw]).path
    new = {n: p for n, p in named(model).items() if n.startswith(path)}
    in_muon = {id(p) for g in muon.param_groups for p in g["params"]}
    assert all((id(p) in in_muon) == (p.ndim == 2) for p in new.values())
    states = {**muon.state, **adamw.state}
    assert all(torch.equal(states[named(model)[n]][k], v) for n, old in known.items() for k, v in old.items())
    step()
    remove_block(model, block=path, optimizer=[muon, adamw])
    both = [p for one in (muon, adamw) for g in one.param_groups for p in g["params"]]
    assert len(both) == len(list(model.parameters()))
    step()


@pytest.mark.parametrize("variant", [{"foreach": True}, {"fused": True}])
def test_foreach_and_fused_optimisers_go_on(variant):
    model = network("mlp")
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, **variant)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(model, "mlp", optimizer, 3)
    old = {n: optimizer.state[p]["exp_avg"].clone() for n, p in named(model).items()}
    receipt = insert_block(model, site="groups.0.entry", generator=generator(), optimizer=optimizer)
    assert all(torch.equal(optimizer.state[named(model)[n]]["exp_avg"], v) for n, v in old.items())
    train(model, "mlp", optimizer, 1)
    scheduler.step()
    assert all(float(optimizer.state[named(model)[n]]["step"]) == 1 for n in receipt.parameters)
    assert all(float(optimizer.state[named(model)[n]]["step"]) == 4 for n in old)


def test_a_gradient_scaler_goes_on():
    model = network("mlp")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for grow in (True, False):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, "mlp")).backward()
        scaler.step(optimizer)
        scaler.update()
        if grow:
            insert_block(model, site="groups.0.entry", generator=generator(), optimizer=optimizer)
    assert model.groups[0].entry.grown["0"].project.weight.abs().max() > 0


def test_a_parameter_is_adopted_once():
    model = network("mlp")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    adopt(optimizer, named(model), model=model)
    assert len(optimizer.param_groups[0]["params"]) == len(named(model))


# --- baselines, refusals --------------------------------------------------------------------------


def test_a_baseline_that_does_not_preserve_says_how_much_it_changed():
    """Stacking: a whole copy of a block, its last layer too."""
    model, x = network("mlp"), inputs_of("mlp")
    before = model(x).detach()
    block = copy.deepcopy(model.get_submodule(BRANCH))
    with pytest.raises(UserError, match="not zero"):
        insert_block(model, site="groups.0.blocks.0", block=block, generator=generator(), check_batch=x)
    with pytest.raises(UserError, match="check_batch"):
        insert_block(model, site="groups.0.blocks.0", block=block, generator=generator(), preserve=False)
    receipt = insert_block(
        model, site="groups.0.blocks.0", block=block, generator=generator(), check_batch=x, preserve=False
    )
    assert receipt.output_change == float((model(x) - before).detach().abs().max()) > 0
    twin = rebuild(build(model.spec, seed=0), growth_log(model))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))


class Shared(nn.Module):
    """One layer at two places."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.again = self.stem

    def forward(self, x):
        return self.again(torch.relu(self.stem(x)))


def test_a_module_at_two_places_is_refused():
    model, block = Shared(), block_from_config(MLPBlock(4, 4).config(), generator=generator())
    before = fingerprint(model)
    with pytest.raises(SiteError, match="2 places"):
        insert_block(model, site="stem", block=block, generator=generator())
    assert_untouched(model, before)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_scripted_networks_are_refused():
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    block = block_from_config(MLPBlock(3, 4).config(), generator=generator())
    with pytest.raises(UserError, match="cannot be grown"):
        insert_block(model, site="0", block=block, generator=generator())


# --- every family, every place --------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt", "gpt-rotary-rms"])
def test_every_step_at_every_place_leaves_outputs_and_old_gradients_equal_bit_for_bit(name, training):
    model, x = network(name).train(training), inputs_of(name)
    before = model(x)
    names = list(named(model))
    old = torch.autograd.grad(loss_of(model, name), list(model.parameters()))
    steps = [("insert", site.path, {}) for site in sites(model)]
    steps += [("widen", path, {"units": 4}) for path in blocks_of(model)]
    steps += [("widen", path, {"heads": 1}) for path, b in blocks_of(model).items() if b.type_name == "transformer"]
    for kind, path, kwargs in steps:
        step = insert_block if kind == "insert" else widen
        receipt = step(model, site=path, generator=generator(1), check_batch=x, **kwargs)
        assert receipt.output_change == 0.0
        assert torch.equal(model(x), before)
        after = torch.autograd.grad(loss_of(model, name), [named(model)[n] for n in names])
        assert all(torch.equal(a, b) for a, b in zip(after, old, strict=True)), path


@pytest.mark.parametrize("step", ["insert", "units", "heads"])
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_new_parameters_move_by_no_more_than_adam_does_from_zero(kind, step):
    """A correct Adam reaches 1.156 of its rate; an inherited step count would give several times the rate."""
    name, rate = "gpt", 1e-3
    model = network(name)
    optimizer = kind(model.parameters(), lr=rate, weight_decay=0.0)
    train(model, name, optimizer, 60)
    if step == "insert":
        receipt = insert_block(model, site="groups.0.blocks.0", generator=generator(1), optimizer=optimizer)
    else:
        receipt = widen(model, site=BRANCH, **{step: 2}, generator=generator(1), optimizer=optimizer)
    largest = 0.0
    for _ in range(20):
        before = {n: named(model)[n].detach().clone() for n in receipt.parameters}
        train(model, name, optimizer, 1)
        largest = max(largest, *(float((named(model)[n] - v).detach().abs().max()) for n, v in before.items()))
    assert 0.5 * rate < largest <= 1.2 * rate


# --- copies of units ------------------------------------------------------------------------------


@pytest.mark.parametrize("wider", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt-rotary-rms"])
def test_copies_of_units_leave_outputs_equal_to_rounding_and_part_in_training(name, dtype, wider):
    model = network(name, dtype=dtype)
    x = inputs_of(name, dtype=dtype)
    if wider:
        widen_stream(model, site="groups.0.entry", channels=4, generator=generator(9))
    host = model.get_submodule(BRANCH)
    before, units = model(x).detach(), host.hidden
    receipt = duplicate_units(model, site=BRANCH, units=units, generator=generator(1), check_batch=x)
    bound = (5e-6 if dtype == torch.float32 else 1e-12) * float(before.abs().max())
    assert 0 <= receipt.output_change <= bound
    assert float((model(x) - before).detach().abs().max()) <= bound
    branch = host.widened["0"]
    assert sorted(branch.inner.weight.flatten(1).sum(1).tolist()) == pytest.approx(
        sorted(host.inner.weight.flatten(1).sum(1).tolist())
    )
    assert float(branch.project.weight.detach().abs().sum()) > 0
    loss_of(model, name, dtype=dtype).backward()
    ratio = branch.inner.weight.grad.norm() / host.inner.weight.grad.norm() if not wider else torch.tensor(0.5)
    assert float(ratio) == pytest.approx(0.5, rel=1e-3)  # a third to two thirds: the gradients differ, so they part
    twin = rebuild(build(model.spec, seed=0).to(dtype), growth_log(model))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize(
    ("name", "units", "text"),
    [
        ("mlp", 6, "from 1 to 5"),
        ("mlp", 0, "from 1 to 5"),
        ("resnet", 3, "multiple of 2"),
        ("gpt", 2, "do not read the stream itself"),
    ],
)
def test_units_that_cannot_be_copied_are_refused(name, units, text):
    model = network(name)
    before = fingerprint(model)
    with pytest.raises(UserError, match=text):
        duplicate_units(model, site=BRANCH, units=units, generator=generator(), check_batch=inputs_of(name))
    assert_untouched(model, before)


def test_copies_that_change_outputs_are_taken_back(monkeypatch):
    from growth_service.growth import duplicate

    model, x = network("mlp"), inputs_of("mlp")
    before = fingerprint(model)
    monkeypatch.setattr(duplicate, "rounding_of", lambda _: -1.0)
    with pytest.raises(UserError, match="more than rounding"):
        duplicate_units(model, site=BRANCH, units=2, generator=generator(), check_batch=x)
    assert_untouched(model, before)


# --- merging --------------------------------------------------------------------------------------


def grown_and_trained(name):
    model = network(name)
    if "gpt" in name:
        widen(model, site=BRANCH, heads=2, generator=generator(1))
    for seed in range(2):
        widen(model, site=BRANCH, units=4, generator=generator(2 + seed))
    insert_block(model, site="groups.0.blocks.0", generator=generator(4))
    widen_stream(model, site="groups.0.entry", channels=4, generator=generator(5))
    widen(model, site="groups.0.blocks.0.grown.0", units=4, generator=generator(6))
    train(model, name, optim.AdamW(model.parameters(), lr=1e-2), 5)
    return model


@pytest.mark.parametrize(
    ("name", "folded"),
    [
        ("mlp", [f"{BRANCH}.widened.0", f"{BRANCH}.widened.1", "groups.0.blocks.0.grown.0.widened.0"]),
        ("resnet", []),
        ("gpt", []),  # its units read the stream plus the old heads
        (
            "gpt-rotary-rms",
            [f"{BRANCH}.widened.{i}" for i in range(3)] + ["groups.0.blocks.0.grown.0.widened.0"],
        ),
    ],
)
def test_a_merged_network_computes_the_same_with_fewer_and_larger_matrices(name, folded):
    model, x = grown_and_trained(name), inputs_of(name)
    before, hidden = model(x).detach(), model.get_submodule(BRANCH).hidden
    assert merge(model) == folded
    torch.testing.assert_close(model(x), before, rtol=0, atol=5e-6 * float(before.abs().max()))
    assert growth_log(model) == []
    assert not any("wider" in n for n, _ in model.named_parameters())
    host = model.get_submodule(BRANCH)
    units = 8 if f"{BRANCH}.widened.1" in folded else 0
    assert host.hidden == host.config()["hidden"] == hidden + units
    twin = block_from_config(host.config(), generator=generator())
    own = {n: v for n, v in host.state_dict().items() if "widened" not in n}
    twin.load_state_dict(own)
    if name == "mlp":
        z = torch.randn(3, 10, generator=generator(8))
        torch.testing.assert_close(twin(z), host(z))


def test_a_merged_network_trains_and_grows_on():
    model = grown_and_trained("gpt-rotary-rms")
    x = inputs_of("gpt-rotary-rms")
    merge(model)
    train(model, "gpt-rotary-rms", optim.AdamW(model.parameters(), lr=1e-3), 2)
    assert insert_block(model, site="groups.0.entry", generator=generator(1), check_batch=x).output_change == 0.0
    widen_stream(model, site="groups.0.entry", channels=2, generator=generator(2), check_batch=x)


# --- networks with the norm after the sum ---------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_a_block_after_a_post_norm_layer_is_exact(training):
    """The branch has a norm of its own and none comes after the sum, so the network's norms are as they were."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(8, 3)).train(training)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator(1)))
    x = torch.randn(4, 5, 8, generator=generator(2))
    before = model(x)
    old = [p.detach().clone() for p in torch.autograd.grad(before.square().sum(), list(model.parameters()))]
    names = list(named(model))
    for site in ("0", "1"):
        block = TransformerBlock(8, 2, 16, causal=False)
        insert_block(model, site=site, block=block, generator=generator(), check_batch=x)
    assert torch.equal(model(x), before)
    again = torch.autograd.grad(model(x).square().sum(), [named(model)[n] for n in names])
    assert all(torch.equal(a, b) for a, b in zip(again, old, strict=True))


# --- what a careful reader broke ------------------------------------------------------------------


@pytest.mark.parametrize("make", [copy.deepcopy, AveragedModel])
def test_a_copy_gets_the_values_of_what_was_made_and_then_cut(make):
    model, x = network("mlp"), inputs_of("mlp")
    average = make(model)
    path = insert_block(model, site="groups.0.entry", generator=generator(1)).path
    widen_stream(model, site="groups.0.entry", channels=4, generator=generator(2))
    train(model, "mlp", optim.SGD(model.parameters(), lr=0.1), 3)
    remove_units(model, site=path, units=[0])
    remove_units(model, site=BRANCH, units=[1])
    follow(average, model)
    inner = average.module if make is AveragedModel else average
    new = {n for r in growth_log(model)[:2] for n in r.parameters}
    assert all(torch.equal(named(inner)[n], named(model)[n]) for n in new)
    with torch.no_grad():
        for n, p in named(inner).items():
            p.copy_(named(model)[n])
    assert torch.equal(inner(x), model(x))


def test_a_copy_follows_copies_of_units_without_moving():
    model, x = network("mlp"), inputs_of("mlp")
    average = copy.deepcopy(model)
    before = average(x).detach()
    duplicate_units(model, site=BRANCH, units=3, generator=generator(1))
    follow(average, model)
    torch.testing.assert_close(average(x), before, rtol=0, atol=5e-6 * float(before.abs().max()))


def test_a_network_with_a_child_named_module_is_followed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.module(x))

    model = Net()
    average = copy.deepcopy(model)
    insert_block(model, site="module", block=MLPBlock(4, 3), generator=generator())
    assert len(follow(average, model)) == 1
    assert list(average.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("how", ["in place", "wrapped", "a part in place"])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_the_graph_of_a_compiled_network_is_renewed_at_every_step(name, how):
    net, x = network(name), inputs_of(name)
    model = net
    if how == "in place":
        net.compile(backend="eager")
    elif how == "wrapped":
        model = torch.compile(net, backend="eager")
    else:
        net.groups[0].blocks[0].compile(backend="eager")
    with torch.no_grad():
        before = model(x)

    def moved(step):
        """Take a step and let what is new do something; the compiled network must do what a plain copy does."""
        receipt = step()
        with torch.no_grad():
            for n, p in net.named_parameters():
                if n in receipt.parameters and p.ndim > 1:
                    p.add_(0.3)
            plain = rebuild(build(net.spec, seed=0), growth_log(net))
            plain.load_state_dict(net.state_dict())
            torch.testing.assert_close(model(x), plain(x))
            assert not torch.allclose(model(x), before)
        return receipt

    path = moved(lambda: insert_block(model, site="groups.0.blocks.0", generator=generator(1), check_batch=x)).path
    moved(lambda: widen(model, site=BRANCH, units=3, generator=generator(2), check_batch=x))
    moved(lambda: widen_stream(model, site="groups.0.entry", channels=2, generator=generator(3), check_batch=x))
    moved(lambda: remove_units(model, site=BRANCH, units=[0]))
    remove_block(model, block=path)
    assert growth_log(model) == growth_log(net)
    torch.compiler.reset()


@pytest.mark.parametrize("how", ["a part", "average"])
def test_networks_that_would_not_run_a_new_block_are_refused(how):
    model = network("mlp")
    if how == "a part":
        model.groups[0].blocks[0] = torch.compile(model.groups[0].blocks[0], backend="eager")
    else:
        model = AveragedModel(model)
    site = "module.groups.0.entry" if how == "average" else "groups.0.entry"
    with pytest.raises(UserError, match="cannot be grown|compiled by itself"):
        insert_block(model, site=site, block=MLPBlock(6, 3), generator=generator())


def test_a_site_that_is_never_called_is_refused():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.used(x)

    model, block = Idle(), MLPBlock(4, 3)
    before = fingerprint(model)
    with pytest.raises(SiteError, match="is called 0 times"):
        insert_block(model, site="idle", block=block, generator=generator(), check_batch=torch.ones(2, 4))
    assert_untouched(model, before)
    gpt = network("gpt")  # a block that listens to the projection changes the order of its sums
    failing(insert_block, gpt, inputs_of("gpt"), site=f"{BRANCH}.project", block=MLPBlock(8, 3))


def failing(step, model, x, **kwargs):
    before = fingerprint(model)
    log = growth_log(model)
    with pytest.raises((UserError, SiteError)):
        step(model, check_batch=x, generator=generator(), **kwargs)
    assert_untouched(model, before)
    assert growth_log(model) == log


@pytest.mark.parametrize("optimizer", ["empty", "scheduler"])
def test_an_optimiser_that_cannot_adopt_leaves_no_trace_of_the_step(optimizer):
    model, x = network("mlp"), inputs_of("mlp")
    real = optim.SGD(model.parameters(), lr=0.1)
    given = real
    if optimizer == "empty":
        real.param_groups[0]["params"] = []
    else:
        given = optim.lr_scheduler.StepLR(real, 3)
    failing(insert_block, model, x, site="groups.0.entry", optimizer=given)
    failing(widen, model, x, site=BRANCH, units=2, optimizer=given)
    failing(duplicate_units, model, x, site=BRANCH, units=2, optimizer=given)
    failing(widen_stream, model, x, site="groups.0.entry", channels=2, optimizer=given)
    assert "norm_eps" not in model.get_submodule(BRANCH).config()


def test_muon_gets_matrices_only():
    model = network("mlp")
    matrices = [p for p in model.parameters() if p.ndim == 2]
    muon = optim.Muon(matrices, lr=0.1)
    failing(insert_block, model, inputs_of("mlp"), site="groups.0.entry", optimizer=muon)
    image = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 3))
    muon, rest = optim.Muon([image[2].weight], lr=0.1), optim.AdamW([*image[0].parameters(), image[2].bias])
    block = ConvBlock(4, 4, group_size=2)
    insert_block(image, site="0", block=block, generator=generator(), optimizer=[muon, rest])
    assert len(muon.param_groups[0]["params"]) == 1


def test_a_block_is_inserted_once():
    model, block = network("mlp"), MLPBlock(6, 3)
    insert_block(model, site="groups.0.entry", block=block, generator=generator())
    failing(insert_block, model, inputs_of("mlp"), site="groups.0.blocks.0", block=block)
    failing(widen, model, inputs_of("mlp"), site=BRANCH, units=block)


def test_a_block_off_the_stream_stops_the_stream_from_widening():
    for site, width in (("norm", 6), (f"{BRANCH}.inner", 5)):
        model = network("mlp")
        insert_block(model, site=site, block=MLPBlock(width, 3), generator=generator())
        failing(widen_stream, model, inputs_of("mlp"), site="groups.0.entry", channels=2)


def test_tied_weights_are_not_resized():
    model = network("gpt")
    model.head.weight = model.groups[0].entry.tokens.weight
    failing(widen_stream, model, inputs_of("gpt"), site="groups.0.entry", channels=2)
    model = network("mlp")
    first, second = model.groups[0].blocks
    second.branch.inner.weight = first.branch.inner.weight
    before = fingerprint(model)
    with pytest.raises(UserError, match="one parameter at 2 places"):
        remove_units(model, site=BRANCH, units=[0])
    assert_untouched(model, before)


def test_counts_and_indices_are_whole_numbers_of_any_kind(tmp_path):
    model = network("mlp")
    for wrong in ({"units": 1}, {"units": [1.5]}, {"units": ["a"]}):
        before = fingerprint(model)
        with pytest.raises(UserError, match="whole number|list of indices"):
            remove_units(model, site=BRANCH, **wrong)
        assert_untouched(model, before)
    failing(widen, model, inputs_of("mlp"), site=BRANCH, units=2.5)
    failing(widen_stream, model, inputs_of("mlp"), site="groups.0.entry", channels="3")
    widen(model, site=BRANCH, units=np.int64(2), generator=generator())
    widen_stream(model, site="groups.0.entry", channels=np.int64(2), generator=generator())
    remove_units(model, site=BRANCH, units=torch.tensor([0, 2]))
    remove_units(model, site=BRANCH, units=np.array([1]))
    assert model.get_submodule(BRANCH).hidden == 2
    save_network(model, tmp_path)
    assert torch.equal(load_network(tmp_path)(inputs_of("mlp")), model(inputs_of("mlp")))


def test_units_of_a_block_without_norm_are_removed():
    model, x = network("resnet"), inputs_of("resnet")
    path = insert_block(model, site="groups.0.entry", block=ConvBlock(4, 4, norm="none"), generator=generator()).path
    remove_units(model, site=path, units=[1], check_batch=x)
    model(x)


def test_gradients_of_what_is_left_stay():
    model = network("mlp")
    loss_of(model, "mlp").backward()
    wanted = model.get_submodule(BRANCH).inner.weight.grad[1:].clone()
    remove_units(model, site=BRANCH, units=[0])
    assert torch.equal(model.get_submodule(BRANCH).inner.weight.grad, wanted)


def test_a_stream_in_half_precision_widens_to_its_own_rounding():
    model = network("mlp").bfloat16()
    x = inputs_of("mlp").bfloat16()
    receipt = widen_stream(model, site="groups.0.entry", channels=3, generator=generator(), check_batch=x)
    assert receipt.output_change < 0.05 * float(model(x).detach().abs().max())


def test_a_gpt_without_blocks_gets_one_after_its_stream_was_widened():
    spec = {
        "family": "gpt", "vocab": 7, "context": 5, "widths": [12], "blocks": [0], "hidden": [8], "heads": 3,
        "positions": "learned",
    }  # fmt: skip
    model = build(spec, seed=0)
    widen_stream(model, site="groups.0.entry", channels=2, generator=generator())
    x = torch.zeros(2, 5).long()
    receipt = insert_block(model, site="groups.0.entry", generator=generator(), check_batch=x)
    assert (receipt.block["width"], receipt.block["head_dim"], receipt.output_change) == (14, 4, 0.0)


def test_resetting_a_block_on_a_wider_stream_keeps_its_norm_whole():
    model = network("mlp")
    widen_stream(model, site="groups.0.entry", channels=2, generator=generator())
    block = model.get_submodule(BRANCH)
    block.reset(generator())
    assert float(block.norm.weight.detach().min()) > 0


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "melt"},
        {"kind": "remove", "path": "groups.0.entry.grown.7"},
        {"kind": "stream", "path": "groups.0", "block": {}},
        {"kind": "shrink", "path": BRANCH, "block": {"units": [99], "heads": []}},
        {"kind": "shrink", "path": BRANCH, "block": {}},
    ],
)
def test_a_log_that_makes_no_sense_is_refused(change):
    base = {"path": BRANCH, "block": {}, "parameters": [], "parameters_added": 0, "output_change": None}
    with pytest.raises(UserError, match="step 0 of the growth log"):
        rebuild(network("mlp"), [Receipt.from_dict(base | change)])
