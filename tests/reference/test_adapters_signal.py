"""The probe on networks of other libraries and on the GPT family, against really inserting the block.

Tolerances, relative to the largest entry: float64 leaves 1e-10 room for sums in another order, as
float32 does 1e-5 (6e-8 a rounding).
"""

import copy

import numpy as np
import pytest
import torch
from architectures import LANGUAGE_NETWORKS, NETWORKS, cross_entropy, data, scores_of, throughout_double
from torch_helpers import assert_untouched, fingerprint, generator

from growth_service.blocks import PostActBlock
from growth_service.growth import insert_block
from growth_service.models import build, default_block, sites
from growth_service.probing import Candidate, probe

F64 = torch.float64
PRECISIONS = [(F64, 1e-10), (torch.float32, 1e-5)]
GPT = {
    "family": "gpt", "vocab": 13, "context": 8, "widths": [8], "blocks": [2], "hidden": [12], "heads": 2,
}  # fmt: skip
GPTS = {
    "gpt family, learned positions": GPT,
    "gpt family, rotary and parallel": GPT | {"positions": "rotary", "parallel": True, "norm": "rms"},
}
ALL = [*NETWORKS, *GPTS]


def network(name, dtype):
    model = build(GPTS[name], seed=2) if name in GPTS else NETWORKS[name]()
    return model.to(dtype)


def batch(name, dtype, *, num=6):
    return data("gpt2" if name in GPTS else name, num=num, dtype=dtype)


def candidates(model, dtype, *, copied):
    made = []
    for number, site in enumerate(sites(model)):
        block, _ = default_block(model, site, generator=generator(number), copy=copied)
        made.append(Candidate(path=site.path, block=block.to(dtype)))
    return made


def in_precision(model, dtype):
    """Candidates are made first: they read the parts that are replaced."""
    return throughout_double(model) if dtype == F64 else model


def measured(model, chosen, batches):
    return probe(
        model, batches=batches, train_batches=batches, loss=cross_entropy, reduction="mean", candidates=chosen
    ).sites  # fmt: skip


def inserted(model, candidate, inputs, targets):
    """``.grad`` of the zero projection [W, b] once the block is really in the network, and the outputs."""
    grown, block = copy.deepcopy(model).eval(), copy.deepcopy(candidate.block)
    insert_block(grown, site=candidate.path, block=block, generator=generator())
    outputs = grown(**inputs) if isinstance(inputs, dict) else grown(inputs)
    cross_entropy(outputs, targets).backward()
    parts = [block.project.weight.grad.flatten(1)]
    if block.project.bias is not None:
        parts.append(block.project.bias.grad[:, None])
    return torch.cat(parts, dim=1).numpy(), scores_of(outputs).detach()


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("copied", [True, False])
def test_the_cross_gradient_is_the_gradient_of_the_inserted_zero_projection(name, copied, dtype, tolerance):
    model, (inputs, targets) = network(name, dtype), batch(name, dtype)
    chosen = candidates(model, dtype, copied=copied)
    in_precision(model, dtype)
    if not copied:
        calibrate(model, chosen, inputs)
    before = fingerprint(model)
    found = measured(model, chosen, [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])])
    assert_untouched(model, before)
    plain = scores_of(copy.deepcopy(model).eval()(inputs)).detach()
    assert [f.site for f in found] == [s.path for s in sites(model)]
    for candidate, report in zip(chosen, found, strict=True):
        wanted, outputs = inserted(model, candidate, inputs, targets)
        assert np.abs(wanted).max() > 0
        np.testing.assert_allclose(report.cross_gradient, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())
        assert torch.equal(outputs, plain)  # exact: z + 0.0 == z


def calibrate(model, chosen, inputs):
    """Statistics of fresh BatchNorms from the streams themselves."""
    for candidate in chosen:
        if isinstance(candidate.block, PostActBlock):
            with torch.no_grad():
                module = model.get_submodule(candidate.path)
                handle = module.register_forward_hook(lambda _m, _a, z, c=candidate: c.block.calibrate(z))
                model(inputs)
                handle.remove()


@pytest.mark.parametrize("name", [*LANGUAGE_NETWORKS])
def test_inputs_may_be_keyword_arguments(name):
    model, (tokens, targets) = network(name, F64), batch(name, F64)
    chosen = candidates(model, F64, copied=True)
    in_precision(model, F64)
    by_name = {"input_ids": tokens, "use_cache": False}
    for a, b in zip(
        measured(model, chosen, [(by_name, targets)]), measured(model, chosen, [(tokens, targets)]), strict=True
    ):
        np.testing.assert_allclose(a.cross_gradient, b.cross_gradient, rtol=0, atol=1e-12)
        assert a.s == pytest.approx(b.s, rel=1e-9)
    wanted, _ = inserted(model, chosen[0], by_name, targets)
    np.testing.assert_allclose(
        measured(model, chosen, [(by_name, targets)])[0].cross_gradient, wanted, rtol=0, atol=1e-10 * np.abs(wanted).max()
    )  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_a_probe_needs_no_sites_and_no_blocks(name):
    model, (inputs, targets) = network(name, torch.float32), batch(name, torch.float32)
    report = probe(
        model, batches=[(inputs, targets)], train_batches=[(inputs, targets)], loss=cross_entropy, reduction="mean",
        inner=["copy", "random"],
    )  # fmt: skip
    assert list(dict.fromkeys(r.site for r in report.sites)) == [s.path for s in sites(model)]
    assert all(r.added_flops > 0 for r in report.sites)


def test_a_network_that_trains_with_dropout_is_probed_without():
    """Dropout off: the same figures twice, and the module is left in training mode."""
    model = network("gpt2", F64).train()
    inputs, targets = batch("gpt2", F64)
    chosen = candidates(model, F64, copied=True)
    first, again = (measured(model, chosen, [(inputs, targets)]) for _ in range(2))
    assert model.training
    assert [f.s for f in first] == [f.s for f in again]
