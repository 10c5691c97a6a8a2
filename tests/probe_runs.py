"""One probe of a small network, and what it says, for the tests of probing."""

import pytest
import torch
from signal_twins import F64
from torch import nn
from torch_helpers import (
    VectorNet,
    generator,
    normal,
)

from growth_service.blocks import block_from_config
from growth_service.probing import Looks, probe

CROSS_ENTROPY = nn.CrossEntropyLoss()
MLP = {"type": "mlp", "width": 6, "hidden": 4}


def data(num, *, seed=0, dtype=F64):
    return normal(num, 5, seed=seed, dtype=dtype), torch.randint(0, 3, (num,), generator=generator(seed + 1))


def batched(inputs, targets, size):
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def run(*, net=None, held_out=None, train=None, **arguments):
    net = net or VectorNet().to(F64)
    block = block_from_config(MLP, generator=generator(9)).to(F64)
    arguments = {"sites": ["stem"], "blocks": {"stem": block}, "loss": CROSS_ENTROPY, "reduction": "mean"} | arguments
    if "candidates" in arguments:
        del arguments["sites"], arguments["blocks"]
    return probe(net, batches=held_out or [data(300, seed=5)], train_batches=train or [data(300)], **arguments)


def figures(report):
    found = report.to_dict()
    del found["protocol"]
    return found


def assert_close(found, wanted, *, rel=1e-9):
    """Same figures, at any depth; sums in another order round differently."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_close(found[key], wanted[key], rel=rel)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_close(a, b, rel=rel)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=rel, abs=1e-12)
    elif not isinstance(wanted, str):  # sentences hold rounded figures
        assert found == wanted


def until(num, *, tolerance, first=64, most=None):
    """The report and the looks at up to ``num`` samples."""
    looks = Looks(first=first, most=most)
    report = run(held_out=batched(*data(num, seed=5), 48), tolerance=tolerance, looks=looks)
    return report, report.looks
