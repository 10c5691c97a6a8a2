"""Every kind of block against the definition: least squares on the explicit Jacobian, autograd on the inserted block.

Tolerances: float64; the second moment squares the condition of the features, 1e-9 leaves room for that.
Inner weights keep the features well conditioned; sizes are small so that samples outnumber features.
"""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from signal_twins import (
    F64,
    LOSSES,
    gradient_rows,
    inserted_gradient,
    least_squares_score,
    naive_cross_gradients,
    stream,
    tangents,
)
from torch import nn
from torch_helpers import ImageNet, SequenceNet, VectorNet, generator, normal

from growth_service.blocks import (
    ConvBlock,
    GatedBranch,
    block_from_config,
    flatten_projection,
    projections,
    set_projection,
)
from growth_service.blocks.base import Block, zero
from growth_service.core.score import partial_out, saturation_score, whitener
from growth_service.growth import insert_block
from growth_service.probing import Candidate, jumpboard, probe
from growth_service.probing.jacobian import ParameterTangent, conjugate_gradients

VECTOR = {"net": VectorNet, "inputs": (5,), "targets": ()}
SEQUENCE = {"net": SequenceNet, "inputs": (7, 5), "targets": (7,)}
IMAGE = {"net": ImageNet, "inputs": (2, 4, 4), "targets": ()}
ATTENTION = {"type": "transformer", "width": 4, "heads": 2, "hidden": 3}
CONV = {"type": "conv", "width": 4, "hidden": 4, "group_size": 2}
KINDS = {
    "mlp": (VECTOR, {"type": "mlp", "width": 6, "hidden": 4}),
    "gated mlp": (VECTOR, {"type": "gated_mlp", "width": 6, "hidden": 4}),
    "gated mlp on tokens": (SEQUENCE, {"type": "gated_mlp", "width": 4, "hidden": 3, "bias": True}),
    "sequential transformer": (SEQUENCE, ATTENTION),
    "parallel transformer": (SEQUENCE, ATTENTION | {"parallel": True, "rotary": 1.0}),
    "transformer that sees all": (SEQUENCE, ATTENTION | {"causal": False}),
    "grouped queries, half rotary, gated": (
        SEQUENCE,
        ATTENTION | {"kv_heads": 1, "head_dim": 4, "rotary": 0.5, "gated": True, "activation": "silu", "norm": "rms"},
    ),
    "conv 3x3": (IMAGE, CONV),
    "conv 1x1": (IMAGE, CONV | {"kernel_out": 1}),
    "conv batch": (IMAGE, CONV | {"norm": "batch", "kernel_out": 1}),
    "conv layer": (IMAGE, CONV | {"norm": "layer"}),
    "conv plain": (IMAGE, CONV | {"norm": "none", "bias": False}),
    "depthwise": (IMAGE, {"type": "depthwise", "width": 4, "hidden": 5}),
    "scalar gate": (VECTOR, {"type": "gate", "gate": "scalar", "inner": {"type": "mlp", "width": 6, "hidden": 4}}),
    "channel gate": (VECTOR, {"type": "gate", "gate": "channel", "inner": {"type": "mlp", "width": 6, "hidden": 4}}),
    "channel gate on images": (IMAGE, {"type": "gate", "gate": "channel", "inner": CONV}),
    "affine gate on tokens": (
        SEQUENCE,
        {"type": "gate", "gate": "affine", "inner": {"type": "mlp", "width": 4, "hidden": 3}},
    ),
    "affine gate on images": (IMAGE, {"type": "gate", "gate": "affine", "inner": CONV}),
}


def case(kind, *, num=40, seed=0, dtype=F64):
    """Network, block, inputs and labels of a kind."""
    family, config = KINDS[kind]
    net = family["net"](seed=seed).to(dtype)
    block = block_from_config(config, generator=generator(seed + 50)).to(dtype).eval()
    inputs = normal(num, *family["inputs"], seed=seed + 60, dtype=dtype)
    return net, block, inputs, torch.randint(0, 3, (num, *family["targets"]), generator=generator(seed + 70))


