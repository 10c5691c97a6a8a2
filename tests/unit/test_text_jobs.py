"""Trials on texts: language models train, are probed, and grow in every direction."""

import pytest
import torch
from torch_helpers import run_to_end

from growth_service.core.policies import FixedSteps, SignalGuided
from growth_service.core.schedule import GrowthSchedule, InitialSize
from growth_service.core.steps import AddBlock, AddChannels, AddUnits
from growth_service.errors import UserError
from growth_service.models import build
from growth_service.orchestration.plan import base_spec
from growth_service.spec import load_job
from growth_service.training.checkpoint import newest
from growth_service.training.config import TrialConfig
from growth_service.training.data import open_splits
from growth_service.training.datasets import Request, prepare
from growth_service.training.evaluate import evaluate, loss_sum
from growth_service.training.growing import add_channels
from growth_service.training.ranks import Ranks
from tests.jobs import TEXT


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A text that is easy to learn, prepared."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    request = Request(folder=str(folder / "a.txt"), context=16)
    prepare("text", request=request, seed=0, target=folder / "data", limits={"probe": 48, "val": 40, "test": 40})
    return folder / "data"


def trial(folder, words, policy):
    schedule = GrowthSchedule(name="small", initial=InitialSize(blocks=(1,), hidden=(16,)), policy=policy, num_stages=3)
    spec = {
        "family": "gpt", "vocab": open_splits(words).num_classes, "context": 16, "widths": [16], "blocks": [1],
        "hidden": [16], "heads": 2, "positions": "learned", "norm": "layer", "parallel": False,
    }  # fmt: skip
    training = {
        "optimizer": "adamw", "learning_rate": 0.01, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 32,
        "shards": 4, "warmup_share": 0.1, "floor_share": 0.02,
    }  # fmt: skip
    return TrialConfig(
        trial="small", schedule=schedule.to_dict(), base={"spec": spec, "seed": 5}, training=training,
        probe={"samples": 48, "train_samples": 64, "ridge": 1e-3}, budget_flops=4_000_000_000, seed=0,
        folder=str(folder), data=str(words),
    )  # fmt: skip


TINY = {"family": "mlp", "input_shape": [4], "num_classes": 3, "widths": [4], "blocks": [1], "hidden": [3]}
ALL = FixedSteps(
    steps=(
        (0, (AddChannels(site="groups.0.entry", channels=8), AddUnits(block="groups.0.blocks.0.branch", units=8))),
        (1, (AddBlock(site="groups.0.blocks.0", inner="copy", jumpboard=True),)),
    )
)


@pytest.mark.parametrize("policy", [ALL, SignalGuided(units=8, tolerance_nats=0.05)])
def test_a_language_model_learns_and_grows(words, tmp_path, policy):
    config = trial(tmp_path / "t", words, policy)
    *stages, final = run_to_end(config)
    assert stages[-1].loss_val < stages[0].loss_val < 3.2  # log of its alphabet
    assert 0 < final.accuracy_test <= 1
    if policy is ALL:
        assert [e.split("@")[0] for s in stages for e in s.step] == ["stream", "width", "depth"]
        receipts = [r["kind"] for s in stages for r in s.receipts]
        assert receipts[:3] == ["stream", "widen", "insert"]
    found = newest(tmp_path / "t" / "stages")
    splits = open_splits(words)
    again = evaluate(found.model, splits.val, ranks=Ranks())
    assert again.loss == pytest.approx(stages[-1].loss_val, abs=1e-12)


def test_the_loss_of_a_sequence_is_the_mean_over_its_tokens():
    logits, targets = torch.randn(3, 5, 7), torch.arange(15).reshape(3, 5) % 7
    wanted = sum(torch.nn.functional.cross_entropy(logits[i], targets[i]) for i in range(3))
    torch.testing.assert_close(loss_sum(logits, targets), wanted)


def test_a_family_that_does_not_fit_the_data_is_refused():
    job = load_job(TEXT)
    schedule = GrowthSchedule(
        name="x", initial=InitialSize(blocks=(1,), hidden=(8,)), policy=FixedSteps(), num_stages=2
    )
    with pytest.raises(UserError, match="model.family gpt does not fit data.name python: gpt needs a text"):
        base_spec(job, schedule, {"kind": "samples", "input_shape": [3], "num_classes": 2})
    mlp = job.model_copy(update={"model": job.model.model_copy(update={"family": "mlp"})})
    with pytest.raises(UserError, match="a text needs gpt"):
        base_spec(mlp, schedule, {"kind": "tokens", "input_shape": [3], "num_classes": 2})


def test_channels_of_different_stages_and_trials_get_different_weights():
    def columns(stage, seed):
        model = build(TINY, seed=0)
        add_channels(model, AddChannels(site="groups.0.entry", channels=2), stage=stage, seed=seed)
        return model.head.wider["0"].columns

    assert torch.equal(columns(1, 0), columns(1, 0))
    assert not torch.equal(columns(1, 0), columns(2, 0))
    assert not torch.equal(columns(1, 0), columns(1, 1))


def test_the_signal_does_not_guide_the_width_of_the_stream():
    with pytest.raises(UserError, match="axis 'stream' cannot be guided"):
        SignalGuided(axes=("depth", "stream"))
