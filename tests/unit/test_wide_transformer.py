"""Transformer blocks that were widened: what new units and heads read, and what certificates say about them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from growth_service.blocks import TransformerBlock
from growth_service.core.policies import Sight
from growth_service.errors import CheckpointError
from growth_service.growth import widen
from growth_service.models import build
from growth_service.probing import probe
from growth_service.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from growth_service.training.evaluate import loss_sum
from growth_service.training.files import write_json
from growth_service.training.growing import candidates
from tests.torch_helpers import generator

BRANCH = "groups.0.blocks.0.branch"
SPEC = {"family": "gpt", "widths": [8], "blocks": [1], "hidden": [12], "vocab": 11, "context": 6, "heads": 2}


def network(*, parallel=False, **changes):
    return build(SPEC | {"parallel": parallel} | changes, seed=3).double().eval()


def tokens(num=16):
    return torch.randint(0, 11, (num, 6), generator=generator(4))


def drawn(block, *, seed):
    """Outgoing weights that are not zero, so that new parts do something."""
    with torch.no_grad():
        block.project.weight.copy_(0.3 * torch.randn(block.project.weight.shape, generator=generator(seed)))


def test_new_units_read_attention_too_new_heads_included():
    """A block of half the size, widened, with all weights of a whole one, is that one."""
    whole = network(heads=4, hidden=[24], widths=[16]).get_submodule(BRANCH)
    half = network(heads=2, hidden=[12], widths=[16])
    host_dim = whole.config()["head_dim"]
    small = TransformerBlock(16, 2, 12, head_dim=host_dim).double()
    half.groups[0].blocks[0].branch = small
    widen(half, site=BRANCH, heads=2, generator=generator())
    widen(half, site=BRANCH, units=12, generator=generator())
    heads, units = small.widened["0"], small.widened["1"]
    with torch.no_grad():
        for part in ("query", "key", "value"):
            weight, bias = whole.get_submodule(part).weight, whole.get_submodule(part).bias
            rows = 2 * host_dim
            small.get_submodule(part).weight.copy_(weight[:rows])
            small.get_submodule(part).bias.copy_(bias[:rows])
            heads.get_submodule(part).weight.copy_(weight[rows:])
            heads.get_submodule(part).bias.copy_(bias[rows:])
        small.inner.weight.copy_(whole.inner.weight[:12])
        small.inner.bias.copy_(whole.inner.bias[:12])
        units.inner.weight.copy_(whole.inner.weight[12:])
        units.inner.bias.copy_(whole.inner.bias[12:])
        columns = whole.project.weight.split([2 * host_dim, 2 * host_dim, 12, 12], dim=1)
        small.project.weight.copy_(torch.cat([columns[0], columns[2]], dim=1))
        small.project.bias.copy_(whole.project.bias)
        heads.project.weight.copy_(columns[1])
        units.project.weight.copy_(columns[3])
        for norm in ("attn_norm", "mlp_norm"):
            small.get_submodule(norm).load_state_dict(whole.get_submodule(norm).state_dict())
        heads.norm.load_state_dict(whole.attn_norm.state_dict())
        units.norm.load_state_dict(whole.mlp_norm.state_dict())
    z = torch.randn(3, 6, 16, generator=generator(1), dtype=torch.float64)
    torch.testing.assert_close(small(z), whole(z))
    listening = small.project.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(small(z), whole(z))  # who listens to the projection hears the same block
    listening.remove()


@pytest.mark.parametrize("parallel", [False, True])
def test_new_parts_are_applied_once(parallel):
    model, x = network(parallel=parallel), tokens()
    before = model(x).detach()
    receipt = widen(model, site=BRANCH, units=4, generator=generator(), check_batch=x)
    assert receipt.output_change == 0.0
    units = model.get_submodule(BRANCH).widened["0"]
    drawn(units, seed=2)
    once = model(x).detach()
    with torch.no_grad():
        units.project.weight.mul_(0.5)
    assert not torch.equal(once, before)
    calls = []
    handle = units.register_forward_hook(lambda *_: calls.append(1))
    model(x)
    handle.remove()
    assert calls == [1]


@pytest.mark.parametrize("parallel", [False, True])
def test_the_cross_gradient_of_new_units_is_the_gradient_of_the_units_that_are_added(parallel):
    model, x = network(parallel=parallel), tokens()
    widen(model, site=BRANCH, heads=1, generator=generator())
    drawn(model.get_submodule(BRANCH).widened["0"], seed=5)
    (found,) = [c for c in candidates(model, Sight(axes=("width",), units=3), stage=0, seed=0) if c.path == BRANCH]
    found.block.double()
    report = probe(
        model,
        batches=[(x, x)],
        train_batches=[(x, x)],
        candidates=[replace(found, beside=())],
        loss=loss_sum,
        reduction="sum",
    )
    widen(model, site=BRANCH, units=found.block, generator=generator())
    weight = found.block.project.weight
    (wanted,) = torch.autograd.grad(loss_sum(model(x), x) / len(x), [weight])
    np.testing.assert_allclose(
        report.sites[0].cross_gradient[:, : weight.shape[1]], wanted.numpy(), atol=1e-15, rtol=1e-9
    )


def test_the_features_that_are_there_already_are_taken_off_new_units():
    """A copy of the old units has nothing to add."""
    model, x = network(), tokens(64)
    (found,) = candidates(model, Sight(axes=("width",), units=12), stage=0, seed=0)
    found.block.double()
    with torch.no_grad():
        host = model.get_submodule(BRANCH)
        found.block.inner.load_state_dict(host.inner.state_dict())
        found.block.get_submodule("norm").load_state_dict(host.mlp_norm.state_dict())
    report = probe(
        model, batches=[(x, x)], train_batches=[(x, x)], candidates=[found], loss=loss_sum, reduction="sum", ridge=0.0
    )
    assert abs(report.sites[0].s_plugin) < 1e-12


def test_widened_transformers_of_an_earlier_format_are_refused(tmp_path):
    """Their new units read something else; a network that was not widened is read."""
    for widened in (False, True):
        model = network().float()
        if widened:
            widen(model, site=BRANCH, units=4, generator=generator())
        folder = tmp_path / str(widened)
        kept = Checkpoint(model=model, base={"spec": SPEC, "seed": 3}, optimizer_state={}, streams={}, history=[])
        save_checkpoint(folder, kept)
        manifest = json.loads((folder / "manifest.json").read_text())
        write_json(folder / "manifest.json", manifest | {"format_version": 2})
        if widened:
            with pytest.raises(CheckpointError, match="train the network anew"):
                load_checkpoint(folder)
        else:
            assert isinstance(load_checkpoint(folder).model, nn.Module)
