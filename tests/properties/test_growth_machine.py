"""Random sequences of training, growing, removing, saving and loading: what must hold after every step.

Two networks take the same steps, as two ranks would; their bits must agree at all times.
"""

import os
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn
from torch_helpers import generator

from growth_service.growth import (
    follow,
    growth_log,
    insert_block,
    rebuild,
    remove_block,
    remove_units,
    widen,
    widen_stream,
)
from growth_service.models import build, sites
from growth_service.models.sites import blocks_of
from growth_service.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)
from growth_service.training.data import subset_size
from growth_service.training.optimizer import make_optimizer
from growth_service.training.ranks import weights_digest

SPECS = (
    {"family": "mlp", "input_shape": [1, 2, 2], "num_classes": 3, "widths": [4], "blocks": [1], "hidden": [3]},
    {
        "family": "resnet", "input_shape": [1, 4, 4], "num_classes": 3, "widths": [4], "blocks": [1], "hidden": [4],
        "group_size": 2,
    },
    {
        "family": "gpt", "vocab": 5, "context": 4, "widths": [4], "blocks": [1], "hidden": [4], "heads": 2,
        "positions": "learned",
    },
    {
        "family": "gpt", "vocab": 5, "context": 4, "widths": [4], "blocks": [1], "hidden": [4], "heads": 1,
        "positions": "rotary", "norm": "rms", "parallel": True,
    },
)  # fmt: skip
SETTINGS = ({"optimizer": "adamw"}, {"optimizer": "sgd", "momentum": 0.9})
NUM_SAMPLES, MAX_STEPS = 12, 6


