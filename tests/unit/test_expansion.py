"""Steps on a whole network, spelled out on the network that is there and taken."""

import pytest
import torch

from growth_service.core.steps import AddBlock, AddChannels, AddHeads, AddUnits, Deepen, Widen
from growth_service.errors import UserError
from growth_service.models import build
from growth_service.models.sites import blocks_of, size_of
from growth_service.training.data import Split
from growth_service.training.expansion import expand
from growth_service.training.growing import take_step
from growth_service.training.optimizer import make_optimizer
from growth_service.training.ranks import Ranks
from tests.torch_helpers import family, family_data, generator

GPT = {"family": "gpt", "widths": [8], "blocks": [2], "hidden": [16], "vocab": 11, "context": 6, "heads": 2}
SETTINGS = {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.01}


def network(name):
    return build(GPT, seed=3) if name == "gpt" else family(name)


def samples(name):
    if name == "gpt":
        tokens = torch.randint(0, 11, (8, 6), generator=generator())
        return Split(tokens, tokens)
    return Split(*family_data(name))


def take(model, name, *changes, optimizer=None):
    split = samples(name)
    optimizer = optimizer or make_optimizer(model, SETTINGS)
    return take_step(
        model, changes, decided_after=0, seed=0, optimizer=optimizer, train=split, subset=len(split.targets),
        ridge=1e-3, fold_limit=8, ranks=Ranks(),
    )  # fmt: skip


def test_wider_networks_get_channels_first_then_heads_and_units_of_every_block():
    steps = expand(network("gpt"), Widen(times=1.5))
    paths = [f"groups.0.blocks.{i}.branch" for i in range(2)]
    wanted = [AddChannels(site="groups.0.entry", channels=4)]
    wanted += [s for p in paths for s in (AddHeads(block=p, heads=1), AddUnits(block=p, units=8))]
    assert steps == wanted


def test_channels_and_units_of_images_fill_groups_of_the_norm():
    steps = expand(family("resnet"), Widen(times=1.4))  # widths 4, 8 and hidden 4, 4 in groups of 2
    assert [s.channels for s in steps if isinstance(s, AddChannels)] == [2, 4]
    assert [s.units for s in steps if isinstance(s, AddUnits)] == [2, 2]


def test_a_factor_that_adds_nothing_is_refused():
    with pytest.raises(UserError, match="adds nothing"):
        expand(family("resnet"), Widen(times=1.01))


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt"])
@pytest.mark.parametrize("change", [Deepen(), Deepen(times=3), Deepen(inner="random"), Widen(), Widen(times=1.5)])
def test_whole_steps_keep_the_function(name, change):
    model, inputs = network(name), samples(name).inputs
    model.eval()
    with torch.no_grad():
        before = model(inputs)
        depth, _, params = size_of(model)
        taken = take(model, name, change)
        after = model(inputs)
    if isinstance(change, Deepen):
        assert torch.equal(before, after)
        assert size_of(model)[0] == depth * change.times
    else:
        assert float((before - after).abs().max()) <= 5e-6 * float(before.abs().max())
        assert size_of(model)[2] > params
    assert taken.words == [str(change)]
    assert len(taken.receipts) == len(expand(network(name), change))


def test_a_doubled_network_doubles_again():
    model = network("gpt")
    take(model, "gpt", Deepen(), Deepen())
    assert size_of(model)[0] == 8
    behind = [p for p in blocks_of(model) if p.startswith("groups.0.blocks.1.grown.")]
    assert len(behind) == 3  # each site keeps its own: its branch, the copy of it, and the copies of both


def test_copies_have_the_inner_weights_of_the_block_that_they_copy():
    model = network("mlp")
    take(model, "mlp", Deepen())
    for path in ("groups.0.blocks.0", "groups.0.blocks.1"):
        old, new = model.get_submodule(f"{path}.branch"), next(iter(model.get_submodule(path).grown.values()))
        assert torch.equal(old.inner.weight, new.inner.weight)
        assert new.is_zero


def test_plain_stacking_copies_projections_and_says_by_how_much_outputs_moved():
    model, inputs = network("gpt"), samples("gpt").inputs
    before = model(inputs)
    taken = take(model, "gpt", Deepen(exact=False))
    change = float((model(inputs) - before).detach().abs().max())
    assert taken.moved
    assert change > 0
    assert max(r.output_change for r in taken.receipts) > 0
    for path in ("groups.0.blocks.0", "groups.0.blocks.1"):
        old, new = model.get_submodule(f"{path}.branch"), next(iter(model.get_submodule(path).grown.values()))
        assert torch.equal(old.project.weight, new.project.weight)


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt"])
def test_a_widened_block_is_copied_with_its_new_units(name):
    """They are what a copy is for: a copy of the old half alone would be another block."""
    model = network(name)
    take(model, name, Widen())
    wide = sum(p.numel() for p in model.get_submodule("groups.0.blocks.0.branch").parameters())
    inputs = samples(name).inputs
    with torch.no_grad():
        before = model(inputs)
        take(model, name, Deepen())
        assert torch.equal(before, model(inputs))
    copy = next(iter(model.get_submodule("groups.0.blocks.0").grown.values()))
    assert sum(p.numel() for p in copy.parameters()) == wide


def test_a_group_without_blocks_gets_its_first():
    spec = {"family": "mlp", "input_shape": [1, 3, 3], "num_classes": 4, "widths": [6], "blocks": [0], "hidden": [5]}
    assert expand(build(spec, seed=0), Deepen()) == [AddBlock(site="groups.0.entry", inner="random")]


def test_a_step_that_names_its_place_is_itself():
    step = AddUnits(block="groups.0.blocks.0.branch", units=2)
    assert expand(network("mlp"), step) == [step]


def test_new_parameters_of_whole_steps_are_trained():
    model = network("gpt")
    optimizer = make_optimizer(model, SETTINGS)
    take(model, "gpt", Widen(), Deepen(), optimizer=optimizer)
    held = {p for g in optimizer.param_groups for p in g["params"]}
    assert held == set(model.parameters())
