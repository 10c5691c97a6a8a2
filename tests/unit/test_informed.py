"""The best of several draws and a copy, by the projected score."""

import pytest
import torch
from test_removal_costs import batches, loss
from test_stream_width import inputs_of, network
from torch_helpers import assert_untouched, fingerprint, generator

from growth_service import informed_block, insert_block
from growth_service.errors import UserError


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_the_block_with_the_largest_score_is_handed_out_and_inserted_exactly(name):
    model = network(name)
    before = fingerprint(model)
    given = {"loss": loss, "reduction": "mean", "train_batches": batches(name, sizes=(40, 24))}
    found = informed_block(model, site="groups.0.blocks.0", draws=3, batches=batches(name, sizes=(48,)), **given)
    assert_untouched(model, before)
    names = [s.name for s in found.report.sites]
    assert names == ["copy", "random 1", "random 2", "random 3"]
    scores = {s.name: s.s for s in found.report.sites}
    assert len(set(scores.values())) == 4
    again = informed_block(model, site="groups.0.blocks.0", draws=3, batches=batches(name, sizes=(48,)), **given)
    assert all(torch.equal(a, b) for a, b in zip(found.block.parameters(), again.block.parameters(), strict=True))
    receipt = insert_block(
        model, site="groups.0.blocks.0", block=found.block, generator=generator(), check_batch=inputs_of(name)
    )
    assert receipt.output_change == 0.0


def test_the_choice_follows_the_score(monkeypatch):
    """Turn the scores round, and another block must come out."""
    from growth_service.probing import informed

    model = network("mlp")
    given = {"loss": loss, "reduction": "mean", "train_batches": batches("mlp"), "batches": batches("mlp", sizes=(48,))}
    first = informed_block(model, site="groups.0.entry", **given).block
    real = informed.probe

    def turned(*args, **kwargs):
        report = real(*args, **kwargs)
        for site in report.sites:
            object.__setattr__(site, "s", -site.s)
        return report

    monkeypatch.setattr(informed, "probe", turned)
    second = informed_block(model, site="groups.0.entry", **given).block
    assert not torch.equal(first.inner.weight, second.inner.weight)


def test_no_draws_are_refused():
    with pytest.raises(UserError, match="draws 0 must be at least 1"):
        informed_block(
            network("mlp"), site="groups.0.entry", draws=0, batches=batches("mlp"), loss=loss, reduction="mean"
        )
