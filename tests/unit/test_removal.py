"""Removing blocks, units and heads: what was just inserted leaves no trace, what adds nothing changes nothing."""

import copy

import pytest
import torch
from test_stream_width import SPECS, inputs_of, network, train
from torch import optim
from torch_helpers import assert_untouched, fingerprint, generator

from growth_service.blocks import ConvBlock
from growth_service.errors import SiteError, UserError
from growth_service.growth import (
    growth_log,
    insert_block,
    rebuild,
    remove_block,
    remove_units,
    widen,
)
from growth_service.models import build, sites
from growth_service.models.sites import size_of

NAMES = list(SPECS)
BRANCH = "groups.0.blocks.0.branch"
OPTIMIZERS = [
    lambda ps: optim.SGD(ps, lr=0.01, momentum=0.9),
    lambda ps: optim.AdamW(ps, lr=1e-3),
    lambda ps: optim.RMSprop(ps, lr=1e-3),
    lambda ps: optim.Adagrad(ps, lr=1e-3),
    lambda ps: optim.Adafactor(ps, lr=1e-3),
]


def states(optimizer):
    """State by position in the groups, with the groups' sizes."""
    return (
        [len(g["params"]) for g in optimizer.param_groups],
        [copy.deepcopy(optimizer.state.get(p)) for g in optimizer.param_groups for p in g["params"]],
    )


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_removing_what_was_just_inserted_restores_network_and_optimiser_bit_for_bit(name, make):
    model, x = network(name), inputs_of(name)
    optimizer = make(model.parameters())
    train(model, name, optimizer, 3)
    optimizer.zero_grad()
    for site in sites(model):
        before, known = fingerprint(model), states(optimizer)
        kwargs = {"generator": generator(), "optimizer": optimizer, "check_batch": x}
        path = insert_block(model, site=site.path, **kwargs).path
        receipt = remove_block(model, block=path, optimizer=optimizer, check_batch=x)
        after = fingerprint(model)
        for fact in ("weights and buffers", "gradients", "modes", "hooks"):
            assert equal(after[fact], before[fact]), fact
        assert equal(states(optimizer), known)
        assert receipt.output_change == 0.0
        assert receipt.parameters_added < 0


@pytest.mark.parametrize("name", NAMES)
def test_an_id_is_never_given_twice(name):
    model = network(name)
    paths = []
    for _ in range(3):
        paths.append(insert_block(model, site="groups.0.entry", generator=generator()).path)
        if len(paths) == 2:
            remove_block(model, block=paths[1])
    assert paths == [f"groups.0.entry.grown.{i}" for i in range(3)]
    twin = rebuild(build(SPECS[name], seed=0), growth_log(model))
    assert list(twin.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_a_block_of_the_base_is_removed_and_its_stream_passes(name):
    model, x = network(name), inputs_of(name)
    path = "groups.0.blocks.0.branch"
    widen(model, site=path, units=4, generator=generator())
    depth, _, params = size_of(model)
    gone = sum(p.numel() for n, p in model.named_parameters() if n.startswith(path + "."))
    seen = {}
    for key in ("groups.0.entry", "groups.0.blocks.0"):
        model.get_submodule(key).register_forward_hook(lambda _m, _a, out, key=key: seen.update({key: out}))
    receipt = remove_block(model, block=path, check_batch=x)
    assert receipt.output_change > 0
    assert receipt.parameters_added == -gone
    model(x)
    assert torch.equal(seen["groups.0.entry"], seen["groups.0.blocks.0"])
    assert (size_of(model)[0], size_of(model)[2]) == (depth - 1, params - gone)
    twin = rebuild(build(SPECS[name], seed=1), growth_log(model))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))
    assert insert_block(model, site="groups.0.blocks.0", generator=generator(), check_batch=x).output_change == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_removing_units_that_add_nothing_changes_nothing(name):
    model, x = network(name), inputs_of(name)
    host = model.groups[0].blocks[0].branch
    offset = host.query.out_features if hasattr(host, "query") else 0
    with torch.no_grad():
        host.project.weight[:, [offset + 0, offset + 1]] = 0.0
    before, hidden = model(x).detach(), host.hidden
    receipt = remove_units(model, site="groups.0.blocks.0.branch", units=[1, 0], check_batch=x)
    assert receipt.output_change <= 1e-6 * float(before.abs().max())
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-6 * float(before.abs().max()))
    assert (host.hidden, host.config()["hidden"]) == (hidden - 2, hidden - 2)
    twin = rebuild(build(SPECS[name], seed=1), growth_log(model))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))


