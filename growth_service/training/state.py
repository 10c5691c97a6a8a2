"""A live trial: network, optimiser, data position, account, records - and how it is kept.

Everything here is either in a checkpoint or follows from one: a trial that is killed at any
moment stands again where its newest complete checkpoint says.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn, optim

from growth_service.core.budget import Budget
from growth_service.core.decisions import Decision, TrainOn, decision_from_dict
from growth_service.core.records import FinalRecord, StageRecord
from growth_service.models import build
from growth_service.models.flops import FlopsPerSample, flops_per_sample
from growth_service.training import checkpoint as store
from growth_service.training.batches import DataPosition
from growth_service.training.config import TrialConfig
from growth_service.training.data import Splits, open_splits, subset_size
from growth_service.training.optimizer import make_optimizer
from growth_service.training.ranks import Ranks


class TrialState:
    """What changes while a trial runs, on one rank."""

    model: nn.Module
    optimizer: optim.Optimizer
    cost: FlopsPerSample
    """Of the present network, per sample."""

    def __init__(self, config: TrialConfig, *, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.folder = Path(config.folder)
        self.splits: Splits = open_splits(Path(config.data))
        self.restore()
        self._lost = {"stage": self.stage, "flops": 0, "times": 0}
        self._count_lost_work()

    def restore(self) -> None:
        """Stand where the newest undamaged checkpoint says, else at the beginning."""
        found = store.newest(self.folder / "stages")
        if found is None:
            base = self.config.base
            self.model = build(base["spec"], seed=base["seed"])
            self.history: list[StageRecord] = []
            self.position = DataPosition()
            self.data_share = self.config.growth_schedule().initial.data_share
            self.budget = Budget(total_flops=self.config.budget_flops)
            self.decision: Decision = TrainOn(reason="the schedule begins")
            self.key = ""
            self.flops_probe, self.flops_wasted, self.attempt, self.rate_scale = 0, 0, 0, 1.0
            self.targets_seen = 0
        else:
            self.history = [StageRecord.from_dict(r) for r in found.history]
            streams = found.streams
            self.budget = Budget(**{k: v for k, v in streams["budget"].items() if k != "free_flops"})
            self.decision = decision_from_dict(self.history[-1].decision)
            self.flops_wasted, self.attempt = streams["flops_wasted"], streams["attempt"]
            self.key = streams.get("key", "")
            self.stand_at(found)
            return
        self.optimizer = make_optimizer(self.model, self.config.training)
        self.count_cost()

    def stand_at(self, found: store.Checkpoint) -> None:
        """Take network, optimiser and position of a checkpoint; account and records stay the trial's own."""
        streams = found.streams
        self.model = found.model
        self.position, self.data_share = DataPosition(**streams["position"]), streams["data_share"]
        self.flops_probe, self.rate_scale = streams["flops_probe"], streams["rate_scale"]
        self.targets_seen = streams.get("targets_seen", 0)
        self.optimizer = make_optimizer(self.model, self.config.training)
        store.restore_optimizer(self.optimizer, self.model, found.optimizer_state)
        self.count_cost()

    def count_cost(self) -> None:
        """Count the FLOPs per sample anew; due after each change of the network."""
        self.model.train()
        self.cost = flops_per_sample(self.model, self.splits.train.inputs[:1])

    @property
    def stage(self) -> int:
        """Number of the stage that comes next."""
        return len(self.history)

    @property
    def targets_per_sample(self) -> int:
        """Predictions in one sample: 1, or the tokens of a sequence."""
        return self.splits.train.targets[:1].numel()

    @property
    def final(self) -> FinalRecord | None:
        """The trial's last word, once it has been said."""
        try:
            return FinalRecord.from_dict(json.loads((self.folder / "final.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None

    @property
    def last(self) -> StageRecord | None:
        """Record of the stage before."""
        return self.history[-1] if self.history else None

    @property
    def subset(self) -> int:
        """Training samples in force."""
        return subset_size(len(self.splits.train.targets), self.data_share)

    def spend(self, flops: int) -> None:
        """Take FLOPs out of the trial's account."""
        self.budget = self.budget.reserve(flops).settle(reserved=flops, spent=flops)

    # -- the fallback rule -----------------------------------------------------------------------

    def snapshot(self) -> dict[str, Tensor]:
        """Weights before training."""
        return {k: v.clone() for k, v in self.model.state_dict().items()}

    def fall_back(self, snapshot: dict[str, Tensor]) -> None:
        """Undo training that ended above where it began on the training subset.

        The optimiser failed there, so it starts anew, and further stages train at half the rate.
        """
        self.model.load_state_dict(snapshot)
        self.optimizer.state.clear()
        self.rate_scale /= 2

    # -- keeping -----------------------------------------------------------------------------------

    def save(self, name: str, *, jumpboard: bool = False, under_way: dict[str, Any] | None = None) -> None:
        """Write a checkpoint; rank 0 writes, all wait."""
        if self.ranks.is_first:
            store.save_checkpoint(
                self.folder / "stages" / name,
                store.Checkpoint(
                    model=self.model,
                    base=self.config.base,
                    optimizer_state={} if jumpboard else store.optimizer_tensors(self.optimizer, self.model),
                    streams={
                        "position": asdict(self.position),
                        "data_share": self.data_share,
                        "budget": self.budget.to_dict(),
                        "flops_probe": self.flops_probe,
                        "flops_wasted": self.flops_wasted,
                        "attempt": self.attempt,
                        "rate_scale": self.rate_scale,
                        "targets_seen": self.targets_seen,
                        "cost_forward": self.cost.forward,
                        "key": self.key,
                        "under_way": under_way,
                    },
                    history=[r.to_dict() for r in self.history],
                ),
            )
        self.ranks.barrier()

    def folders_of(self, stage: int) -> list[Path]:
        """Checkpoints of a stage: the one at its end, and its jumpboard where there is one."""
        names = (f"{stage:03d}", f"{stage:03d}-jumpboard")
        return [p for p in (self.folder / "stages" / name for name in names) if p.is_dir()]

    def keep_jumpboard(self, source: Path) -> None:
        """Take over the jumpboard of another trial's stage, where it had one."""
        if self.ranks.is_first and source.is_dir():
            target = self.folder / "stages" / source.name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target)

    def write_config(self) -> None:
        """Keep the trial's input beside its checkpoints, for whoever probes them later."""
        self._write("trial.json", self.config.to_dict())

    def beat(self, flops: int) -> None:
        """Say how far the stage is, so that a kill now can be accounted for."""
        if self._lost["stage"] != self.stage:
            self._lost = {"stage": self.stage, "flops": 0, "times": 0}
        self._write("progress.json", {"stage": self.stage, "flops": flops, "lost": self._lost})

    def not_lost(self, flops: int) -> None:
        """Of what was counted as lost, so much was kept after all."""
        self.flops_wasted -= flops
        self._lost["flops"] -= flops

    def write_final(self, final: FinalRecord) -> None:
        """Keep the trial's last word; all ranks wait for it."""
        self._write("final.json", final.to_dict())
        self.ranks.barrier()

    def _write(self, name: str, value: dict[str, Any]) -> None:
        if self.ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.folder / f".{name}.partial"
            partial.write_text(json.dumps(value, indent=1), encoding="utf-8")
            partial.rename(self.folder / name)

    def _count_lost_work(self) -> None:
        """Work on a stage that was never finished is wasted, outside the budget."""
        lost: dict[str, Any] = {}
        beat = self.folder / "progress.json"
        if self.ranks.is_first and beat.is_file():
            try:
                lost = json.loads(beat.read_text(encoding="utf-8"))
            except ValueError:
                lost = {}
        lost = self.ranks.broadcast(lost)
        if lost.get("stage") == self.stage:
            before = lost["lost"]
            self._lost |= {"flops": before["flops"] + lost["flops"], "times": before["times"] + 1}
            self.flops_wasted += self._lost["flops"]
            self.attempt += self._lost["times"]
