"""The cross-gradient and the score beside those of GroMo 0.1.0, an independent implementation (extra ``peers``).

GroMo's empty residual block gathers ``M = E[phi g^T]`` and ``S = E[phi phi^T]`` of the normalised input with a
constant one, as our block with features ``norm(z)`` does. Its tolerances: float32 statistics, 1e-6 relative.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch_helpers import generator, normal

from growth_service.blocks.base import Block, zero
from growth_service.probing import probe

gromo = pytest.importorskip("gromo.containers.growing_block", reason="needs the extra 'peers'")

WIDTH, NUM = 12, 96


class NormalisedBlock(Block):
    """``W norm(z) + b``: the tangent features of GroMo's empty block."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        zero(self.project)

    def features(self, z):
        return self.norm(z)

    def config(self):
        return {"type": "normalised"}

    @property
    def hidden(self):
        return WIDTH


class Network(nn.Module):
    """Stem, empty growing blocks, head; in double precision."""

    def __init__(self, *, blocks: int):
        super().__init__()
        self.stem = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(
            gromo.LinearGrowingBlock(WIDTH, WIDTH, hidden_features=0, pre_activation=nn.LayerNorm(WIDTH))
            for _ in range(blocks)
        )
        self.mid = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        z = self.stem(x)
        for block, mid in zip(self.blocks, self.mid, strict=True):
            z = block(z)
            z = z + torch.tanh(mid(z))
        return self.head(z)


def test_cross_gradients_scores_and_singular_values_are_those_of_gromo():
    net = Network(blocks=3)
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            if parameter.numel():
                parameter.copy_(0.5 * normal(*parameter.shape, seed=index))
        for block in net.blocks:
            block.pre_activation.weight.fill_(1.0)
            block.pre_activation.bias.zero_()
    net = net.double()
    inputs = normal(NUM, 7, seed=50, dtype=torch.float64)
    targets = torch.randint(0, 4, (NUM,), generator=generator(51))
    for block in net.blocks:
        block.init_computation()
    nn.functional.cross_entropy(net(inputs), targets, reduction="sum").backward()
    for block in net.blocks:
        block.update_computation()

    paths = ["stem", "probe_1", "probe_2"]
    ours = plain_copy(net)
    report = probe(
        ours,
        batches=[(inputs, targets)],
        pool=[inputs],
        train_batches=[(inputs, targets)],
        loss=nn.CrossEntropyLoss(reduction="sum"),
        reduction="sum",
        sites=paths,
        blocks={p: NormalisedBlock().double() for p in paths},
        ridge=0.0,
    )
    for block, site in zip(net.blocks, report.sites, strict=True):
        theirs = block.second_layer.tensor_m_prev().detach().numpy()  # E[phi g^T]
        np.testing.assert_allclose(site.cross_gradient.T, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())
        block.compute_optimal_updates(dtype=torch.float64, numerical_threshold=1e-12, statistical_threshold=0.0)
        assert site.s_plugin == pytest.approx(float(block.first_order_improvement), rel=1e-6)
        block.delete_update()
        block.compute_optimal_updates(
            dtype=torch.float64, use_covariance=False, numerical_threshold=1e-12, statistical_threshold=0.0
        )
        values = np.linalg.svd(site.cross_gradient, compute_uv=False)
        gradmax = np.sort(block.eigenvalues_extension.detach().numpy())[::-1]
        np.testing.assert_allclose(values[: len(gradmax)], gradmax, rtol=1e-6, atol=1e-6 * values[0])
        assert site.gradmax == pytest.approx(float(np.square(values).sum()), rel=1e-6)


def plain_copy(net):
    """The same function without the empty blocks, with a module at each of their places."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.mid, self.head = net.stem, net.mid, net.head
            self.probe_1, self.probe_2 = nn.Identity(), nn.Identity()

        def forward(self, x):
            z = self.stem(x)
            z = self.probe_1(z + torch.tanh(self.mid[0](z)))
            z = self.probe_2(z + torch.tanh(self.mid[1](z)))
            return self.head(z + torch.tanh(self.mid[2](z)))

    return Plain().double()