def test_removing_a_head_leaves_what_the_others_compute():
    model, x = network("gpt"), inputs_of("gpt")
    host = model.groups[0].blocks[1].branch
    with torch.no_grad():
        host.project.weight[:, 4:8] = 0.0
    before = model(x).detach()
    remove_units(model, site="groups.0.blocks.1.branch", heads=[1])
    torch.testing.assert_close(model(x), before, rtol=0, atol=2e-6 * float(before.abs().max()))
    assert host.config()["heads"] == 1
    twin = rebuild(build(SPECS["gpt"], seed=1), growth_log(model))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_units_that_are_left_keep_their_optimiser_state(name, make):
    model = network(name)
    optimizer = make(model.parameters())
    train(model, name, optimizer, 3)
    path = "groups.0.blocks.0.branch"
    host = model.get_submodule(path)
    before = copy.deepcopy(optimizer.state[host.inner.weight])
    remove_units(model, site=path, units=[0, 1], optimizer=optimizer)
    inner = host.inner.weight
    now = optimizer.state[inner]
    for key, value in before.items():
        kept = value[2:] if isinstance(value, torch.Tensor) and value.ndim and len(value) == len(inner) + 2 else value
        assert equal(torch.as_tensor(now[key]), torch.as_tensor(kept)), key
    assert {p for g in optimizer.param_groups for p in g["params"]} == set(model.parameters())
    train(model, name, optimizer, 2)


@pytest.mark.parametrize("name", NAMES)
def test_units_of_a_branch_can_be_removed_as_a_whole(name):
    model, x = network(name), inputs_of(name)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    before = model(x).detach()
    path = widen(
        model, site="groups.0.blocks.0.branch", units=4, generator=generator(), optimizer=optimizer, check_batch=x
    ).path
    remove_block(model, block=path, optimizer=optimizer)
    assert torch.equal(model(x), before)
    assert not hasattr(model.groups[0].blocks[0].branch, "widened")
    assert {p for g in optimizer.param_groups for p in g["params"]} == set(model.parameters())


# --- refusals -------------------------------------------------------------------------------------


def refused(model, call):
    before, log = fingerprint(model), growth_log(model)
    with pytest.raises((UserError, SiteError)) as caught:
        call()
    assert_untouched(model, before)
    assert growth_log(model) == log
    return str(caught.value)


@pytest.mark.parametrize("path", ["head", "groups.0.blocks.0", "groups.0.blocks.0.branch.inner"])
def test_what_is_no_block_is_not_removed(path):
    model = network("mlp")
    assert "cannot be removed" in refused(model, lambda: remove_block(model, block=path))


def test_a_block_is_not_removed_twice():
    model = network("mlp")
    remove_block(model, block="groups.0.blocks.0.branch")
    with pytest.raises(SiteError, match="no module at path"):
        remove_block(model, block="groups.0.blocks.0.branch")


@pytest.mark.parametrize(
    ("name", "kwargs", "text"),
    [
        ("mlp", {}, "no unit and no head"),
        ("mlp", {"units": [5]}, "it has 5, numbered from 0"),
        ("mlp", {"units": [-1]}, "numbered from 0"),
        ("mlp", {"units": range(5)}, "leave one"),
        ("mlp", {"heads": [0]}, "it has 0"),
        ("gpt", {"heads": [0, 1]}, "leave one"),
        ("resnet", {"units": [1, 2]}, "whole groups of 2"),
    ],
)
def test_units_that_cannot_be_removed_are_named(name, kwargs, text):
    model = network(name)
    assert text in refused(model, lambda: remove_units(model, site="groups.0.blocks.0.branch", **kwargs))


def test_heads_that_share_keys_are_not_removed_one_by_one():
    from growth_service.blocks import TransformerBlock

    model = network("gpt")
    block = TransformerBlock(8, 4, 8, kv_heads=2)
    path = insert_block(model, site="groups.0.entry", block=block, generator=generator()).path
    assert "share keys" in refused(model, lambda: remove_units(model, site=path, heads=[0]))


def test_only_blocks_lose_units():
    model = network("mlp")
    assert "not a block" in refused(model, lambda: remove_units(model, site="head", units=[0]))


@pytest.mark.parametrize("step", [remove_block, remove_units])
def test_what_is_no_optimiser_is_refused_before_anything_is_cut(step):
    model = network("mlp")
    scheduler = optim.lr_scheduler.StepLR(optim.SGD(model.parameters(), lr=0.1), 3)
    where = {"block": BRANCH} if step is remove_block else {"site": BRANCH, "units": [0]}
    assert "optimizer is a StepLR" in refused(model, lambda: step(model, optimizer=scheduler, **where))


def test_units_take_their_batch_statistics_with_them():
    model, x = network("resnet"), inputs_of("resnet")
    block = ConvBlock(4, 6, norm="batch")
    path = insert_block(model, site="groups.0.entry", block=block, generator=generator(1)).path
    with torch.no_grad():
        block.project.weight.copy_(torch.randn(block.project.weight.shape, generator=generator(2)))
        block.project.weight[:, [0, 2]] = 0.0
    model.train()(x)  # statistics of its own for each channel
    model.eval()
    before, kept = model(x).detach(), block.inner_norm.running_mean[[1, 3, 4, 5]].clone()
    remove_units(model, site=path, units=[0, 2], check_batch=x)
    assert torch.equal(block.inner_norm.running_mean, kept)
    torch.testing.assert_close(model(x), before, rtol=0, atol=2e-6 * float(before.abs().max()))
