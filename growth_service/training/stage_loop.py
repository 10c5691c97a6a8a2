"""The stage loop: one trial as a generator of records, the same on one process or many ranks.

A stage is: take the step decided before, train, fall back if training made things worse,
evaluate, probe, decide, write a checkpoint. After each record the driver of the loop may send a
verdict from outside (stop, or None to go on). The loop knows neither Ray nor MLflow; every
rank runs it, rank 0 decides and writes.
"""

import json
import logging
import math
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growth_service.core.budget import Budget
from growth_service.core.decisions import (
    Decision,
    Grow,
    Reading,
    Stop,
    TrainOn,
    decide,
    decision_from_dict,
    decision_to_dict,
    tolerance_nats,
)
from growth_service.core.ledger import Ledger
from growth_service.core.records import FinalRecord, StageRecord
from growth_service.core.schedule import SignalGuided
from growth_service.errors import UserError
from growth_service.models import build
from growth_service.models.flops import FlopsPerSample, flops_per_sample
from growth_service.models.sites import size_of
from growth_service.probing import SaturationReport, probe
from growth_service.probing.probe import estimate_flops
from growth_service.training import checkpoint as store
from growth_service.training.batches import DataPosition, chunks_of, next_indices, shards_of
from growth_service.training.config import TrialConfig
from growth_service.training.data import Splits, open_splits, subset_size
from growth_service.training.evaluate import CHUNK, Evaluation, evaluate, loss_sum
from growth_service.training.gradients import ShardedGradients
from growth_service.training.growing import StepTaken, candidates, take_step
from growth_service.training.optimizer import learning_rate, make_optimizer, set_learning_rate
from growth_service.training.ranks import Ranks, check_world, weights_digest

logger = logging.getLogger(__name__)
Record = StageRecord | FinalRecord
HEARTBEAT_S = 2.0


class _DivergedError(Exception):
    """The loss or a gradient is not finite."""


def run_trial(config: TrialConfig, *, ranks: Ranks) -> Generator[Record, Decision | None, None]:
    """Run a trial from where its folder says it stands, to its end.

    Yields:
        A :class:`StageRecord` after each stage and one :class:`FinalRecord`. A resumed trial first
        yields its old records again; readers know them by their stage.

    Receives:
        After each record, a ``Stop`` from outside, or None (or any other decision) to go on.
    """
    loop = StageLoop(config, ranks=ranks)
    loop.write_config()
    verdict: Decision | None = None
    for record in loop.history:
        verdict = yield record
    while not isinstance(loop.decision, Stop):
        if isinstance(verdict, Stop):
            loop.decision = verdict
            break
        try:
            record = loop.run_stage()
        except _DivergedError as error:
            loop.roll_back(str(error))
            break
        verdict = yield record
    yield loop.finish()