def measured(net, block, inputs, targets, **arguments):
    """The certificate of one block, second moment from the inputs themselves."""
    arguments = {"batches": [(inputs, targets)], "train_batches": [(inputs, targets)], "pool": [inputs]} | arguments
    arguments = {"loss": LOSSES["none"], "reduction": "none", "ridge": 0.0} | arguments
    return probe(net, sites=["stem"], blocks={"stem": block}, **arguments).sites[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_of_every_kind_is_least_squares_on_its_jacobian(kind):
    net, block, inputs, targets = case(kind)
    wanted = least_squares_score(gradient_rows(net, inputs, targets), tangents(block, stream(net, inputs)))
    found = measured(net, block, inputs, targets)
    assert found.s_plugin == pytest.approx(wanted, rel=1e-9)
    assert wanted > 0


@given(
    num=st.integers(4, 40), width=st.integers(1, 3), hidden=st.integers(1, 6), seed=st.integers(0, 99),
    kind=st.sampled_from(["vector", "conv", "tokens"]),
)  # fmt: skip
def test_the_score_is_least_squares_at_any_size(num, width, hidden, seed, kind):
    """Also with fewer samples than features, where the pseudo-inverse interpolates."""
    width = 2 * width
    net = Sized(kind, width).to(F64)
    config = {
        "vector": {"type": "mlp", "width": width, "hidden": hidden},
        "conv": {"type": "conv", "width": width, "hidden": hidden, "norm": "none", "kernel_out": 3},
        "tokens": {"type": "transformer", "width": width, "heads": 2, "hidden": hidden},
    }[kind]
    block = block_from_config(config, generator=generator(seed)).to(F64)
    shape = {"vector": (3,), "conv": (2, 3, 3), "tokens": (4, 3)}[kind]
    inputs = normal(num, *shape, seed=seed, dtype=F64)
    targets = torch.randint(0, 3, (num, 4) if kind == "tokens" else (num,), generator=generator(seed))
    # the pseudo-inverse drops second moments below 1e-10 of the largest: singular values below 1e-5
    g_NE, jac_NEQ = gradient_rows(net, inputs, targets), tangents(block, stream(net, inputs))
    wanted = least_squares_score(g_NE, jac_NEQ, rcond=1e-5)
    # absolute: kept directions are amplified by up to 1e10 in the second moment, which has 1e-16 of rounding
    raw = float(np.square(g_NE).sum(axis=1).mean())
    singular = np.linalg.svd(jac_NEQ.reshape(-1, jac_NEQ.shape[-1]), compute_uv=False)
    kept = singular[singular > 1e-5 * singular[0]]
    condition = float((kept[0] / kept[-1]) ** 2)
    found = measured(net, block, inputs, targets).s_plugin
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-14 * condition * raw)


class Sized(nn.Module):
    """A network of any width: stem, then a curved head."""

    def __init__(self, kind, width):
        super().__init__()
        self.stem = nn.Conv2d(2, width, 3, padding=1) if kind == "conv" else nn.Linear(3, width)
        self.head = nn.Linear(width, 3)
        self._pool = kind == "conv"
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(0.7 * normal(*parameter.shape, seed=index))

    def top(self, z):
        z = z + torch.tanh(z)
        return self.head(z.square().mean(dim=(2, 3)) if self._pool else z)

    def forward(self, x):
        return self.top(self.stem(x))