class Growing(RuleBasedStateMachine):
    """One trial on two ranks, and an average of its weights."""

    @initialize(spec=st.sampled_from(SPECS), optimizer=st.sampled_from(SETTINGS), seed=st.integers(0, 3))
    def begin(self, spec, optimizer, seed):
        self.spec, self.seed = spec, seed
        self.settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "momentum": 0.0} | optimizer
        self.ranks = [build(spec, seed=seed) for _ in range(2)]
        self.optimizers = [make_optimizer(model, self.settings) for model in self.ranks]
        self.average = build(spec, seed=seed)
        self.share, self.seen, self.steps = 0.25, 0, 0
        draws = generator(seed)
        if spec["family"] == "gpt":
            self.inputs = torch.randint(0, spec["vocab"], (NUM_SAMPLES, spec["context"]), generator=draws)
        else:
            self.inputs = torch.randn(NUM_SAMPLES, *spec["input_shape"], generator=draws)

    # -- steps -------------------------------------------------------------------------------------

    def outputs(self, model=None):
        with torch.no_grad():
            return (self.ranks[0] if model is None else model)(self.inputs)

    def everywhere(self, step):
        """Take a step on both ranks; returns the receipt."""
        self.steps += 1
        receipts = [step(m, o) for m, o in zip(self.ranks, self.optimizers, strict=True)]
        assert receipts[0] == receipts[1]
        return receipts[0]

    @precondition(lambda self: self.steps < MAX_STEPS)
    @rule(where=st.integers(0, 9), seed=st.integers(0, 3))
    def deepen(self, where, seed):
        places = sites(self.ranks[0])
        site, before = places[where % len(places)].path, self.outputs()
        receipt = self.everywhere(
            lambda m, o: insert_block(m, site=site, generator=generator(seed), optimizer=o, check_batch=self.inputs)
        )
        assert receipt.output_change == 0.0
        assert torch.equal(self.outputs(), before)

    @precondition(lambda self: self.steps < MAX_STEPS and blocks_of(self.ranks[0]))
    @rule(where=st.integers(0, 9), seed=st.integers(0, 3), heads=st.booleans())
    def widen_a_block(self, where, seed, heads):
        places = list(blocks_of(self.ranks[0]))
        site, before = places[where % len(places)], self.outputs()
        has_heads = blocks_of(self.ranks[0])[site].type_name == "transformer"
        what = {"heads": 1} if heads and has_heads else {"units": 2}
        receipt = self.everywhere(
            lambda m, o: widen(m, site=site, **what, generator=generator(seed), optimizer=o, check_batch=self.inputs)
        )
        assert receipt.output_change == 0.0
        assert torch.equal(self.outputs(), before)

    @precondition(lambda self: self.steps < MAX_STEPS)
    @rule(seed=st.integers(0, 3))
    def widen_the_stream(self, seed):
        before = self.outputs()
        receipt = self.everywhere(
            lambda m, o: widen_stream(
                m, site="groups.0.entry", channels=2, generator=generator(seed), optimizer=o, check_batch=self.inputs
            )
        )
        assert receipt.output_change <= 5e-6 * max(1.0, float(before.abs().max()))

    @precondition(lambda self: self.removable())
    @rule(where=st.integers(0, 9))
    def remove(self, where):
        places = self.removable()
        path, before = places[where % len(places)], self.outputs()
        adds_nothing = self.ranks[0].get_submodule(path).is_zero and ".widened." in path
        receipt = self.everywhere(lambda m, o: remove_block(m, block=path, optimizer=o, check_batch=self.inputs))
        assert receipt.output_change == float((self.outputs() - before).abs().max())
        assert receipt.output_change == 0.0 or not adds_nothing

    def removable(self):
        attached = [p for p, m in self.ranks[0].named_modules() if ".grown." in p or ".widened." in p]
        return [p for p in attached if p.rpartition(".")[0].endswith((".grown", ".widened"))]

    @precondition(lambda self: any(b.hidden > 2 and b.unit_writers for b in blocks_of(self.ranks[0]).values()))
    @rule(where=st.integers(0, 9))
    def lose_units(self, where):
        places = [p for p, b in blocks_of(self.ranks[0]).items() if b.hidden > 2 and b.unit_writers]
        site = places[where % len(places)]
        units = [0, 1]  # a whole group where there are groups
        receipt = self.everywhere(lambda m, o: remove_units(m, site=site, units=units, optimizer=o))
        assert receipt.parameters_added < 0

    @rule(steps=st.integers(1, 2))
    def train(self, steps):
        num = subset_size(NUM_SAMPLES, self.share)
        for _ in range(steps):
            self.seen += 1
            chosen = [(self.seen + i) % num for i in range(min(2, num))]
            for model, optimizer in zip(self.ranks, self.optimizers, strict=True):
                out = model(self.inputs[chosen])
                out = out.reshape(-1, out.shape[-1])
                targets = torch.arange(len(out)) % out.shape[1]
                optimizer.zero_grad(set_to_none=True)
                nn.functional.cross_entropy(out, targets).backward()
                optimizer.step()

    @rule()
    def add_data(self):
        old = range(subset_size(NUM_SAMPLES, self.share))
        self.share = min(1.0, 2 * self.share)
        assert set(old) <= set(range(subset_size(NUM_SAMPLES, self.share)))

    @rule()
    def save_and_load(self):
        """As a killed trial does: rank 0 writes, every rank goes on from the folder."""
        before = self.outputs()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "000"
            model, optimizer = self.ranks[0], self.optimizers[0]
            save_checkpoint(
                path,
                Checkpoint(
                    model=model,
                    base={"spec": self.spec, "seed": self.seed},
                    optimizer_state=optimizer_tensors(optimizer, model),
                    streams={"seen": self.seen},
                    history=[],
                ),
            )
            log, names = growth_log(model), [n for n, _ in model.named_parameters()]
            for rank in range(2):
                found = load_checkpoint(path)
                self.ranks[rank] = found.model
                self.optimizers[rank] = make_optimizer(found.model, self.settings)
                restore_optimizer(self.optimizers[rank], found.model, found.optimizer_state)
        assert growth_log(self.ranks[0]) == log
        assert [n for n, _ in self.ranks[0].named_parameters()] == names
        assert torch.equal(self.outputs(), before)

    @rule()
    def let_the_average_follow(self):
        follow(self.average, self.ranks[0])
        shapes = [[(n, p.shape) for n, p in m.named_parameters()] for m in (self.average, self.ranks[0])]
        assert shapes[0] == shapes[1]
        assert torch.isfinite(self.outputs(self.average)).all()

    @rule()
    def replay_the_log(self):
        twin = rebuild(build(self.spec, seed=self.seed + 1), growth_log(self.ranks[0]))
        assert list(twin.state_dict()) == list(self.ranks[0].state_dict())
        twin.load_state_dict(self.ranks[0].state_dict())
        assert torch.equal(self.outputs(twin), self.outputs())

    # -- what holds at all times -------------------------------------------------------------------

    @invariant()
    def ranks_hold_the_same_bits(self):
        if hasattr(self, "ranks"):
            assert weights_digest(self.ranks[0]) == weights_digest(self.ranks[1])

    @invariant()
    def optimisers_cover_exactly_the_live_parameters(self):
        if not hasattr(self, "ranks"):
            return
        for model, optimizer in zip(self.ranks, self.optimizers, strict=True):
            held = [p for g in optimizer.param_groups for p in g["params"]]
            assert len(held) == len(set(held))
            assert set(held) == set(model.parameters())
            assert set(optimizer.state) <= set(held)
            for parameter, state in optimizer.state.items():
                shapes = {k: v.shape for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim}
                assert set(shapes.values()) <= {parameter.shape}


TestGrowing = Growing.TestCase
TestGrowing.settings = settings(
    max_examples=500 if os.environ.get("CI") == "true" else 100,
    stateful_step_count=10,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