class StageLoop:
    """A live trial on one rank."""

    def __init__(self, config: TrialConfig, *, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.schedule = config.growth_schedule()
        check_world(ranks.world_size, num_shards=config.training["shards"])
        self.folder = Path(config.folder)
        self.splits: Splits = open_splits(Path(config.data))
        self._restore()
        self.gradients = ShardedGradients(self.model, ranks=ranks, num_shards=config.training["shards"])
        self.cost: FlopsPerSample = self._count()

    # -- state ---------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Stand where the newest undamaged checkpoint says, else at the beginning."""
        found = store.newest(self.folder / "stages")
        if found is None:
            base = self.config.base
            self.model: nn.Module = build(base["spec"], seed=base["seed"])
            self.history: list[StageRecord] = []
            self.position, self.data_share = DataPosition(), self.schedule.initial.data_share
            self.budget = Budget(total_flops=self.config.budget_flops)
            self.decision: Decision = TrainOn(reason="the schedule begins")
            self.flops_probe, self.flops_wasted, self.attempt, self.rate_scale = 0, 0, 0, 1.0
        else:
            self.model = found.model
            self.history = [StageRecord.from_dict(r) for r in found.history]
            streams = found.streams
            self.position, self.data_share = DataPosition(**streams["position"]), streams["data_share"]
            self.budget = Budget(**{k: v for k, v in streams["budget"].items() if k != "free_flops"})
            self.decision = decision_from_dict(self.history[-1].decision)
            self.flops_probe, self.rate_scale = streams["flops_probe"], streams["rate_scale"]
            self.flops_wasted, self.attempt = streams["flops_wasted"], streams["attempt"]
        self.optimizer = make_optimizer(self.model, self.config.training)
        if found is not None:
            store.restore_optimizer(self.optimizer, self.model, found.optimizer_state)
        self._count_lost_work()

    def _count_lost_work(self) -> None:
        """Work on a stage that was never finished is wasted, outside the budget."""
        beat = self.folder / "progress.json"
        lost: dict[str, Any] = {}
        if self.ranks.is_first and beat.is_file():
            try:
                lost = json.loads(beat.read_text(encoding="utf-8"))
            except ValueError:
                lost = {}
        lost = self.ranks.broadcast(lost)
        if lost.get("stage") == len(self.history):
            self.flops_wasted += int(lost["flops"])
            self.attempt += 1

    @property
    def subset(self) -> int:
        """Training samples in force."""
        return subset_size(len(self.splits.train.targets), self.data_share)

    def _count(self) -> FlopsPerSample:
        self.model.train()
        return flops_per_sample(self.model, self.splits.train.inputs[:1])

    # -- one stage -----------------------------------------------------------------------------

    def run_stage(self) -> StageRecord:
        """Step, train, fall back, evaluate, probe, decide, save."""
        started, stage = time.perf_counter(), len(self.history)
        self._beat(stage, 0)
        spent_before = self.budget.spent_flops
        old = self.history[-1] if self.history else None
        taken, spent = self._step(stage)
        ledger_start: tuple[float, float, float, float] | None = None
        if old is not None and taken.words:
            ledger_start, cost = self._jumpboard_losses(old, taken)
            spent += cost
            self._save(f"{stage:03d}-jumpboard", jumpboard=True)
        floor = self._floor(old, ledger_start)
        before = self._snapshot() if floor is not None else None
        planned = self.planned_batches(stage, already=spent)
        trained_s = -time.perf_counter()
        spent += self._train(stage, planned, spent)
        trained_s += time.perf_counter()
        on_train, cost = self._evaluate("train")
        spent += cost
        fallback = floor is not None and not on_train.loss <= floor
        if fallback and before is not None and floor is not None:
            self._recall(before)
            on_train = on_train._replace(loss=floor)
        on_val, cost = self._evaluate("val")
        spent += cost
        if not (math.isfinite(on_train.loss) and math.isfinite(on_val.loss)):
            raise _DivergedError(f"the loss after stage {stage} is not finite")
        report = self._probe(stage)
        if report is not None:
            spent += report.flops
            self.flops_probe += report.flops
        digest = weights_digest(self.model)
        self.ranks.agree(digest, what=f"after stage {stage}")
        self.budget = self.budget.reserve(spent).settle(reserved=spent, spent=spent)
        assert self.budget.spent_flops == spent_before + spent
        self.decision = self.ranks.broadcast(self._decide(stage, report))
        depth, width, params = size_of(self.model)
        ledger = None
        if ledger_start is not None:
            ledger = Ledger(
                step=", ".join(taken.words),
                old_train=ledger_start[0],
                old_val=ledger_start[1],
                jumpboard_train=ledger_start[2],
                jumpboard_val=ledger_start[3],
                new_train=on_train.loss,
                new_val=on_val.loss,
                fallback=fallback,
            ).to_dict()
        total_s = time.perf_counter() - started
        record = StageRecord(
            trial=self.config.trial,
            stage=stage,
            depth=depth,
            width=width,
            params=params,
            train_samples=self.subset,
            data_share=self.data_share,
            loss_train=on_train.loss,
            loss_val=on_val.loss,
            accuracy_val=on_val.accuracy,
            flops_total=self.budget.spent_flops,
            flops_probe=self.flops_probe,
            budget=self.budget.to_dict(),
            decision=decision_to_dict(self.decision),
            verdict=report.verdict if report else None,
            tolerance_nats=report.tolerance_nats if report else None,
            certificates=[s.to_dict() for s in report.sites] if report else [],
            receipts=[r.to_dict() for r in taken.receipts],
            step=taken.words,
            fallback=fallback,
            ledger=ledger,
            protocol=report.protocol if report else None,
            digest=digest,
            stage_s=total_s,
            overhead_s=total_s - trained_s,
            flops_wasted=self.flops_wasted,
            attempt=self.attempt,
        )
        self.history.append(record)
        self._save(f"{stage:03d}")
        return record

    def _step(self, stage: int) -> tuple[StepTaken, int]:
        """Execute the last decision; returns what changed and what it cost."""
        if not isinstance(self.decision, Grow):
            return StepTaken(), 0
        taken = take_step(
            self.model,
            self.decision.changes,
            decided_after=stage - 1,
            seed=self.config.seed,
            optimizer=self.optimizer,
            train=self.splits.train,
            subset=self.subset,
            ridge=self.config.probe["ridge"],
            fold_limit=self.config.probe["train_samples"],
            ranks=self.ranks,
        )
        if taken.data_share is not None:
            self.data_share, self.position = taken.data_share, DataPosition(epoch=self.position.epoch + 1)
        if taken.receipts:
            self.gradients.rewrap()
            self.cost = self._count()
        self.flops_probe += taken.flops
        self.ranks.agree(weights_digest(self.model), what=f"after growing for stage {stage}")
        return taken, taken.flops

    def _jumpboard_losses(self, old: StageRecord, taken: StepTaken) -> tuple[tuple[float, float, float, float], int]:
        """Old and jumpboard losses on the subset now in force and on validation, and their cost.

        Without a jumpboard step the jumpboard is the old network: its losses are the old ones,
        measured anew only where the subset changed.
        """
        cost = 0
        old_train, old_val = old.loss_train, old.loss_val
        if taken.data_share is not None:
            found, cost = self._evaluate("train")
            old_train = found.loss
        if not taken.moved:
            return (old_train, old_val, old_train, old_val), cost
        moved_train, cost_train = self._evaluate("train")
        moved_val, cost_val = self._evaluate("val")
        return (old_train, old_val, moved_train.loss, moved_val.loss), cost + cost_train + cost_val

    @staticmethod
    def _floor(old: StageRecord | None, start: tuple[float, float, float, float] | None) -> float | None:
        """Loss on S that the stage must not end above: the jumpboard's, or the old network's."""
        if start is not None:
            return start[2]
        return old.loss_train if old is not None else None

    def planned_batches(self, stage: int, *, already: int) -> int:
        """Global batches that fit into the stage, after all else that it will cost."""
        last = stage + 1 >= self.schedule.num_stages
        end = self.cost.forward * len(self.splits.test.targets)
        total = self.budget.total_flops - end
        target: int = total if last else total * (stage + 1) // self.schedule.num_stages
        room = target - self.budget.spent_flops - already - self.overhead_flops(stage)
        per_batch: int = self.config.training["batch_size"] * self.cost.train
        return max(0, room // per_batch)

    def overhead_flops(self, stage: int) -> int:
        """What a stage costs besides training and its grow step: evaluations and, where it looks, the probe."""
        evaluations = self.cost.forward * (self.subset + len(self.splits.val.targets))
        return evaluations + self._probe_estimate(stage)

    def _train(self, stage: int, num_batches: int, spent_before: int) -> int:
        """Train for so many global batches; returns the FLOPs."""
        settings = self.config.training
        if num_batches == 0 and stage == 0:
            raise UserError(
                f"the budget of trial {self.config.trial} ({self.config.budget_flops:.3g} FLOPs) does not pay for one "
                f"batch in each of its {self.schedule.num_stages} stages: raise budget.trial or use fewer stages"
            )
        if settings["batch_size"] > self.subset:
            raise UserError(
                f"training.batch_size {settings['batch_size']} is larger than the {self.subset} training samples in "
                f"force: use a smaller batch or a data_share above {self.data_share:g}"
            )
        per_batch: int = settings["batch_size"] * self.cost.train
        self.model.train()
        last_beat = time.monotonic()
        for step in range(num_batches):
            rate = learning_rate(
                step / num_batches,
                peak=settings["learning_rate"] * self.rate_scale,
                warmup_share=settings["warmup_share"],
                floor_share=settings["floor_share"],
            )
            set_learning_rate(self.optimizer, rate)
            indices, self.position = next_indices(
                self.position, subset=self.subset, batch_size=settings["batch_size"], seed=self.config.seed
            )
            shards = shards_of(self.splits.train, indices, num_shards=settings["shards"])
            self.gradients.backward(shards, loss_sum)
            if not _finite_gradient(self.model):
                self._spend_diverged(spent_before + (step + 1) * per_batch)
                raise _DivergedError(f"a gradient was not finite in step {step} of stage {stage}")
            self.optimizer.step()
            if time.monotonic() - last_beat > HEARTBEAT_S:
                last_beat = time.monotonic()
                self._beat(stage, spent_before + (step + 1) * per_batch)
        return num_batches * per_batch

    def _evaluate(self, part: str) -> tuple[Evaluation, int]:
        """Evaluate on the training subset in force or on another whole split; with the cost."""
        split = getattr(self.splits, part)
        limit = self.subset if part == "train" else len(split.targets)
        return evaluate(self.model, split, ranks=self.ranks, limit=limit), self.cost.forward * limit

    # -- signal and decision -------------------------------------------------------------------

    def _probe_inputs(self, stage: int) -> dict[str, Any] | None:
        """Arguments of the probe after this stage; None where the policy does not look."""
        policy = self.schedule.policy
        if not isinstance(policy, SignalGuided) or stage + 1 >= self.schedule.num_stages:
            return None
        limits = self.config.probe
        found = candidates(self.model, policy, stage=stage, seed=self.config.seed)
        if not found:
            return None
        return {
            "candidates": found,
            "batches": chunks_of(self.splits.probe, size=CHUNK, limit=limits["samples"]),
            "train_batches": chunks_of(self.splits.train, size=CHUNK, limit=min(self.subset, limits["train_samples"])),
            "level": policy.level,
        }

    def _probe_estimate(self, stage: int) -> int:
        inputs = self._probe_inputs(stage)
        return 0 if inputs is None else estimate_flops(self.model, loss=loss_sum, reduction="sum", **inputs)

    def _probe(self, stage: int) -> SaturationReport | None:
        inputs, policy = self._probe_inputs(stage), self.schedule.policy
        if inputs is None or not isinstance(policy, SignalGuided):
            return None
        return probe(
            self.model,
            loss=loss_sum,
            reduction="sum",
            tolerance=policy.tolerance_nats,
            ridge=self.config.probe["ridge"],
            seed=self.config.seed,
            mapper=self.ranks.map,
            **inputs,
        )

    def _decide(self, stage: int, report: SaturationReport | None) -> Decision:
        reading = Reading(
            stage=stage,
            num_stages=self.schedule.num_stages,
            spent_flops=self.budget.spent_flops,
            budget_flops=self.budget.total_flops,
            data_share=self.data_share,
            tolerance_nats=report.tolerance_nats if report else tolerance_nats(None, loss_nats=0.0),
            candidates=tuple(s.reading() for s in report.sites) if report else (),
        )
        decision = decide(reading, self.schedule.policy)
        logger.info("Trial %s after stage %d: deciding %s", self.config.trial, stage, decision)
        return decision

    # -- keeping and giving back ---------------------------------------------------------------

    def _snapshot(self) -> dict[str, Tensor]:
        """Weights before training, for the fallback rule."""
        return {k: v.clone() for k, v in self.model.state_dict().items()}

    def _recall(self, snapshot: dict[str, Tensor]) -> None:
        """Fallback rule: training that ends above where it began on S is undone.

        The optimiser failed there, so it starts anew, and further stages train at half the rate.
        """
        self.model.load_state_dict(snapshot)
        self.optimizer.state.clear()
        self.rate_scale /= 2

    def _save(self, name: str, *, jumpboard: bool = False) -> None:
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
                        "rate_scale": self.rate_scale,
                        "flops_wasted": self.flops_wasted,
                        "attempt": self.attempt,
                    },
                    history=[r.to_dict() for r in self.history],
                ),
            )
        self.ranks.barrier()

    def write_config(self) -> None:
        """Keep the trial's input beside its checkpoints, for whoever probes them later."""
        if self.ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "trial.json").write_text(json.dumps(self.config.to_dict(), indent=1), encoding="utf-8")

    def _beat(self, stage: int, flops: int) -> None:
        """Say how far the stage is, so that a kill now can be accounted for."""
        if self.ranks.is_first:
            (self.folder / "progress.json").write_text(json.dumps({"stage": stage, "flops": flops}), encoding="utf-8")

    def _spend_diverged(self, flops: int) -> None:
        flops = min(flops, self.budget.free_flops)
        self.budget = self.budget.reserve(flops).settle(reserved=flops, spent=flops)

    def roll_back(self, reason: str) -> None:
        """Undo a stage that diverged; the trial ends with the network before it."""
        spent = self.budget
        self._restore()
        self.budget = spent
        self.cost = self._count()
        self.decision = Stop(cause="diverged", reason=f"{reason}; rolled back to the end of the stage before")

    def finish(self) -> FinalRecord:
        """The one look at the test split, and the trial's last word."""
        done = self.folder / "final.json"
        if done.is_file():
            return FinalRecord.from_dict(json.loads(done.read_text(encoding="utf-8")))
        assert isinstance(self.decision, Stop)
        on_test, cost = self._evaluate("test")
        cost = min(cost, self.budget.free_flops)
        self.budget = self.budget.reserve(cost).settle(reserved=cost, spent=cost)
        last = self.history[-1] if self.history else None
        final = FinalRecord(
            trial=self.config.trial,
            cause=self.decision.cause,
            reason=self.decision.reason,
            num_stages=len(self.history),
            loss_val=last.loss_val if last else math.inf,
            accuracy_val=last.accuracy_val if last else 0.0,
            loss_test=on_test.loss,
            accuracy_test=on_test.accuracy,
            flops_total=self.budget.spent_flops,
            budget=self.budget.to_dict(),
            digest=weights_digest(self.model),
            flops_wasted=self.flops_wasted,
        )
        if self.ranks.is_first:
            partial = done.with_suffix(".partial")
            partial.write_text(json.dumps(final.to_dict(), indent=1), encoding="utf-8")
            partial.rename(done)
        self.ranks.barrier()
        return final


def _finite_gradient(model: nn.Module) -> bool:
    """False once a loss was not finite: that reaches every gradient, so the last one tells."""
    *_, last = (p.grad for p in model.parameters() if p.grad is not None)
    return bool(torch.isfinite(last).all())
