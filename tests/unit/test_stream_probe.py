"""Certificates of new channels: against the gradient of the rows that a wider stream really has."""

import copy

import numpy as np
import pytest
import torch
from test_removal_costs import loss
from test_stream_width import SPECS, named, network, train
from torch import optim
from torch_helpers import assert_untouched, fingerprint, generator

from growth_service import probe_stream, widen_stream
from growth_service.errors import UserError
from growth_service.growth import insert_block


def batches(name, *, sizes=(40, 24), seed=4):
    spec, draws, found = SPECS[name], generator(seed), []
    for num in sizes:
        if spec["family"] == "gpt":
            tokens = torch.randint(0, spec["vocab"], (num, spec["context"] + 1), generator=draws)
            found.append((tokens[:, :-1], tokens[:, 1:]))
        else:
            x = torch.randn(num, *spec["input_shape"], generator=draws, dtype=torch.float64)
            found.append((x, torch.randint(0, spec["num_classes"], (num,), generator=draws)))
    return found


@pytest.mark.parametrize("name", ["mlp", "gpt", "gpt-rotary-rms"])
def test_scores_are_those_of_the_rows_of_a_wider_stream(name):
    model = network(name, dtype=torch.float64)
    insert_block(model, site="groups.0.blocks.0", generator=generator(1))
    with torch.no_grad():
        model.groups[0].blocks[0].grown["0"].project.weight.normal_(generator=generator(2))
    before = fingerprint(model)
    held_out, seen = batches(name), batches(name, seed=9)
    report = probe_stream(
        model, site="groups.0.entry", channels=3, generator=generator(5), batches=held_out, train_batches=seen,
        loss=loss, reduction="mean",
    )  # fmt: skip
    assert_untouched(model, before)

    wider = copy.deepcopy(model)
    widen_stream(wider, site="groups.0.entry", channels=3, generator=generator(5))
    num = sum(len(y) for _, y in seen)
    sum(loss(wider(x), y) * len(y) / num for x, y in seen).backward()
    assert {s.site for s in report.sites} == {
        "groups.0.blocks.0.branch", "groups.0.blocks.0.grown.0", "groups.0.blocks.1.branch",
    }  # fmt: skip
    for site in report.sites:
        rows = named(wider)[f"{site.site}.project.wider.0.rows"].grad
        bias = named(wider).get(f"{site.site}.project.wider.0.bias")
        wanted = rows if bias is None else torch.cat([rows, bias.grad[:, None]], dim=1)
        heads = 8 if name == "gpt" else 0  # of a sequential block: its own units would read what they write
        found, real = site.cross_gradient[:, heads:], wanted.numpy()[:, heads:]
        np.testing.assert_allclose(found, real, rtol=1e-9, atol=1e-12)
        assert (site.kind, site.width) == ("stream", 3)
        assert site.added_flops == report.sites[0].added_flops > 0
        assert np.isfinite([site.kappa, site.predicted_gain_ucl]).all()


def test_a_step_along_the_direction_lowers_the_loss_by_what_the_score_says():
    name = "mlp"
    model = network(name, dtype=torch.float64)
    seen = batches(name, sizes=(64,))
    report = probe_stream(
        model, site="groups.0.entry", channels=3, generator=generator(5), batches=batches(name, seed=7),
        train_batches=seen, loss=loss, reduction="mean",
    )  # fmt: skip
    best = max(report.sites, key=lambda s: s.s_train)
    wider = copy.deepcopy(model)
    widen_stream(wider, site="groups.0.entry", channels=3, generator=generator(5))
    (x, y) = seen[0]
    with torch.no_grad():
        before = float(loss(wider(x), y))
        step = 1e-5
        rows = named(wider)[f"{best.site}.project.wider.0.rows"]
        bias = named(wider)[f"{best.site}.project.wider.0.bias"]
        rows.add_(step * torch.from_numpy(best.descent_direction.weight))
        bias.add_(step * torch.from_numpy(best.descent_direction.bias))
        gained = before - float(loss(wider(x), y))
    assert gained == pytest.approx(step * best.s_train, rel=0.03)


def test_streams_that_are_not_scored_are_refused():
    model = network("resnet", dtype=torch.float64)
    before = fingerprint(model)
    with pytest.raises(UserError, match="short trials"):
        probe_stream(
            model, site="groups.0.entry", channels=2, generator=generator(), batches=batches("resnet"), loss=loss,
            reduction="mean",
        )  # fmt: skip
    assert_untouched(model, before)


def test_a_wider_stream_of_a_trained_language_model_is_probed_in_single_precision():
    model = network("gpt")
    train(model, "gpt", optim.AdamW(model.parameters(), lr=1e-2), 10)
    report = probe_stream(
        model, site="groups.0.blocks.1", channels=4, generator=generator(1), batches=batches("gpt", sizes=(64, 64)),
        train_batches=batches("gpt", seed=8), loss=loss, reduction="mean",
    )  # fmt: skip
    assert report.verdict in ("useful", "saturated", "no_transferable_gain", "undetermined")
    assert report.table()
    assert report.advice().action
