"""What removing a block would cost, against really removing it."""

import copy

import pytest
import torch
from test_stream_width import SPECS, network
from torch import nn
from torch_helpers import assert_untouched, fingerprint, generator

from growth_service import removal_costs, remove_block, remove_units, unit_costs
from growth_service.blocks import ConvBlock, GatedBranch, MLPBlock
from growth_service.errors import NotFiniteError, UserError
from growth_service.growth import insert_block, widen
from growth_service.models.sites import blocks_of


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def batches(name, *, sizes=(8, 5, 9)):
    spec, draws = SPECS[name], generator(4)
    found = []
    for num in sizes:
        if spec["family"] == "gpt":
            tokens = torch.randint(0, spec["vocab"], (num, spec["context"] + 1), generator=draws)
            found.append((tokens[:, :-1], tokens[:, 1:]))
        else:
            x = torch.randn(num, *spec["input_shape"], generator=draws)
            found.append((x, torch.randint(0, spec["num_classes"], (num,), generator=draws)))
    return found


@torch.no_grad()
def mean_loss(model, name):
    sums = [(float(loss(model(x), y)) * len(x), len(x)) for x, y in batches(name)]
    return sum(s for s, _ in sums) / sum(n for _, n in sums)


@pytest.mark.parametrize("name", list(SPECS))
def test_the_loss_without_a_block_is_that_of_the_network_without_it(name):
    model = network(name)
    insert_block(model, site="groups.0.entry", generator=generator(1))
    widen(model, site="groups.0.blocks.0.branch", units=4, generator=generator(2))
    with torch.no_grad():
        for p in model.groups[0].entry.grown["0"].project.parameters():
            p.add_(0.3)
    before = fingerprint(model)
    found = removal_costs(model, batches=batches(name), loss=loss, reduction="mean")
    assert_untouched(model, before)
    assert {c.block for c in found} == {*blocks_of(model), "groups.0.blocks.0.branch.widened.0"}
    assert [c.loss_increase for c in found] == sorted(c.loss_increase for c in found)
    whole = mean_loss(model, name)
    for cost in found:
        rest = copy.deepcopy(model)
        receipt = remove_block(rest, block=cost.block)
        assert cost.loss_increase == pytest.approx(mean_loss(rest, name) - whole, abs=1e-5)
        assert cost.params == -receipt.parameters_added
    (idle,) = [c for c in found if ".widened." in c.block]  # its projection is zero
    assert (idle.loss_increase, idle.relative_size, idle.standard_error) == (0.0, 0.0, 0.0)


def test_the_size_of_a_branch_is_measured_against_its_stream():
    model = network("mlp")
    seen = []
    model.groups[0].blocks[1].branch.register_forward_hook(lambda _m, a, out: seen.append((out, a[0])))
    (cost,) = removal_costs(
        model, batches=batches("mlp"), loss=loss, reduction="mean", blocks=["groups.0.blocks.1.branch"]
    )
    moved, stream = (sum(float(s[i].square().sum()) for s in seen[:3]) for i in (0, 1))
    assert cost.relative_size == pytest.approx((moved / stream) ** 0.5, rel=1e-5)


def test_the_standard_error_is_that_of_batches():
    model, path = network("mlp"), "groups.0.blocks.0.branch"
    same = batches("mlp", sizes=(8,)) * 3
    (cost,) = removal_costs(model, batches=same, loss=loss, reduction="mean", blocks=[path])
    assert cost.standard_error == pytest.approx(0.0, abs=1e-7)
    (one,) = removal_costs(model, batches=same[:1], loss=loss, reduction="mean", blocks=[path])
    assert one.standard_error == float("inf")
    per_batch = []
    rest = copy.deepcopy(model)
    remove_block(rest, block=path)
    with torch.no_grad():
        for x, y in batches("mlp", sizes=(8, 8, 8)):
            per_batch.append(float(loss(rest(x), y) - loss(model(x), y)))
    (cost,) = removal_costs(model, batches=batches("mlp", sizes=(8, 8, 8)), loss=loss, reduction="mean", blocks=[path])
    assert cost.standard_error == pytest.approx(float(torch.tensor(per_batch).std()) / 3**0.5, rel=1e-3)


def test_an_error_leaves_no_hook_behind():
    model = network("mlp")
    before = fingerprint(model)
    with pytest.raises((UserError, NotFiniteError)):
        removal_costs(model, batches=[(torch.zeros(2, 7), torch.zeros(2).long())], loss=loss, reduction="mean")
    with pytest.raises(UserError):
        removal_costs(
            model, batches=batches("mlp"), loss=loss, reduction="mean", blocks=["groups.0.blocks.0.branch", "nope"]
        )
    assert_untouched(model, before)


def test_blocks_inside_a_gate_are_not_removed_by_themselves():
    model = network("mlp")
    gate = GatedBranch("scalar", MLPBlock(6, 4).config())
    path = insert_block(model, site="groups.0.entry", block=gate, generator=generator()).path
    found = removal_costs(model, batches=batches("mlp"), loss=loss, reduction="mean")
    assert {c.block for c in found} == {"groups.0.blocks.0.branch", "groups.0.blocks.1.branch", path}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mlp", "units"), ("resnet", "units"), ("gpt", "units"), ("gpt", "heads"), ("gpt-rotary-rms", "heads")],
)
def test_the_loss_without_a_unit_is_that_of_the_network_without_it(name, kind):
    model, site = network(name), "groups.0.blocks.0.branch"
    if name == "resnet":  # its units leave in whole groups: without a norm over them, one by one
        site = insert_block(
            model, site="groups.0.entry", block=ConvBlock(4, 3, norm="none"), generator=generator(1)
        ).path
        with torch.no_grad():
            model.get_submodule(site).project.weight.normal_(generator=generator(2))
    before = fingerprint(model)
    found = unit_costs(model, site=site, kind=kind, batches=batches(name), loss=loss, reduction="mean")
    assert_untouched(model, before)
    host, whole = model.get_submodule(site), mean_loss(model, name)
    assert sorted(c.index for c in found) == list(range(host.hidden if kind == "units" else 2))
    assert [c.loss_increase for c in found] == sorted(c.loss_increase for c in found)
    for cost in found:
        rest = copy.deepcopy(model)
        remove_units(rest, site=site, **{kind: [cost.index]})
        assert cost.loss_increase == pytest.approx(mean_loss(rest, name) - whole, abs=2e-5)


def test_units_of_what_has_none_are_refused():
    model = network("mlp")
    given = {"batches": batches("mlp"), "loss": loss, "reduction": "mean"}
    with pytest.raises(UserError, match="no attention heads"):
        unit_costs(model, site="groups.0.blocks.0.branch", kind="heads", **given)
    with pytest.raises(UserError, match="not a block"):
        unit_costs(model, site="head", **given)


def test_a_frozen_network_grows_and_what_is_new_learns():
    model = network("mlp").requires_grad_(False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1))], lr=0.1)
    old = copy.deepcopy(model.state_dict())
    receipt = insert_block(model, site="groups.0.blocks.0", generator=generator(1), optimizer=optimizer)
    x, y = batches("mlp")[0]
    loss(model(x), y).backward()
    optimizer.step()
    assert all(torch.equal(model.state_dict()[n], v) for n, v in old.items())
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(receipt.parameters)
    assert float(model.get_submodule(receipt.path).project.weight.detach().abs().max()) > 0
