"""A probe looks and does not touch; it says clearly what it cannot look at; any module will do."""

import copy
import json
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch_helpers import (
    FAMILY_SITES,
    ImageNet,
    SequenceNet,
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
from growth_service.growth import insert_block
from growth_service.probing import jumpboard, probe

CROSS_ENTROPY = nn.CrossEntropyLoss()
VECTORS = normal(24, 5), torch.randint(0, 3, (24,), generator=generator(1))


def run(model, *, batch=VECTORS, loss=CROSS_ENTROPY, **arguments):
    """Probe with one batch for everything, where the test does not say otherwise."""
    arguments = {"batches": [batch], "train_batches": [batch]} | arguments
    return probe(model, loss=loss, reduction="mean", **arguments)


# --- nothing is touched ---------------------------------------------------------------------------


class Moody(nn.Module):
    """Everything that a careless probe would disturb: batch statistics, dropout, frozen weights, mixed modes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.branch = block_from_config({"type": "mlp", "width": 6, "hidden": 4}, generator=generator())
        self.head = nn.Linear(6, 3)
        self.register_buffer("counter", torch.zeros(2))
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=index))
        self.stem.weight.requires_grad_(False)
        self.norm.eval()  # others stay in training mode
        self.stem.register_forward_hook(lambda _module, _args, output: output)
        self.head.register_forward_pre_hook(lambda _module, _args: None)
        CROSS_ENTROPY(self(VECTORS[0]), VECTORS[1]).backward()

    def forward(self, x):
        z = self.drop(self.norm(self.stem(x)))
        return self.head(z + self.branch(z))


def test_a_probe_leaves_the_network_bit_identical():
    model = Moody()
    before = fingerprint(model)
    run(model, sites=["stem", "drop"], pool=[VECTORS[0]])
    assert_untouched(model, before)


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_a_probe_with_default_blocks_leaves_a_family_bit_identical(name):
    model = family(name).train()
    before = fingerprint(model)
    run(model, batch=family_data(name))
    assert_untouched(model, before)


class FailingLoss:
    """Works for some batches, then raises."""

    def __init__(self, *, after):
        self.left = after

    def __call__(self, outputs, targets):
        self.left -= 1
        if self.left < 0:
            raise OSError("no more")
        return CROSS_ENTROPY(outputs, targets)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_probe_that_fails_in_the_middle_leaves_the_network_bit_identical(after):
    """After 0: in the first training batch; after 2: in the held-out batch."""
    model = Moody()
    before = fingerprint(model)
    with pytest.raises(OSError, match="no more"):
        run(model, sites=["stem"], train_batches=[VECTORS, VECTORS], loss=FailingLoss(after=after))
    assert_untouched(model, before)


def test_a_probe_inside_no_grad_works_and_leaves_the_gradient_mode():
    model = Moody()
    with torch.no_grad():
        before = fingerprint(model)
        assert run(model, sites=["stem"]).sites[0].raw_rms > 0
        assert_untouched(model, before)


def test_a_jumpboard_leaves_the_network_bit_identical():
    model = Moody()
    direction = run(model, sites=["stem"]).sites[0].descent_direction.matrix_DK
    before = fingerprint(model)
    block = block_from_config({"type": "mlp", "width": 6, "hidden": 4}, generator=generator(4))
    jumpboard(
        model, site="stem", block=block, direction=direction, batches=[VECTORS], loss=CROSS_ENTROPY, reduction="mean"
    )
    assert_untouched(model, before)


def test_a_jumpboard_that_fails_in_the_middle_leaves_the_network_bit_identical():
    model = Moody()
    direction = run(model, sites=["stem"]).sites[0].descent_direction.matrix_DK
    before = fingerprint(model)
    block = block_from_config({"type": "mlp", "width": 6, "hidden": 4}, generator=generator(4))
    with pytest.raises(OSError, match="no more"):
        jumpboard(
            model, site="stem", block=block, direction=direction, batches=[VECTORS], loss=FailingLoss(after=2),
            reduction="mean",
        )  # fmt: skip
    assert_untouched(model, before)


def test_a_probe_leaves_the_candidate_block_as_it_was():
    block = block_from_config({"type": "mlp", "width": 6, "hidden": 4}, generator=generator(4))
    model = VectorNet()
    before = fingerprint(block)
    run(model, sites=["stem"], blocks={"stem": block})
    assert_untouched(block, before)


def test_equal_seeds_give_equal_reports():
    model, batch = family("resnet"), family_data("resnet")
    assert run(model, batch=batch, seed=3).to_dict() == run(model, batch=batch, seed=3).to_dict()


def test_another_seed_draws_other_default_blocks():
    model, batch = family("mlp"), family_data("mlp")
    random = {"batch": batch, "inner": "random"}
    assert run(model, seed=3, **random).protocol != run(model, seed=4, **random).protocol


def test_the_scored_block_is_handed_out_for_insertion():
    model, batch = family("mlp"), family_data("mlp")
    report = run(model, batch=batch)
    site = report.sites[1]
    block = report.blocks[site.kind, site.site]
    insert_block(model, site=site.site, block=block, generator=generator())
    CROSS_ENTROPY(model(batch[0]), batch[1]).backward()
    found = torch.from_numpy(site.cross_gradient).float()
    wanted = torch.cat([block.project.weight.grad, block.project.bias.grad[:, None]], dim=1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)  # float32 sums in another order


# --- clear errors ---------------------------------------------------------------------------------


def test_an_unknown_path_is_refused_with_paths_that_exist():
    with pytest.raises(SiteError, match=r"no module at path 'groups\.0\.blocks\.7'.*groups\.0\.entry"):
        run(family("mlp"), batch=family_data("mlp"), sites=["groups.0.blocks.7"])


def test_an_unknown_path_that_is_like_none_is_refused_with_some_that_exist():
    with pytest.raises(SiteError, match=r"no module at path 'layer1'.*stem"):
        run(VectorNet(), sites=["layer1"])


def test_a_container_is_refused_with_what_to_name_instead():
    with pytest.raises(SiteError, match=r"'groups\.0\.blocks' is a container \(ModuleList\): name its last child"):
        run(family("mlp"), batch=family_data("mlp"), sites=["groups.0.blocks"])


def test_a_module_without_a_stream_is_refused_with_the_shapes_that_are_one():
    class Odd(VectorNet):
        def __init__(self):
            super().__init__()
            self.words = Words()

        def forward(self, x):
            self.words(x)
            return super().forward(x)

    class Words(nn.Module):
        def forward(self, x):
            return "no tensor"

    with pytest.raises(SiteError, match=r"'words' \(str\) is no residual stream: needs \[B, d\], \[B, T, d\] or"):
        run(Odd(), sites=["words"])


def test_a_stream_without_channels_is_refused():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = nn.Flatten(0)

        def forward(self, x):
            return self.pool(x).reshape(len(x), -1)

    with pytest.raises(SiteError, match=r"'pool' \(\(120,\)\) is no residual stream"):
        run(Flat(), sites=["pool"])


def test_a_module_that_does_not_run_is_refused():
    model = VectorNet()
    model.spare = nn.Linear(6, 6)
    with pytest.raises(SiteError, match="spare"):
        run(model, sites=["spare"])


def test_a_model_of_no_family_is_refused_without_sites():
    with pytest.raises(SiteError, match="no default sites are known for VectorNet: pass the paths"):
        run(VectorNet())


def test_no_batches_are_refused():
    with pytest.raises(UserError, match=r"batches is empty.*at least 4 samples"):
        run(VectorNet(), sites=["stem"], batches=[])


def test_no_training_batches_are_refused():
    with pytest.raises(UserError, match="train_batches is empty"):
        run(VectorNet(), sites=["stem"], train_batches=[])


def test_an_empty_pool_is_refused():
    with pytest.raises(UserError, match="pool is empty"):
        run(VectorNet(), sites=["stem"], pool=[])


def test_neither_training_batches_nor_a_pool_is_refused():
    with pytest.raises(UserError, match="probe needs train_batches, or pool"):
        run(VectorNet(), sites=["stem"], train_batches=None)


@pytest.mark.parametrize("num", [1, 3])
def test_fewer_than_four_samples_are_refused(num):
    few = VECTORS[0][:num], VECTORS[1][:num]
    with pytest.raises(UserError, match=f"at least 4 .*got {num}"):
        run(VectorNet(), sites=["stem"], batches=[few])


def test_no_site_is_refused():
    with pytest.raises(UserError, match="no candidate"):
        run(VectorNet(), sites=[])


def test_held_out_inputs_that_are_not_numbers_are_refused():
    with pytest.raises(UserError, match=r"loss of a probe batch is nan.*inputs are not finite"):
        run(VectorNet(), sites=["stem"], batches=[(VECTORS[0] * np.nan, VECTORS[1])])


def test_training_inputs_that_are_not_numbers_are_refused():
    with pytest.raises(UserError, match=r"loss of a probe batch is nan.*inputs are not finite"):
        run(VectorNet(), sites=["stem"], train_batches=[(VECTORS[0] * np.nan, VECTORS[1])])


def test_pool_inputs_that_are_not_numbers_are_refused():
    with pytest.raises(UserError, match="not finite"):
        run(VectorNet(), sites=["stem"], pool=[VECTORS[0] * np.nan])


# --- any module -----------------------------------------------------------------------------------


def test_a_pool_without_training_batches_is_enough_for_a_certificate():
    found = run(VectorNet(), sites=["stem"], train_batches=None, pool=[VECTORS[0]]).sites[0]
    assert found.ucl > found.s
    assert found.s_plugin > 0


@pytest.mark.parametrize(
    ("model", "shape", "classes"),
    [(VectorNet(), (5,), ()), (SequenceNet(), (7, 5), (7,)), (ImageNet(), (2, 4, 4), ()), (TupleNet(), (5,), ())],
)
def test_any_module_is_probed_at_a_named_site(model, shape, classes):
    inputs = normal(12, *shape)
    targets = torch.randint(0, 3, (12, *classes), generator=generator())
    path = "inner" if isinstance(model, TupleNet) else "stem"

    def loss(outputs, targets):
        return CROSS_ENTROPY(outputs.reshape(-1, 3), targets.reshape(-1))

    found = run(model, batch=(inputs, targets), loss=loss, sites=[path]).sites[0]
    assert (found.site, found.num_samples) == (path, 12)
    assert found.s_plugin > 0


class Pair(NamedTuple):
    stream: torch.Tensor
    scale: float


class NamedNet(TupleNet):
    """As TupleNet, but the fields have names."""

    class Inner(TupleNet.Inner):
        def forward(self, x):
            return Pair(self.linear(x), 2.0)

    def forward(self, x):
        found = self.inner(x)
        return self.head(found.stream * found.scale)


class ListNet(TupleNet):
    """As TupleNet, but with a list."""

    class Inner(TupleNet.Inner):
        def forward(self, x):
            return [self.linear(x), 2.0]


@pytest.mark.parametrize("make", [NamedNet, ListNet])
def test_named_tuples_and_lists_are_probed_like_tuples(make):
    assert run(make(), sites=["inner"]).sites[0].s_plugin == run(TupleNet(), sites=["inner"]).sites[0].s_plugin


def test_a_site_whose_stream_is_changed_in_place_later_is_probed_as_it_was():
    """Many public networks have ``relu(inplace=True)`` right after a layer."""

    class Plain(VectorNet):
        def top(self, z):
            return self.head(torch.relu(z))

    class InPlace(VectorNet):
        def top(self, z):
            return self.head(torch.relu_(z))

    found, wanted = (run(m, sites=["stem"]).sites[0] for m in (InPlace(), Plain()))
    assert found.to_dict() == wanted.to_dict()


def test_a_module_that_runs_twice_is_refused_or_scored_over_both_of_its_uses():
    """An inserted block would run, and get gradients, at both."""

    class Twice(VectorNet):
        def __init__(self):
            super().__init__()
            self.mid = nn.Linear(6, 6)
            self._draw(seed=0)

        def top(self, z):
            return super().top(self.mid(torch.tanh(self.mid(z))))

    model = Twice().double()
    batch = VECTORS[0].double(), VECTORS[1]
    block = MLPBlock(6, 4).double()
    block.reset(generator())
    try:
        found = run(model, batch=batch, sites=["mid"], blocks={"mid": block}).sites[0].cross_gradient
    except SiteError:
        return
    grown, inserted = copy.deepcopy(model), copy.deepcopy(block)
    insert_block(grown, site="mid", block=inserted, generator=generator())
    CROSS_ENTROPY(grown(batch[0]), batch[1]).backward()
    np.testing.assert_allclose(found[:, :-1], inserted.project.weight.grad.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_a_family_is_probed_at_all_of_its_sites_by_default(name):
    report = run(family(name), batch=family_data(name))
    assert [s.site for s in report.sites] == list(FAMILY_SITES[name])


def test_a_report_is_plain_json_and_a_table_with_a_line_for_each_candidate():
    report = run(family("mlp"), batch=family_data("mlp"))
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["verdict"] == report.verdict
    assert len(report.table().splitlines()) == len(report.sites) + 2
