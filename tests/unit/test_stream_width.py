"""More channels for the residual stream: the same function to rounding, old parameters and their state untouched."""

import copy
import itertools

import pytest
import torch
from torch import nn, optim
from torch_helpers import assert_untouched, fingerprint, generator

from growth_service.blocks import ConvBlock, MLPBlock, block_from_config, copy_of
from growth_service.blocks.composed import Composed, dense, dense_state
from growth_service.errors import SiteError, UserError
from growth_service.growth import growth_log, insert_block, merge, rebuild, remove_block, widen, widen_stream
from growth_service.models import build, sites

SPECS = {
    "mlp": {"family": "mlp", "input_shape": [1, 3, 3], "num_classes": 4, "widths": [6], "blocks": [2], "hidden": [5]},
    "resnet": {
        "family": "resnet", "input_shape": [2, 6, 6], "num_classes": 4, "widths": [4, 8], "blocks": [1, 2],
        "hidden": [4, 4], "group_size": 2,
    },
    "gpt": {
        "family": "gpt", "vocab": 11, "context": 7, "widths": [8], "blocks": [2], "hidden": [12], "heads": 2,
        "positions": "learned",
    },
    "gpt-rotary-rms": {
        "family": "gpt", "vocab": 11, "context": 7, "widths": [8], "blocks": [2], "hidden": [12], "heads": 2,
        "positions": "rotary", "norm": "rms", "parallel": True,
    },
}  # fmt: skip
GROUPS = [(name, f"groups.{i}") for name, spec in SPECS.items() for i in range(len(spec["widths"]))]
NUM = {"resnet": 4}


def network(name, *, dtype=torch.float32, seed=3):
    """A small network with norms, biases and projections that are not as at birth."""
    model = build(SPECS[name], seed=seed).to(dtype)
    draws = generator(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=draws).to(dtype))
    return model


def named(model):
    return dict(model.named_parameters())


def inputs_of(name, *, num=16, dtype=torch.float32):
    spec = SPECS[name]
    if spec["family"] == "gpt":
        return torch.randint(0, spec["vocab"], (num, spec["context"]), generator=generator(5))
    return torch.randn(num, *spec["input_shape"], generator=generator(5)).to(dtype)


def loss_of(model, name, **kwargs):
    out = model(inputs_of(name, **kwargs))
    out = out.reshape(-1, out.shape[-1])
    targets = torch.arange(len(out)) % out.shape[1]
    return nn.functional.cross_entropy(out, targets)


def train(model, name, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, name).backward()
        optimizer.step()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "group"), GROUPS)
def test_a_wider_stream_computes_the_same(name, group, dtype, training):
    model = network(name, dtype=dtype).train(training)
    x = inputs_of(name, dtype=dtype)
    before, old = model(x).detach(), {n: p.detach().clone() for n, p in model.named_parameters()}

    for more in (NUM.get(name, 3), NUM.get(name, 1)):
        receipt = widen_stream(model, site=f"{group}.entry", channels=more, generator=generator(), check_batch=x)
        bound = (5e-6 if dtype == torch.float32 else 1e-12) * float(before.abs().max())
        assert float((model(x) - before).detach().abs().max()) <= bound
        assert receipt.output_change <= bound
        assert receipt.path == group
        assert receipt.parameters_added == sum(named(model)[n].numel() for n in receipt.parameters)
    now = dict(model.named_parameters())
    assert all(torch.equal(now[n], value) for n, value in old.items())
    assert [n for n in now if n in old] == list(old)


@pytest.mark.parametrize(("name", "group"), [g for g in GROUPS if g[0] != "gpt"])
def test_gradients_of_old_parameters_stay_to_rounding(name, group):
    """Not under LayerNorm: there the mean that new channels hold is that of the old ones as they were."""
    model = network(name, dtype=torch.float64)
    names = [n for n, _ in model.named_parameters()]
    before = torch.autograd.grad(loss_of(model, name, dtype=torch.float64), list(model.parameters()))
    widen_stream(model, site=f"{group}.entry", channels=NUM.get(name, 3), generator=generator())
    after = torch.autograd.grad(loss_of(model, name, dtype=torch.float64), [named(model)[n] for n in names])
    for n, a, b in zip(names, before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=n)