@pytest.mark.parametrize(("kernel", "padding", "dilation"), [(1, 0, 1), (3, 1, 1), (3, 2, 2), (5, 2, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_score_of_a_convolution_holds_for_every_padding(kernel, padding, dilation, bias):
    class Convolution(Block):
        def __init__(self):
            super().__init__()
            self.project = nn.Conv2d(4, 4, kernel, padding=padding, dilation=dilation, bias=bias)
            zero(self.project)

        def features(self, z):
            return torch.tanh(z)

        def config(self):
            return {"type": "convolution"}

        @property
        def hidden(self):
            return 4

    net, _, inputs, targets = case("conv 3x3")
    block = Convolution().to(F64)
    wanted = least_squares_score(gradient_rows(net, inputs, targets), tangents(block, stream(net, inputs)))
    assert measured(net, block, inputs, targets).s_plugin == pytest.approx(wanted, rel=1e-9)
    gradient = inserted_gradient(net, Candidate(path="stem", block=block), inputs, targets)
    found = measured(net, block, inputs, targets, loss=LOSSES["mean"], reduction="mean").cross_gradient
    np.testing.assert_allclose(found, gradient, rtol=0, atol=1e-10 * np.abs(gradient).max())


# float32: 6e-8 a rounding, grown by sums over a few hundred terms in another order than autograd's
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", [k for k in KINDS if "gate" not in k.split()])
def test_the_cross_gradient_of_every_kind_is_the_gradient_of_its_inserted_zero_projection(kind, dtype, tolerance):
    net, block, inputs, targets = case(kind, dtype=dtype)
    grown, inserted = copy.deepcopy(net), copy.deepcopy(block)
    insert_block(grown, site="stem", block=inserted, generator=generator())
    grown.eval()
    LOSSES["mean"](grown(inputs), targets).backward()
    wanted = flatten_gradient(inserted.project)
    found = measured(net, block, inputs, targets, ridge=1e-3).cross_gradient
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("kind", [k for k in KINDS if "gate" in k.split()])
def test_the_cross_gradient_of_a_gate_is_the_gradient_of_its_parameters(kind):
    net, block, inputs, targets = case(kind)
    z = stream(net, inputs)
    LOSSES["mean"](net.top(z + block(z)), targets).backward()
    wanted = np.stack([p.grad.numpy() for p in block.project.parameters()], axis=1)
    found = measured(net, block, inputs, targets).cross_gradient
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10 * np.abs(wanted).max())


def flatten_gradient(project):
    parts = [project.weight.grad.flatten(1)]
    if project.bias is not None:
        parts.append(project.bias.grad[:, None])
    return torch.cat(parts, dim=1).double().numpy()


def test_gates_span_less_the_fewer_numbers_they_have():
    """Scalar, channel, affine and full projection of the same features: nested tangent spaces, growing scores."""
    net, _, inputs, targets = case("mlp")
    inner = {"type": "mlp", "width": 6, "hidden": 4}
    gated = [
        block_from_config({"type": "gate", "gate": g, "inner": inner}, generator=generator(5)).to(F64)
        for g in ("scalar", "channel", "affine")
    ]

    class Full(Block):
        """W F(z) + b, with the F of the gates."""

        def __init__(self):
            super().__init__()
            self.branch = gated[0].inner
            self.project = nn.Linear(6, 6)
            zero(self.project)

        def features(self, z):
            return self.branch(z)

        def config(self):
            return {"type": "full"}

        @property
        def hidden(self):
            return 6

    for block in gated[1:]:
        block.inner.load_state_dict(gated[0].inner.state_dict())
    scores = [measured(net, b, inputs, targets).s_plugin for b in (*gated, Full().to(F64))]
    assert scores == sorted(scores)
    assert scores[0] < 0.5 * scores[3]


@pytest.mark.parametrize("kind", KINDS)
def test_the_projection_of_every_kind_is_written_and_read_back(kind):
    _, block, _, _ = case(kind)
    shape = flatten_projection(block.project).shape
    assert tuple(shape) == projections.projection_shape(block.project)
    matrix = normal(*shape, seed=3, dtype=F64)
    set_projection(block.project, matrix)
    assert torch.equal(flatten_projection(block.project), matrix)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_rebuilt_from_its_configuration(kind):
    _, block, inputs, _ = case(kind)
    twin = block_from_config(block.config(), generator=generator(99)).to(F64).eval()
    twin.load_state_dict(block.state_dict())
    z = stream(case(kind)[0], inputs)
    assert torch.equal(twin.features(z), block.features(z))
    assert block.config() == twin.config()
    assert block.hidden == twin.hidden


def test_a_causal_block_does_not_see_later_tokens():
    block = case("sequential transformer")[1]
    z = normal(2, 6, 4, dtype=F64)
    later = z.clone()
    later[:, 4:] += 1.0
    assert torch.equal(block.features(z)[:, :4], block.features(later)[:, :4])
    assert not torch.equal(block.features(z)[:, 4:], block.features(later)[:, 4:])


def test_rotary_attention_depends_on_distances_alone():
    """Moving all tokens by the same number of positions changes no head output of the last token."""
    config = ATTENTION | {"rotary": 1.0, "causal": False}
    block = block_from_config(config, generator=generator(1)).to(F64)
    z = normal(1, 5, 4, dtype=F64)
    padded = torch.cat([torch.zeros(1, 3, 4, dtype=F64), z], dim=1)
    q, k = (block._rotate(m(z).view(1, 5, 2, 2).transpose(1, 2)) for m in (block.query, block.key))
    q2, k2 = (block._rotate(m(padded).view(1, 8, 2, 2).transpose(1, 2))[:, :, 3:] for m in (block.query, block.key))
    torch.testing.assert_close(q @ k.transpose(2, 3), q2 @ k2.transpose(2, 3), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(q, q2)


def test_a_parallel_block_reads_z_and_a_sequential_one_z_plus_attention():
    z = normal(2, 5, 4, dtype=F64)
    blocks = {}
    for parallel in (True, False):
        block = block_from_config(ATTENTION | {"parallel": parallel}, generator=generator(4)).to(F64)
        set_projection(block.project, normal(*flatten_projection(block.project).shape, seed=5, dtype=F64))
        blocks[parallel] = block
    features = blocks[True].features(z)
    torch.testing.assert_close(blocks[True](z), blocks[True].project(features))
    attention = features[..., :4] @ blocks[False].project.weight[:, :4].T
    second = blocks[False]
    units = second._units(second.mlp_norm(z + attention))
    wanted = attention + units @ second.project.weight[:, 4:].T + second.project.bias
    torch.testing.assert_close(second(z), wanted)


def test_a_batch_normalised_candidate_is_calibrated_to_the_stream():
    block = ConvBlock(4, 4, norm="batch")
    block.reset(generator())
    z = 3.0 + 2.0 * normal(64, 4, 5, 5)
    block.calibrate(z)
    assert not block.norm.training
    torch.testing.assert_close(block.norm.running_mean, z.mean(dim=(0, 2, 3)))
    assert float(block.norm(z).detach().std()) == pytest.approx(1.0, rel=1e-3)


# --- formula (4): what existing features can express is taken off ---------------------------------


class Hosted(nn.Module):
    """A stem, one residual block whose last layer is ``host.project``, a curved head."""

    def __init__(self, kind):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1) if kind == "image" else nn.Linear(5, 4)
        config = CONV if kind == "image" else {"type": "mlp", "width": 4, "hidden": 3}
        self.host = block_from_config(config, generator=generator(3))
        set_projection(self.host.project, normal(*flatten_projection(self.host.project).shape, seed=8))
        self.place = nn.Identity()
        self.head = nn.Linear(4, 3)
        self._pool = kind == "image"
        with torch.no_grad():
            for index, parameter in enumerate([*self.stem.parameters(), *self.head.parameters()]):
                parameter.copy_(0.7 * normal(*parameter.shape, seed=index))

    def forward(self, x):
        z = self.stem(x)
        z = self.place(z + self.host(z))
        z = z + torch.tanh(z)
        return self.head(z.square().mean(dim=(2, 3)) if self._pool else z)


@pytest.mark.parametrize("kind", ["vector", "image"])
def test_what_existing_features_can_express_is_taken_off_the_score(kind):
    """Formula: ||Pi_(old + new) m||^2 - ||Pi_old m||^2, both by least squares."""
    net = Hosted(kind).to(F64)
    shape = (2, 4, 4) if kind == "image" else (5,)
    inputs = normal(60, *shape, seed=1, dtype=F64)
    targets = torch.randint(0, 3, (60,), generator=generator(2))
    config = CONV | {"kernel_out": 1} if kind == "image" else {"type": "mlp", "width": 4, "hidden": 3}
    block = block_from_config(config, generator=generator(50)).to(F64)
    seen = {}
    handles = [
        net.place.register_forward_hook(lambda _m, _a, out: seen.update(place=out)),
        net.host.project.register_forward_pre_hook(lambda _m, args: seen.update(old=args[0])),
    ]
    with torch.no_grad():
        net(inputs)
    for handle in handles:
        handle.remove()

    g_NE = []
    for i in range(60):
        z = seen["place"][i : i + 1].clone().requires_grad_()
        curved = z + torch.tanh(z)
        out = net.head(curved.square().mean(dim=(2, 3)) if kind == "image" else curved)
        nn.functional.cross_entropy(out, targets[i : i + 1]).backward()
        g_NE.append(z.grad.flatten().numpy())
    g_NE = np.array(g_NE)
    new = tangents(block, seen["place"])
    old = old_tangents(net.host.project, seen["old"])
    wanted = least_squares_score(g_NE, np.concatenate([new, old], axis=2)) - least_squares_score(g_NE, old)

    candidate = Candidate(path="place", block=block, beside=("host.project",))
    arguments = {"loss": LOSSES["none"], "reduction": "none", "ridge": 0.0, "candidates": [candidate]}
    batches = [(inputs, targets)]
    found = probe(net, batches=batches, train_batches=batches, pool=[inputs], **arguments).sites[0]
    assert found.s_plugin == pytest.approx(wanted, rel=1e-9)
    alone = probe(
        net, batches=batches, train_batches=batches, pool=[inputs],
        **arguments | {"candidates": [Candidate(path="place", block=block)]},
    ).sites[0]  # fmt: skip
    assert found.s_plugin > 0
    assert abs(found.s_plugin / alone.s_plugin - 1) > 0.05


def old_tangents(project, features):
    """Column k: what the k-th entry of an existing projection, raised by one, adds. ``[N, entries, D * K]``."""
    project = copy.deepcopy(project)
    shape = flatten_projection(project).shape
    columns = []
    for k in range(shape.numel()):
        unit = torch.zeros(shape.numel(), dtype=F64)
        unit[k] = 1.0
        set_projection(project, unit.reshape(shape))
        with torch.no_grad():
            columns.append(project(features).flatten(1).numpy())
    return np.stack(columns, axis=-1)


def test_new_features_that_copy_existing_ones_are_worth_nothing():
    rng = np.random.default_rng(0)
    old = rng.normal(size=(200, 4))
    joint = np.concatenate([old @ rng.normal(size=(4, 2)), old], axis=1)
    keep, rest = partial_out(joint.T @ joint / 200, num_new=2, ridge=0.0)
    cross = rng.normal(size=(3, 200)) @ joint / 200
    assert np.abs(rest).max() < 1e-12 * np.abs(joint.T @ joint / 200).max()
    assert saturation_score(cross @ keep, whitener(np.eye(2), ridge=0.0)) < 1e-20


# --- any other block: Jacobian products -----------------------------------------------------------


class LowRank(nn.Module):
    """``B A norm(z)`` with B = 0: a zero product, not a zero projection that the package knows."""

    def __init__(self, width=6, rank=2):
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Parameter(torch.zeros(width, rank))
        with torch.no_grad():
            self.down.weight.copy_(normal(rank, width, seed=4))

    def forward(self, z):
        return torch.tanh(self.down(z)) @ self.up.T


def explicit_jacobian(block, z):
    """By central differences, exact here: the block is linear in the parameters that matter at zero."""
    parameters = [p for p in block.parameters() if p.requires_grad]
    columns = []
    for p in parameters:
        for k in range(p.numel()):
            twin = copy.deepcopy(block)
            moved = [q for q in twin.parameters() if q.requires_grad][[q is p for q in parameters].index(True)]
            with torch.no_grad():
                moved.view(-1)[k] += 1.0
                columns.append(twin(z).flatten(1).numpy() - block(z).flatten(1).numpy())
    return np.stack(columns, axis=-1)


def test_a_block_of_the_users_own_is_scored_by_least_squares_on_its_jacobian():
    net, _, inputs, targets = case("mlp")
    block = LowRank().to(F64)
    wanted = least_squares_score(gradient_rows(net, inputs, targets), explicit_jacobian(block, stream(net, inputs)))
    found = measured(net, block, inputs, targets)
    assert found.s_plugin == pytest.approx(wanted, rel=1e-9)
    assert found.block == {"type": "LowRank"}


@pytest.mark.parametrize("kind", ["mlp", "sequential transformer", "conv 3x3", "channel gate"])
def test_jacobian_products_agree_with_the_closed_form(kind):
    class Wrapped(nn.Module):
        """Hides that a block is a projection of features."""

        def __init__(self, block):
            super().__init__()
            self.inside = block

        def forward(self, z):
            return self.inside(z)

    net, block, inputs, targets = case(kind)
    closed, general = (measured(net, b, inputs, targets) for b in (block, Wrapped(copy.deepcopy(block))))
    for name in ("s_plugin", "s_train"):
        assert getattr(general, name) == pytest.approx(getattr(closed, name), rel=1e-9), name
    assert general.features == sum(p.numel() for p in block.parameters())


def test_the_ridge_of_a_general_block_lowers_its_score():
    net, _, inputs, targets = case("mlp")
    without, with_ridge = (measured(net, LowRank().to(F64), inputs, targets, ridge=r).s_plugin for r in (0.0, 0.1))
    assert 0 < with_ridge < without


def test_conjugate_gradients_solve_many_systems_at_once():
    rng = np.random.default_rng(1)
    root = torch.from_numpy(rng.normal(size=(9, 9)))
    matrix = root @ root.T + 0.1 * torch.eye(9, dtype=F64)
    right = torch.from_numpy(rng.normal(size=(5, 9)))
    right[3] = 0.0
    found = conjugate_gradients(lambda w: w @ matrix, right)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, right.T).T, rtol=1e-9, atol=1e-9)


