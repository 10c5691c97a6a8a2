"""The test-risk report of a real grow step: four networks measured, the identity exact, nothing touched."""

import copy
import math

import pytest
import torch
from torch import nn
from torch_helpers import VectorNet, assert_untouched, fingerprint, generator, normal

from growth_service.blocks import block_from_config, set_projection
from growth_service.errors import UserError
from growth_service.growth import insert_block
from growth_service.probing import jumpboard, probe
from growth_service.probing.risk import measure_test_risk

F64 = torch.float64
BOUND = math.log(3) + 3


def per_sample(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def samples(num, seed):
    x = normal(num, 5, seed=seed, dtype=F64)
    return [(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())]


def step(net, block, train):
    """The jumpboard of some samples: direction from their first half, size from the other."""
    (x, y), half = train[0], len(train[0][1]) // 2
    report = probe(
        net, batches=[(x[half:], y[half:])], train_batches=[(x[:half], y[:half])], sites=["stem"],
        blocks={"stem": block}, loss=nn.CrossEntropyLoss(), reduction="mean",
    )  # fmt: skip
    return jumpboard(
        net, site="stem", block=block, direction=report.sites[0].descent_direction.matrix_DK,
        batches=[(x[half:], y[half:])], loss=nn.CrossEntropyLoss(), reduction="mean",
    )  # fmt: skip


@pytest.fixture(scope="module")
def grown():
    net = VectorNet().to(F64)
    block = block_from_config({"type": "mlp", "width": 6, "hidden": 4}, generator=generator(9)).to(F64)
    train, fold, test = samples(300, 1), samples(300, 2), samples(400, 3)
    own, other = step(net, block, train), step(net, block, fold)
    new, inserted = copy.deepcopy(net), copy.deepcopy(block)
    insert_block(new, site="stem", block=inserted, generator=generator())
    set_projection(inserted.project, torch.from_numpy(own.matrix_DK))
    optimizer = torch.optim.Adam(new.parameters(), lr=1e-3)
    for _ in range(40):
        optimizer.zero_grad()
        per_sample(new(train[0][0]), train[0][1]).mean().backward()
        optimizer.step()
    return net, new, block, train, test, own, other


def report_of(grown, **changes):
    net, new, block, train, test, own, other = grown
    arguments = {
        "site": "stem", "block": block, "jumpboard_train_DK": own.matrix_DK, "jumpboard_pop_DK": other.matrix_DK,
        "train": train, "test": test, "loss": per_sample, "bound": BOUND,
    }  # fmt: skip
    return measure_test_risk(net, new, **arguments | changes)


def test_the_margins_are_those_of_the_networks_themselves(grown):
    net, new, block, train, test, own, _ = grown
    moved, inserted = copy.deepcopy(net), copy.deepcopy(block)
    insert_block(moved, site="stem", block=inserted, generator=generator())
    set_projection(inserted.project, torch.from_numpy(own.matrix_DK))
    report = report_of(grown)

    def mean(model, data):
        with torch.no_grad():
            return float(per_sample(model(data[0][0]), data[0][1]).clamp(max=BOUND).mean())

    assert report.delta_r_test == pytest.approx(mean(net, test) - mean(moved, test), rel=1e-9)
    assert report.delta_erm == pytest.approx(mean(moved, train) - mean(new, train), rel=1e-9)
    assert report.realised_change == pytest.approx(mean(new, test) - mean(net, test), rel=1e-9)
    assert abs(report.identity_residual) < 1e-12
    assert report.delta_r > 0


def test_the_report_says_which_route_applies_and_that_small_samples_make_it_vacuous(grown):
    report = report_of(grown)
    assert report.is_vacuous  # 300 samples: the deviation bounds are worth more than the loss
    assert "vacuous" in report.summary()
    assert report.normalisation_margin > 10  # of the norm that the block brought; the network has none


def test_the_size_of_the_block_is_what_it_adds(grown):
    net, _, block, train, _, own, _ = grown
    twin = copy.deepcopy(block)
    set_projection(twin.project, torch.from_numpy(own.matrix_DK))
    with torch.no_grad():
        added = float(twin(net.stem(train[0][0])).square().sum(dim=1).mean().sqrt())
    wider = report_of(grown, jumpboard_train_DK=2 * own.matrix_DK)
    narrow = report_of(grown)
    confidence = BOUND * math.sqrt(math.log(2 / 0.05) / (2 * 300))
    assert added > 0
    assert (wider.eps_m - confidence) > 1.9 * (narrow.eps_m - confidence)  # twice the norm, and no smaller gradients


def test_the_normalisation_margin_is_the_smallest_rms_in_units_of_its_eps():
    class Normed(VectorNet):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(6, eps=1e-4)

        def top(self, z):
            return super().top(self.norm(z))

    net = Normed().to(F64)
    block = block_from_config({"type": "mlp", "width": 6, "hidden": 4}, generator=generator(9)).to(F64)
    train, test = samples(40, 1), samples(40, 2)
    nothing = torch.zeros(6, 5, dtype=F64).numpy()
    report = measure_test_risk(
        net, net, site="stem", block=block, jumpboard_train_DK=nothing, jumpboard_pop_DK=nothing, train=train,
        test=test, loss=per_sample, bound=BOUND,
    )  # fmt: skip
    with torch.no_grad():
        z = net.stem(torch.cat([train[0][0], test[0][0]]))
    assert report.normalisation_margin == pytest.approx(float(z.square().mean(dim=1).sqrt().min()) / 1e-2, rel=1e-9)


def test_measuring_leaves_both_networks_and_the_block_as_they_were(grown):
    parts = (grown[0], grown[1], grown[2])
    before = [fingerprint(part) for part in parts]
    report_of(grown)
    for part, was in zip(parts, before, strict=True):
        assert_untouched(part, was)


def test_a_mean_loss_is_refused(grown):
    with pytest.raises(UserError, match=r"needs one loss a sample: got shape \(\) for 300"):
        report_of(grown, loss=nn.CrossEntropyLoss())