@pytest.mark.parametrize(("name", "group"), GROUPS)
def test_new_channels_learn(name, group):
    """One side zero, the other not: that side gets a gradient at once, the other after one step."""
    model = network(name)
    receipt = widen_stream(model, site=f"{group}.entry", channels=NUM.get(name, 3), generator=generator())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, name).backward()
    zero = ".columns" if name == "resnet" else ".rows"
    first = [n for n in receipt.parameters if n.endswith(zero) and "norm" not in n and "tokens" not in n]
    assert first
    assert all(named(model)[n].grad.abs().max() > 0 for n in first)
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, name).backward()
    assert all(named(model)[n].grad.abs().max() > 0 for n in receipt.parameters)


@pytest.mark.parametrize(("name", "group"), GROUPS)
def test_a_wider_network_grows_on_in_every_other_way(name, group):
    """Blocks, units and channels again, each exact, at every site of the stream."""
    model, x = network(name), inputs_of(name)
    widen_stream(model, site=f"{group}.entry", channels=NUM.get(name, 2), generator=generator(1), check_batch=x)
    for site in sites(model):
        assert insert_block(model, site=site.path, generator=generator(2), check_batch=x).output_change == 0.0
    last = f"{group}.blocks.0.branch"
    assert widen(model, site=last, units=4, generator=generator(3), check_batch=x).output_change == 0.0
    widen_stream(model, site=f"{group}.entry", channels=NUM.get(name, 2), generator=generator(4), check_batch=x)
    train(model, name, optim.SGD(model.parameters(), lr=0.01), 2)

    twin = rebuild(build(SPECS[name], seed=0), growth_log(model))
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize(("name", "group"), GROUPS)
def test_dense_matrices_compute_what_the_pieces_do(name, group):
    model, x = network(name), inputs_of(name)
    insert_block(model, site=f"{group}.entry", generator=generator())
    widen_stream(model, site=f"{group}.entry", channels=NUM.get(name, 3), generator=generator())
    train(model, name, optim.SGD(model.parameters(), lr=0.01), 3)
    state, before = dense_state(model), model(x).detach()
    for module in list(model.modules()):
        dense(module)
    assert not any(isinstance(m, Composed) for m in model.modules())
    assert list(model.state_dict()) == list(state)
    torch.testing.assert_close(model(x), before, rtol=0, atol=5e-6 * float(before.abs().max()))


def test_layer_norm_pads_with_the_mean_and_rms_norm_with_zero():
    for name, wanted in (("gpt", "mean"), ("gpt-rotary-rms", "zero")):
        model = network(name)
        seen = []
        model.get_submodule("groups.0.blocks.1").register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out))
        widen_stream(model, site="groups.0.entry", channels=3, generator=generator())
        model(inputs_of(name))
        old, new = seen[0][..., :8], seen[0][..., 8:]
        expected = old.mean(dim=-1, keepdim=True) if wanted == "mean" else torch.zeros(())
        torch.testing.assert_close(new, expected.expand_as(new), rtol=0, atol=1e-5)


def test_small_streams_keep_their_function_since_epsilon_follows():
    """With the old epsilon the output of a LayerNorm over a stream of size 1e-3 would move by a tenth."""
    model = network("gpt")
    with torch.no_grad():
        model.groups[0].entry.tokens.weight.mul_(3e-3)
        model.groups[0].entry.positions.weight.mul_(3e-3)
        for block in model.groups[0].blocks:
            block.branch.project.weight.mul_(1e-3)
            block.branch.project.bias.mul_(1e-3)
    x = inputs_of("gpt")
    before = model(x).detach()
    widen_stream(model, site="groups.0.entry", channels=8, generator=generator())
    assert float((model(x) - before).detach().abs().max()) <= 5e-6 * float(before.abs().max())