def test_a_general_block_that_adds_something_already_is_refused():
    net, _, inputs, targets = case("mlp")
    block = LowRank().to(F64)
    with torch.no_grad():
        block.up.fill_(0.1)
    with pytest.raises(ValueError, match=r"LowRank already adds up to .* its last layer \(or gate\) must be zero"):
        measured(net, block, inputs, targets)


def test_pulling_back_a_gradient_is_the_gradient_of_the_parameters():
    block = LowRank().to(F64)
    z, g = normal(8, 6, seed=1, dtype=F64), normal(8, 6, seed=2, dtype=F64)
    (block(z) * g).sum().backward()
    wanted = torch.cat([block.up.grad.flatten(), block.down.weight.grad.flatten()])
    torch.testing.assert_close(ParameterTangent(block).pull_back(z, g), wanted)


# --- local insertion ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in KINDS if "affine" not in k])
def test_a_small_step_of_every_kind_lowers_the_loss_as_predicted(kind):
    net, block, inputs, targets = case(kind)
    found = measured(net, block, inputs, targets)
    leap = jumpboard(
        net, site="stem", block=block, direction=found.descent_direction.matrix_DK, batches=[(inputs, targets)],
        loss=LOSSES["sum"], reduction="sum",
    )  # fmt: skip
    relative, loss = leap.tried[0]
    assert relative == 1e-3
    norm = math.sqrt(float(stream(net, inputs).square().sum()) / len(targets))
    # r * kappa is the first order; curvature bends it by about 1 % at a relative step of 1e-3 (MATH.md 3.2)
    assert 0.97 <= (leap.loss_before - loss) / (relative * norm * math.sqrt(found.s_plugin)) <= 1.03


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=1e-4),
        lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=1e-5),
        lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, lr=1e-5),
        lambda p: torch.optim.Adagrad(p, lr=1e-5),
        lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-5),
    ],
    ids=["sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "muon"],
)
@pytest.mark.parametrize("saturated", [False, True])
def test_every_optimizers_first_step_moves_the_loss_exactly_where_the_score_is_not_zero(optimizer, saturated):
    """The boundary is the optimizer's own: down where S > 0, not at all where the features cannot express g."""
    net = Gradient().to(F64)
    block = block_from_config({"type": "mlp", "width": 6, "hidden": 4, "bias": False}, generator=generator(5)).to(F64)
    inputs = normal(256, 5, seed=6, dtype=F64)
    with torch.no_grad():
        z = net(inputs)
        phi = block.features(z)
        g = normal(256, 6, seed=7, dtype=F64)
        if saturated:
            for _ in range(2):  # twice: the second pass removes what rounding left
                g = g - phi @ torch.linalg.lstsq(phi, g).solution
        targets = z - g
    found = measured(net, block, inputs, targets, loss=half_squares)
    insert_block(net, site="stem", block=block, generator=generator())
    before = half_squares(net(inputs), targets).mean()
    steps = optimizer(list(block.project.parameters()))
    if saturated:
        assert np.abs(found.cross_gradient).max() < 1e-12
        leap = jumpboard_change(net, block, targets, inputs, found)
        assert abs(leap) <= 1e-10
        half_squares(net(inputs), targets).mean().backward()
        assert float(block.project.weight.grad.abs().max()) < 1e-12
    else:
        assert found.s_plugin > 1e-3
        before.backward()
        steps.step()
        assert float(half_squares(net(inputs), targets).mean().detach()) < float(before.detach())


