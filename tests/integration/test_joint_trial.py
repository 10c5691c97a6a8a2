"""A whole trial that decides by what the rest of its budget buys."""

from dataclasses import replace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from growth_service.core import advantage
from growth_service.core.policies import BudgetAware
from growth_service.core.steps import Deepen, Widen
from growth_service.models.flops import flops_per_sample
from growth_service.training import looking, stage
from growth_service.training.growing import take_step
from growth_service.training.ranks import Ranks, weights_digest
from growth_service.training.sizing import sizes_after
from growth_service.training.stage_loop import StageLoop, run_trial
from tests.torch_helpers import comparable, prepared_digits, run_to_end, trial_config

BUDGET = 6_000_000_000


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepared_digits(tmp_path_factory.mktemp("data"))


@pytest.fixture
def eager(monkeypatch):
    """Lines that promise depth whatever is measured, and let few steps suffice: trials here are short."""
    promise = {k: replace(v, weights=(0.2 if k == "depth*2" else -0.2, 0, 0, 0, 0)) for k, v in advantage.LINES.items()}
    for name, value in (("LINES", promise), ("BLIND_LINES", promise), ("LEAST_STEPS", 5), ("LEAST_TARGETS", 0.0)):
        monkeypatch.setattr(advantage, name, value)


def configured(folder, *, data, **policy):
    return trial_config(folder, data=data, policy=BudgetAware(**policy), data_share=1.0, budget_flops=BUDGET)


def test_a_trial_grows_where_growing_promises_more(data, tmp_path, eager):
    *stages, final = run_to_end(configured(tmp_path / "trial", data=data, look=False))
    assert stages[0].decision["changes"] == [{"kind": "deepen", "times": 2, "inner": "copy", "exact": True}]
    assert [s.depth for s in stages][:2] == [2, 4]
    assert all(r["output_change"] == 0.0 for s in stages for r in s.receipts)
    assert final.cause == "schedule"


def test_a_trial_of_few_steps_trains_on(data, tmp_path):
    *stages, _ = run_to_end(configured(tmp_path / "trial", data=data, look=False))
    assert {s.depth for s in stages} == {2}
    assert "does not pay for any step" in stages[0].decision["reason"]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("share", "looks"), [(0.9, True), (0.001, False)])
def test_a_look_is_taken_only_where_it_is_cheap(share, looks, data, tmp_path):
    *stages, _ = run_to_end(configured(tmp_path / "trial", data=data, look_share=share))
    assert bool(stages[0].certificates) is looks
    assert stages[-1].certificates == []  # nothing comes after it


@pytest.mark.parametrize(("part", "looks"), [(1.0, False), (0.5, True)])
def test_nobody_looks_where_no_step_would_pay_and_no_data_is_left(part, looks, data, tmp_path):
    config = trial_config(
        tmp_path / "trial", data=data, policy=BudgetAware(look_share=0.9), data_share=part, budget_flops=BUDGET
    )
    first, *_ = run_to_end(config)
    assert bool(first.certificates) is looks
    assert (first.flops_probe > 0) is looks


@pytest.mark.usefixtures("eager")
def test_whether_to_look_is_settled_before_a_stage_also_where_it_was_kept_under_way(data, tmp_path, monkeypatch):
    """Seen from the grown network no further step could pay, seen from the one before it could."""
    monkeypatch.setattr(stage, "EVERY_STEPS", 1)
    small = run_to_end(configured(tmp_path / "small", data=data, look=False))[0].params
    monkeypatch.setattr(looking, "could_pay", lambda size, **_: size.params < 2.5 * small)
    whole = configured(tmp_path / "whole", data=data, look_share=0.9)
    undisturbed = run_to_end(whole)
    assert [bool(s.certificates) for s in undisturbed[:2]] == [True, True]
    config = replace(configured(tmp_path / "killed", data=data, look_share=0.9), checkpoint_s=0.0)
    loop, steps = run_trial(config, ranks=Ranks()), []
    next(loop)

    def dies(*_):
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt

    handle = register_optimizer_step_pre_hook(dies)
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    handle.remove()
    assert comparable(run_to_end(config)) == comparable(undisturbed)


def test_steps_are_sized_on_a_copy_and_as_they_would_be_taken(data, tmp_path):
    policy = BudgetAware(look=False, exact=False)
    loop = StageLoop(configured(tmp_path / "trial", data=data), ranks=Ranks())
    before, stream = weights_digest(loop.state.model), torch.get_rng_state()
    found = sizes_after(loop.state, policy)
    assert weights_digest(loop.state.model) == before
    assert torch.equal(torch.get_rng_state(), stream)
    assert [s.change for s in found] == [Deepen(exact=False), Widen(times=1.5), Widen(times=2.0)]
    state = loop.state
    for size in found:
        model = StageLoop(configured(tmp_path / "trial", data=data), ranks=Ranks()).state.model
        taken = take_step(
            model, (size.change,), decided_after=0, seed=0, optimizer=None, train=state.splits.train,
            subset=state.subset, ridge=1e-3, fold_limit=64, ranks=Ranks(),
        )  # fmt: skip
        assert size.params == sum(p.numel() for p in model.parameters())
        assert size.flops_per_sample == flops_per_sample(model.train(), state.splits.train.inputs[:1]).train
        assert taken.flops <= size.flops  # what is set aside for the step suffices