# --- the optimiser --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adam, optim.RMSprop, optim.Adagrad])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_the_optimiser_keeps_old_state_and_new_parameters_start_slowly(name, kind):
    """Padded tensors that inherit the step count would move by several times the rate at first."""
    model, rate = network(name), 1e-3
    optimizer = kind(model.parameters(), lr=rate)
    train(model, name, optimizer, 60)
    old = {n: copy.deepcopy(optimizer.state[p]) for n, p in model.named_parameters()}
    receipt = widen_stream(model, site="groups.0.entry", channels=3, generator=generator(), optimizer=optimizer)
    for n, state in old.items():
        now = optimizer.state[named(model)[n]]
        assert all(torch.equal(torch.as_tensor(now[key]), torch.as_tensor(value)) for key, value in state.items())
    assert {p for g in optimizer.param_groups for p in g["params"]} == set(model.parameters())
    largest = 0.0
    for _ in range(20):
        before = [named(model)[n].detach().clone() for n in receipt.parameters]
        train(model, name, optimizer, 1)
        after = [named(model)[n].detach() for n in receipt.parameters]
        largest = max(largest, *(float((a - b).abs().max()) for a, b in zip(after, before, strict=True)))
    bound = 1.2 * rate if kind in (optim.Adam, optim.AdamW) else 10 * rate  # RMSprop starts at lr / sqrt(1 - 0.99)
    assert 0 < largest <= bound * (1 + 0.02)  # and weight decay


# --- blocks that copy -----------------------------------------------------------------------------


def test_a_copy_of_a_block_on_a_wider_stream_has_its_inner_weights():
    model = network("mlp")
    widen_stream(model, site="groups.0.entry", channels=3, generator=generator())
    host = model.groups[0].blocks[0].branch
    twin = copy_of(host, generator=generator())
    assert twin.config()["width"] == 9
    z = torch.randn(5, 9, generator=generator(2))
    torch.testing.assert_close(twin.features(z), host.features(z), rtol=0, atol=1e-6)
    assert twin.norm.eps == host.norm.eps == pytest.approx(1e-6 * 6 / 9)


# --- refusals -------------------------------------------------------------------------------------


def refused(model, name, **kwargs):
    before, log = fingerprint(model), growth_log(model)
    with pytest.raises((UserError, SiteError)) as caught:
        widen_stream(model, generator=generator(), check_batch=inputs_of(name), **kwargs)
    assert_untouched(model, before)
    assert growth_log(model) == log
    assert not any(isinstance(m, Composed) for m in model.modules())
    return str(caught.value)


def test_channels_that_do_not_fill_whole_groups_are_refused():
    text = refused(network("resnet"), "resnet", site="groups.1.entry", channels=3)
    assert "3 channels" in text
    assert "groups of 2" in text
    assert "multiple of 2" in text


def test_no_channels_at_all_are_refused():
    assert "at least 1" in refused(network("mlp"), "mlp", site="groups.0.entry", channels=0)


def test_a_place_on_no_stream_is_refused():
    assert "groups.0.entry" in refused(network("mlp"), "mlp", site="head", channels=2)


def test_a_foreign_network_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(SiteError, match="own families"):
        widen_stream(model, site="0", channels=2, generator=generator())


def test_norms_that_need_different_paddings_on_one_stream_are_refused():
    model = network("gpt")
    rms = block_from_config(MLPBlock(8, 4).config(), generator=generator())
    insert_block(model, site="groups.0.entry", block=rms, generator=generator())
    text = refused(model, "gpt", site="groups.0.entry", channels=2)
    assert "LayerNorm, RMSNorm" in text


def test_a_step_that_would_change_outputs_is_taken_back(monkeypatch):
    """Mutate the rule (no rescaling of norms), and the check on a batch must find it and undo everything."""
    from growth_service.blocks import composed

    monkeypatch.setattr(composed.math, "sqrt", lambda _: 1.0)
    text = refused(network("mlp"), "mlp", site="groups.0.entry", channels=2)
    assert "more than rounding" in text