def jumpboard_change(net, block, targets, inputs, found):
    """Change of the loss at a relative step of 1e-3 along the (zero) direction, as the optimizer of paper 2 sees it."""
    with torch.no_grad():
        before = float(half_squares(net(inputs), targets).mean())
        set_projection(block.project, torch.from_numpy(found.descent_direction.matrix_DK))
        after = float(half_squares(net(inputs), targets).mean())
        zero(block.project)
    return after - before


class Gradient(nn.Module):
    """``out = z``: with a squared loss the activation gradient is ``z - target``."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 6)
        with torch.no_grad():
            self.stem.weight.copy_(normal(6, 5, seed=1))
            self.stem.bias.copy_(normal(6, seed=2))

    def forward(self, x):
        return self.stem(x)


def half_squares(outputs, targets):
    return 1.0 + 0.5 * (outputs - targets).square().sum(dim=1)


def test_rows_of_different_samples_are_the_cross_gradients_of_those_samples():
    """The debiased score of a gate: mean product of whitened gradients of different samples."""
    net, block, inputs, targets = case("channel gate", num=24)
    psi = naive_cross_gradients(net, block, inputs, targets)
    moment = np.square(tangents(block, stream(net, inputs)).sum(axis=1)).mean(axis=0)
    psi = psi / np.sqrt(moment)
    products = [float(psi[i] @ psi[j]) for i in range(24) for j in range(24) if i != j]
    found = measured(net, block, inputs, targets)
    assert found.s_plugin == pytest.approx(float(np.square(psi.mean(axis=0)).sum()), rel=1e-9)
    assert found.s > 0 or np.mean(products) <= 0
    assert isinstance(block, GatedBranch)
