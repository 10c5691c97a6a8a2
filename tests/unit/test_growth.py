"""Growth leaves the function, the old parameters and their gradients as they are, bit for bit.

No tolerance anywhere: a zero branch adds an exact zero. What is exact cannot show where a block
went, so positions are tested with blocks that do something.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch_helpers import (
    FAMILY_BLOCKS,
    FAMILY_SITES,
    FAMILY_SPECS,
    TupleNet,
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
from growth_service.growth import growth_log, insert_block, rebuild, widen
from growth_service.growth.transplant import parameter_groups
from growth_service.models import build

SITES = [(name, site) for name in FAMILY_SITES for site in FAMILY_SITES[name]]
BLOCKS = [(name, block) for name in FAMILY_BLOCKS for block in FAMILY_BLOCKS[name]]
UNITS = {"mlp": 3, "resnet": 4}


def loss_gradients(model, name):
    """Gradients of all parameters of a cross-entropy, by name."""
    inputs, targets = family_data(name)
    found = torch.autograd.grad(nn.functional.cross_entropy(model(inputs), targets), list(model.parameters()))
    return dict(zip((n for n, _ in model.named_parameters()), found, strict=True))


def assert_grows_exactly(model, name, grow):
    """Run ``grow(check_batch)`` and compare everything that must not change."""
    inputs, _ = family_data(name)
    outputs, gradients = model(inputs), loss_gradients(model, name)
    names, weights = list(gradients), copy.deepcopy(model.state_dict())

    receipt = grow(inputs)

    assert torch.equal(model(inputs), outputs)
    assert receipt.output_change == 0.0
    after = loss_gradients(model, name)
    assert [n for n in after if n in names] == names
    assert all(torch.equal(after[n], gradients[n]) for n in names)
    assert all(torch.equal(model.state_dict()[n], value) for n, value in weights.items())
    assert set(after) - set(names) == set(receipt.parameters)
    assert receipt.parameters_added == sum(after[n].numel() for n in receipt.parameters)


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "site"), SITES)
def test_an_insertion_changes_no_output_no_old_weight_and_no_old_gradient(name, site, training):
    model = family(name).train(training)
    assert_grows_exactly(
        model, name, lambda check: insert_block(model, site=site, generator=generator(), check_batch=check)
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_a_widening_changes_no_output_no_old_weight_and_no_old_gradient(name, block, training):
    model = family(name).train(training)
    assert_grows_exactly(
        model, name,
        lambda check: widen(model, site=block, units=UNITS[name], generator=generator(), check_batch=check),
    )  # fmt: skip


@pytest.mark.parametrize("name", list(FAMILY_SPECS))
def test_growing_everywhere_several_times_in_a_row_changes_nothing(name):
    model = family(name)
    for turn in range(3):
        for site in FAMILY_SITES[name]:
            assert_grows_exactly(
                model, name,
                lambda check, site=site, turn=turn: insert_block(
                    model, site=site, generator=generator(turn), check_batch=check
                ),
            )  # fmt: skip
        for block in FAMILY_BLOCKS[name]:
            assert_grows_exactly(
                model, name,
                lambda check, block=block, turn=turn: widen(
                    model, site=block, units=UNITS[name], generator=generator(turn), check_batch=check
                ),
            )  # fmt: skip
        give_projections(model, seed=turn)  # the next turn grows a network whose grown parts do something
    assert len(growth_log(model)) == 3 * (len(FAMILY_SITES[name]) + len(FAMILY_BLOCKS[name]))


def test_an_inserted_block_can_itself_be_widened():
    model = family("resnet")
    path = insert_block(model, site="groups.1.entry", generator=generator()).path
    assert_grows_exactly(
        model, "resnet", lambda check: widen(model, site=path, units=4, generator=generator(), check_batch=check)
    )


@pytest.mark.parametrize("name", list(FAMILY_SPECS))
def test_the_projection_of_an_inserted_block_gets_a_gradient_at_once(name):
    model = family(name)
    receipt = insert_block(model, site=FAMILY_SITES[name][1], generator=generator())
    found = loss_gradients(model, name)
    assert {n for n in receipt.parameters if found[n].any()} == {n for n in receipt.parameters if ".project." in n}


@pytest.mark.parametrize("training", [True, False])
def test_new_parts_are_in_the_mode_of_the_network_they_join(training):
    model = family("mlp").train(training)
    insert_block(model, site="groups.0.entry", generator=generator())
    widen(model, site="groups.0.blocks.0.branch", units=2, generator=generator())
    assert {m.training for m in model.modules()} == {training}


def test_a_double_precision_network_gets_double_precision_blocks():
    model = family("mlp", dtype=torch.float64)
    insert_block(model, site="groups.0.entry", generator=generator())
    widen(model, site="groups.0.blocks.0.branch", units=2, generator=generator())
    assert {p.dtype for p in model.parameters()} == {torch.float64}


# --- position -------------------------------------------------------------------------------------


def give_projections(model, *, seed=0):
    """Let all blocks that still add nothing add something."""
    with torch.no_grad():
        for index, module in enumerate(model.modules()):
            if hasattr(module, "project") and module.is_zero:
                for parameter in module.project.parameters():
                    parameter.copy_(0.3 * normal(*parameter.shape, seed=97 * seed + index))


def with_hook(model, path, change):
    """Outputs of the ungrown network where ``change(args, output)`` replaces the output at a path."""
    inputs, _ = family_data("mlp" if model.family == "mlp" else "resnet")
    handle = model.get_submodule(path).register_forward_hook(lambda _module, args, output: change(args, output))
    try:
        return model(inputs)
    finally:
        handle.remove()


@pytest.mark.parametrize(("name", "site"), SITES)
def test_an_inserted_block_adds_to_the_stream_at_its_site(name, site):
    model, before = family(name), family(name)
    receipt = insert_block(model, site=site, generator=generator())
    give_projections(model)
    assert receipt.path == f"{site}.grown.0"
    block = model.get_submodule(receipt.path)
    wanted = with_hook(before, site, lambda _args, z: z + block(z))
    found = model(family_data(name)[0])
    assert torch.equal(found, wanted)
    assert not torch.equal(found, before(family_data(name)[0]))


@pytest.mark.parametrize(("name", "site"), SITES)
def test_later_insertions_at_a_site_run_last(name, site):
    model, before = family(name), family(name)
    paths = [insert_block(model, site=site, generator=generator(seed)).path for seed in range(3)]
    give_projections(model)
    first, second, third = (model.get_submodule(path) for path in paths)

    def in_order(_args, z):
        for block in (first, second, third):
            z = z + block(z)
        return z

    assert torch.equal(model(family_data(name)[0]), with_hook(before, site, in_order))


@pytest.mark.parametrize(("name", "site"), BLOCKS)
def test_new_units_read_what_their_block_reads_and_add_to_its_output(name, site):
    model, before = family(name), family(name)
    receipt = widen(model, site=site, units=UNITS[name], generator=generator())
    give_projections(model)
    assert receipt.path == f"{site}.widened.0"
    branch = model.get_submodule(receipt.path)
    assert branch.hidden == UNITS[name]
    wanted = with_hook(before, site, lambda args, output: output + branch(args[0]))
    assert torch.equal(model(family_data(name)[0]), wanted)


def test_new_units_read_through_a_copy_of_the_norm_of_their_block():
    model = family("resnet")
    host = model.get_submodule("groups.0.blocks.0.branch")
    with torch.no_grad():
        host.norm.weight.copy_(normal(4))
        host.norm.bias.copy_(normal(4, seed=1))
    receipt = widen(model, site="groups.0.blocks.0.branch", units=4, generator=generator())
    branch = model.get_submodule(receipt.path)
    assert torch.equal(branch.norm.weight, host.norm.weight)
    assert torch.equal(branch.norm.bias, host.norm.bias)
    assert branch.norm.weight is not host.norm.weight


@pytest.mark.parametrize(("name", "site"), SITES)
def test_names_of_old_parameters_never_shift(name, site):
    model, before = family(name), family(name)
    insert_block(model, site=site, generator=generator())
    assert before.state_dict().keys() <= model.state_dict().keys()
    missing, unexpected = model.load_state_dict(before.state_dict(), strict=False)
    assert (unexpected, all(f"{site}.grown.0." in key for key in missing)) == ([], True)


def test_a_module_that_returns_a_tuple_is_grown_at_its_first_item():
    model, inputs = TupleNet(), normal(7, 5)
    before = model(inputs)
    receipt = insert_block(model, site="inner", generator=generator(), check_batch=inputs)
    assert torch.equal(model(inputs), before)
    give_projections(model)
    block, (z, scale) = model.get_submodule(receipt.path), copy.deepcopy(model.inner.linear)(inputs).split([7, 0])
    assert scale.numel() == 0
    assert torch.equal(model(inputs), model.head((z + block(z)) * 2.0))


# --- refusals -------------------------------------------------------------------------------------


def test_a_block_that_adds_something_is_refused_and_nothing_changes():
    model = family("mlp")
    block = block_from_config({"type": "mlp", "width": 6, "hidden": 5}, generator=generator())
    with torch.no_grad():
        block.project.bias[3] = 1e-30
    before = fingerprint(model)
    with pytest.raises(UserError, match=r"for 'groups\.0\.entry' is not zero.*call block\.reset\(generator\)"):
        insert_block(model, site="groups.0.entry", block=block, generator=generator())
    assert_untouched(model, before)
    assert growth_log(model) == []


@pytest.mark.parametrize("grown_before", [0, 2])
def test_a_block_that_changes_outputs_is_refused_and_nothing_changes(grown_before):
    """Zero times infinity: features that overflow make even a zero projection speak."""
    model, (inputs, _) = family("mlp"), family_data("mlp")
    for seed in range(grown_before):
        insert_block(model, site="groups.0.entry", generator=generator(seed))
    block = block_from_config({"type": "mlp", "width": 6, "hidden": 5}, generator=generator())
    with torch.no_grad():
        block.inner.weight.fill_(3e38)
    before = fingerprint(model)
    with pytest.raises(UserError, match=r"changes outputs by nan: this place cannot preserve the function"):
        insert_block(model, site="groups.0.entry", block=block, generator=generator(), check_batch=inputs)
    assert_untouched(model, before)
    assert len(growth_log(model)) == grown_before


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_a_block_that_does_not_fit_the_stream_is_refused_and_nothing_changes(name):
    model, (inputs, _) = family(name), family_data(name)
    kind = {"mlp": {"type": "mlp", "width": 7, "hidden": 5}, "resnet": {"type": "conv", "width": 8, "hidden": 4}}[name]
    block = block_from_config(kind, generator=generator())
    before = fingerprint(model)
    with pytest.raises((UserError, RuntimeError)):
        insert_block(model, site="groups.0.entry", block=block, generator=generator(), check_batch=inputs)
    assert_untouched(model, before)
    assert growth_log(model) == []


def test_an_optimizer_learns_nothing_of_a_refused_block():
    model, (inputs, _) = family("mlp"), family_data("mlp")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    block = block_from_config({"type": "mlp", "width": 6, "hidden": 5}, generator=generator())
    with torch.no_grad():
        block.inner.weight.fill_(3e38)
    with pytest.raises(UserError, match="changes outputs"):
        insert_block(
            model, site="groups.0.entry", block=block, generator=generator(), optimizer=optimizer, check_batch=inputs
        )
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}


def test_only_blocks_can_be_widened():
    model = family("mlp")
    before = fingerprint(model)
    with pytest.raises(SiteError, match=r"'groups\.0\.entry' is a Linear, not a block: only blocks have hidden units"):
        widen(model, site="groups.0.entry", units=2, generator=generator())
    assert_untouched(model, before)


def test_units_that_do_not_fill_whole_groups_are_refused_and_nothing_changes():
    model = family("resnet")
    before = fingerprint(model)
    with pytest.raises(UserError, match="hidden 3 of a convolution block must be a multiple of its group size 2"):
        widen(model, site="groups.0.blocks.0.branch", units=3, generator=generator())
    assert_untouched(model, before)


def test_no_units_at_all_are_refused():
    with pytest.raises(UserError, match="hidden of a block must be at least 1, got 0"):
        widen(family("mlp"), site="groups.0.blocks.0.branch", units=0, generator=generator())


@pytest.mark.parametrize("grow", [insert_block, lambda model, **arguments: widen(model, units=2, **arguments)])
def test_an_unknown_path_is_refused_with_paths_that_exist(grow):
    model = family("mlp")
    before = fingerprint(model)
    with pytest.raises(SiteError, match=r"no module at path 'groups\.0\.blocks\.9'.*groups\.0\.entry"):
        grow(model, site="groups.0.blocks.9", generator=generator())
    assert_untouched(model, before)


def test_a_container_is_refused_as_a_site():
    with pytest.raises(SiteError, match="is a container"):
        insert_block(family("mlp"), site="groups.0.blocks", generator=generator())


def test_an_unknown_stream_asks_for_a_block_or_a_batch_to_see_it():
    with pytest.raises(SiteError, match=r"stream at 'stem' is not known: pass block=, or check_batch="):
        insert_block(VectorNet(), site="stem", generator=generator())


def test_an_unknown_stream_is_seen_on_the_check_batch():
    model, inputs = VectorNet(), normal(3, 5)
    receipt = insert_block(model, site="stem", generator=generator(), check_batch=inputs)
    assert (receipt.block["type"], receipt.block["width"]) == ("mlp", 6)


# --- copies, seeds, streams -----------------------------------------------------------------------


def grown(name, *, model=None):
    """A network that has grown at several places, with weights everywhere."""
    model = family(name) if model is None else model
    sites, blocks = FAMILY_SITES[name], FAMILY_BLOCKS[name]
    insert_block(model, site=sites[1], generator=generator(1))
    widen(model, site=blocks[0], units=UNITS[name], generator=generator(2))
    insert_block(model, site=sites[0], generator=generator(3))
    insert_block(model, site=sites[1], generator=generator(4))
    widen(model, site=f"{sites[1]}.grown.0", units=UNITS[name], generator=generator(5))
    give_projections(model)
    return model


@pytest.mark.parametrize("name", list(FAMILY_SPECS))
def test_a_deep_copy_of_a_grown_network_is_one_of_its_own(name):
    model, (inputs, _) = grown(name), family_data(name)
    twin = copy.deepcopy(model)
    outputs = model(inputs)
    assert torch.equal(twin(inputs), outputs)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(inputs), outputs)
    assert growth_log(twin) == growth_log(model)


def test_growing_a_copy_leaves_the_original_alone():
    model = grown("mlp")
    before, log = fingerprint(model), growth_log(model)
    insert_block(copy.deepcopy(model), site="groups.0.blocks.0", generator=generator())
    assert_untouched(model, before)
    assert growth_log(model) == log


@pytest.mark.parametrize("name", list(FAMILY_SPECS))
def test_growth_leaves_the_global_random_streams_alone(name):
    model = family(name)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002 - the global stream is meant
    grown(name, model=model)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002


@pytest.mark.parametrize("name", list(FAMILY_SPECS))
def test_weights_of_new_parts_depend_on_the_generator_alone(name):
    """The global streams of ranks drift apart; what they grow must not."""

    def weights(seed, *, global_seed):
        model = family(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(global_seed)
            insert_block(model, site=FAMILY_SITES[name][1], generator=generator(seed))
            widen(model, site=FAMILY_BLOCKS[name][0], units=UNITS[name], generator=generator(seed))
        return torch.cat([p.detach().flatten() for n, p in model.named_parameters() if ".inner." in n])

    assert torch.equal(weights(1, global_seed=1), weights(1, global_seed=2))
    assert not torch.equal(weights(1, global_seed=1), weights(2, global_seed=1))


# --- replay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(FAMILY_SPECS))
def test_a_replayed_log_gives_the_same_network(name):
    model, (inputs, _) = grown(name), family_data(name)
    again = rebuild(build(FAMILY_SPECS[name], seed=99), growth_log(model))
    assert list(again.state_dict()) == list(model.state_dict())
    assert [n for n, _ in again.named_parameters()] == [n for n, _ in model.named_parameters()]
    again.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(again(inputs), model(inputs))
    assert growth_log(again) == growth_log(model)


def test_a_replayed_network_can_grow_on():
    model = grown("mlp")
    again = rebuild(family("mlp"), growth_log(model))
    receipts = [insert_block(m, site="groups.0.blocks.0", generator=generator()) for m in (model, again)]
    assert receipts[0] == receipts[1]


def test_a_log_is_not_replayed_on_a_network_that_has_grown():
    log = growth_log(grown("mlp"))
    with pytest.raises(UserError, match="base network already has 5 grow steps: rebuild from a fresh one"):
        rebuild(grown("mlp"), log)


def test_a_log_in_another_order_is_refused():
    model = family("mlp")
    for seed in range(2):
        insert_block(model, site="groups.0.entry", generator=generator(seed))
    with pytest.raises(UserError, match=r"step 0 .*grown\.1'\) does not fit this network: replaying it gives"):
        rebuild(family("mlp"), growth_log(model)[::-1])


def test_a_log_of_another_base_is_refused():
    model = family("resnet")
    insert_block(model, site="groups.1.entry", generator=generator())
    with pytest.raises(UserError, match=r"step 0 .*no module at path 'groups\.1\.entry'"):
        rebuild(family("mlp"), growth_log(model))


# --- the optimiser --------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9),
    "adam": lambda groups: optim.Adam(groups, lr=0.003),
    "adamw": lambda groups: optim.AdamW(groups, lr=0.003),
}


def trained(kind, *, model, steps=5):
    """An optimiser with two groups and some history."""
    optimizer = OPTIMIZERS[kind](parameter_groups(model.named_parameters(), weight_decay=0.1))
    for _ in range(steps):
        step(model, optimizer)
    return optimizer


def step(model, optimizer):
    inputs, targets = family_data("mlp")
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def grow_both(model, optimizer):
    insert_block(model, site="groups.0.blocks.0", generator=generator(1), optimizer=optimizer)
    widen(model, site="groups.0.blocks.1.branch", units=3, generator=generator(2), optimizer=optimizer)
    return [p for n, p in model.named_parameters() if ".grown." in n or ".widened." in n]


def state_of(optimizer, parameters):
    return [{k: copy.deepcopy(v) for k, v in optimizer.state[p].items()} for p in parameters]


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_an_optimizer_keeps_what_it_knows_of_old_parameters(kind):
    model = family("mlp")
    optimizer = trained(kind, model=model)
    old = list(model.parameters())
    before = state_of(optimizer, old)
    grow_both(model, optimizer)
    after = state_of(optimizer, old)
    for wanted, found in zip(before, after, strict=True):
        assert wanted.keys() == found.keys()
        assert all(torch.equal(torch.as_tensor(found[k]), torch.as_tensor(wanted[k])) for k in wanted)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_old_parameters_step_as_if_nothing_had_grown(kind):
    model, twin = family("mlp"), family("mlp")
    optimizer, other = trained(kind, model=model), trained(kind, model=twin)
    grow_both(model, optimizer)
    step(model, optimizer)
    step(twin, other)
    weights = model.state_dict()
    assert all(torch.equal(weights[k], v) for k, v in twin.state_dict().items())


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_new_parameters_count_their_own_steps(kind):
    model = family("mlp")
    optimizer = trained(kind, model=model)
    new = grow_both(model, optimizer)
    assert not any(p in optimizer.state for p in new)
    step(model, optimizer)
    step(model, optimizer)
    assert {float(optimizer.state[p]["step"]) for p in new} == {2.0}
    assert {float(optimizer.state[p]["step"]) for p in model.parameters()} == {2.0, 7.0}


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_the_first_update_of_a_new_projection_has_the_size_of_the_learning_rate(kind):
    model = family("mlp")
    optimizer = trained(kind, model=model, steps=30)
    receipt = insert_block(model, site="groups.0.blocks.0", generator=generator(), optimizer=optimizer)
    weight = model.get_submodule(receipt.path).project.weight
    step(model, optimizer)
    # zero state: m / sqrt(v) = sign(g) up to eps = 1e-8 against gradients of 1e-4 and more; zero weights do not decay
    assert weight.detach().abs().max() == pytest.approx(0.003, rel=1e-3)
    assert weight.detach().abs().median() == pytest.approx(0.003, rel=1e-2)


def test_the_first_update_of_a_new_projection_under_momentum_is_the_plain_gradient_step():
    model = family("mlp")
    optimizer = trained("sgd", model=model)
    receipt = insert_block(model, site="groups.0.blocks.0", generator=generator(), optimizer=optimizer)
    weight = model.get_submodule(receipt.path).project.weight
    step(model, optimizer)
    assert torch.equal(weight.detach(), -0.05 * weight.grad)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_an_optimizer_covers_exactly_the_live_parameters(kind):
    model = family("mlp")
    optimizer = trained(kind, model=model)
    grow_both(model, optimizer)
    covered = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(covered) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_new_matrices_decay_and_new_vectors_do_not(kind):
    model = family("mlp")
    optimizer = trained(kind, model=model)
    grow_both(model, optimizer)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {decay[id(p)] for p in model.parameters() if p.ndim > 1} == {0.1}
    assert {decay[id(p)] for p in model.parameters() if p.ndim <= 1} == {0.0}


def test_an_optimizer_with_named_parameters_learns_the_new_names():
    model = family("mlp")
    optimizer = optim.AdamW(list(model.named_parameters()), lr=0.01)
    grow_both(model, optimizer)
    (group,) = optimizer.param_groups
    by_name = dict(zip(group["param_names"], group["params"], strict=True))
    assert {n: id(p) for n, p in by_name.items()} == {n: id(p) for n, p in model.named_parameters()}


def test_a_block_of_ones_own_is_inserted_as_it_is():
    model = family("mlp")
    block = MLPBlock(6, 9)
    insert_block(model, site="groups.0.entry", block=block, generator=generator())
    assert model.get_submodule("groups.0.entry.grown.0") is block