def test_after_a_refusal_the_network_widens_as_if_nothing_had_been(monkeypatch):
    from growth_service.blocks import composed

    model, x = network("gpt"), inputs_of("gpt")
    eps = [m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)]
    with monkeypatch.context() as patched:
        patched.setattr(composed.math, "sqrt", lambda _: 1.0)
        with pytest.raises(UserError):
            widen_stream(model, site="groups.0.entry", channels=2, generator=generator(), check_batch=x)
    assert [m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)] == pytest.approx(eps)
    widen_stream(model, site="groups.0.entry", channels=2, generator=generator(), check_batch=x)


@pytest.mark.parametrize(("name", "order"), list(itertools.product(["mlp", "gpt"], [0, 1])))
def test_a_block_inserted_before_or_after_can_be_removed_again(name, order):
    model, x = network(name), inputs_of(name)
    steps = [
        lambda: insert_block(model, site="groups.0.blocks.0", generator=generator(1), check_batch=x),
        lambda: widen_stream(model, site="groups.0.entry", channels=3, generator=generator(2), check_batch=x),
    ]
    for step in steps if order == 0 else steps[::-1]:
        step()
    before = model(x)
    removed = remove_block(model, block="groups.0.blocks.0.grown.0", check_batch=x)
    assert removed.output_change == 0.0
    assert torch.equal(model(x), before)
    twin = rebuild(build(SPECS[name], seed=1), growth_log(model))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), before)


def test_a_norm_of_one_group_is_refused():
    """Its statistics are over all channels of an image: new ones would change them."""
    model = build(SPECS["resnet"] | {"widths": [4], "blocks": [1], "hidden": [4], "group_size": 4}, seed=0)
    assert "1 groups of 4" in refused(model, "resnet", site="groups.0.entry", channels=4)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_keeps_statistics_of_old_channels_and_gets_new_ones(training):
    model, x = network("resnet"), inputs_of("resnet")
    block = ConvBlock(4, 4, norm="batch")
    path = insert_block(model, site="groups.0.entry", block=block, generator=generator(1)).path
    with torch.no_grad():
        block.project.weight.normal_(generator=generator(2))
        block.norm.weight.normal_(generator=generator(3))
    model.train()(x)
    model.train(training)
    before, old = model(x).detach(), block.norm.running_mean.clone()
    for more in (2, 4):
        widen_stream(model, site="groups.0.entry", channels=more, generator=generator(4))
        assert float((model(x) - before).detach().abs().max()) <= 5e-6 * float(before.abs().max())
    if not training:
        assert torch.equal(block.norm.running_mean, old)
    train(model.train(), "resnet", optim.SGD(model.parameters(), lr=0.01), 2)
    assert block.norm.wider["1"].running_var.std() > 0
    assert block.norm.num_features == 10

    twin = rebuild(build(SPECS["resnet"], seed=0), growth_log(model))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.eval()(x), model.eval()(x))
    copied = copy_of(block, generator=generator()).eval()
    z = torch.randn(2, 10, 5, 5, generator=generator(6))
    torch.testing.assert_close(copied.features(z), block.features(z))
    whole = model(x).detach()
    merge(model)
    torch.testing.assert_close(model(x), whole, rtol=0, atol=5e-6 * float(whole.abs().max()))
    assert model.get_submodule(path).norm.running_mean.shape == (10,)


def test_a_refused_step_takes_batch_norm_back_too():
    model, x = network("resnet"), inputs_of("resnet")
    insert_block(model, site="groups.0.entry", block=ConvBlock(4, 4, norm="batch"), generator=generator(1))
    from growth_service.growth import stream

    before = fingerprint(model)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stream, "rounding_of", lambda _: -1.0)
        with pytest.raises(UserError):
            widen_stream(model, site="groups.0.entry", channels=2, generator=generator(), check_batch=x)
    assert_untouched(model, before)
