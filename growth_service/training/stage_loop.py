"""The stage loop: one trial as a generator of records, the same on one process or many ranks.

A stage is: take the step decided before, train, fall back if training made things worse,
evaluate, probe, decide, write a checkpoint. After each record the driver of the loop may send a
verdict from outside (stop, or None to go on). The loop knows neither Ray nor MLflow; every
rank runs it, rank 0 decides and writes.
"""

import logging
import math
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from growth_service.core.decisions import (
    CandidateReading,
    Decision,
    Grow,
    Past,
    Reading,
    Stop,
    StopCause,
    decision_to_dict,
    tolerance_nats,
)
from growth_service.core.ledger import Ledger
from growth_service.core.rates import Window, decaying_window
from growth_service.core.records import FinalRecord, StageRecord
from growth_service.core.rules import decide
from growth_service.core.steps import change_to_dict
from growth_service.errors import CheckpointError, NotFiniteError, UserError
from growth_service.models.sites import sites, size_of
from growth_service.probing import SaturationReport
from growth_service.training import checkpoint as store
from growth_service.training.augment import augmented
from growth_service.training.batches import DataPosition, next_indices, shards_of
from growth_service.training.config import TrialConfig
from growth_service.training.evaluate import Evaluation, evaluate, loss_sum
from growth_service.training.gradients import ShardedGradients
from growth_service.training.growing import StepTaken, take_step
from growth_service.training.looking import look, look_estimate, look_settings
from growth_service.training.optimizer import DECAY_SHARE, fresh_parameters, set_learning_rate, stage_rates
from growth_service.training.ranks import Ranks, check_world, weights_digest
from growth_service.training.stage_cache import Claim, StageCache, stage_key
from growth_service.training.state import TrialState

logger = logging.getLogger(__name__)
Record = StageRecord | FinalRecord
HEARTBEAT_S = 2.0
EVALUATE_SAMPLES = 4096
"""Most training samples of an evaluation, where a job says nothing else."""
STEADY_SLACK = 1.1
"""A stage that ends at its full rate is undone where its training loss rose by more than this factor: such losses
jitter, and only one that was trained to its end can be held to where it began."""


class _StageEndError(Exception):
    """A stage cannot be finished: its loss is not finite, or the budget is too small for it."""

    def __init__(self, cause: StopCause, reason: str) -> None:
        super().__init__(reason)
        self.cause, self.reason = cause, reason


def run_trial(config: TrialConfig, *, ranks: Ranks) -> Generator[Record, Decision | None, None]:
    """Run a trial from where its folder says it stands, to its end.

    Yields:
        A :class:`StageRecord` after each stage and one :class:`FinalRecord`. A resumed trial first
        yields its old records again; readers know them by their stage.

    Receives:
        After each record, a ``Stop`` from outside, or None (or any other decision) to go on.
    """
    loop = StageLoop(config, ranks=ranks)
    state = loop.state
    state.write_config()
    verdict: Decision | None = None
    for record in list(state.history):
        verdict = yield record
    if state.final is not None:  # ended before, for good
        yield state.final
        return
    while not isinstance(state.decision, Stop):
        if isinstance(verdict, Stop):
            state.decision = verdict
            break
        try:
            record = loop.run_stage()
        except _StageEndError as end:
            loop.roll_back(end)
            break
        verdict = yield record
    yield loop.finish()


class _Losses(NamedTuple):
    """Old network and jumpboard on the training subset in force and on validation."""

    old_train: float
    old_val: float
    jumpboard_train: float
    jumpboard_val: float


@dataclass(kw_only=True)
class _Stage:
    """A stage under way: what it did and what it cost so far."""

    number: int
    started: float
    spent: int = 0
    taken: StepTaken
    losses: _Losses | None = None
    floor: float | None = None
    """Loss on the training subset that the stage must not end above."""
    trained_s: float = 0.0
    grown_s: float = 0.0
    fallback: bool = False
    look_flops: int = 0
    """What the look after the stage will cost at most."""
    blind: bool = False
    """True where the budget did not pay for the look that was due."""


class StageLoop:
    """A live trial and the steps of its stages."""

    def __init__(self, config: TrialConfig, *, ranks: Ranks) -> None:
        check_world(ranks.world_size, num_shards=config.training["shards"])
        self.config, self.ranks = config, ranks
        self.schedule = config.growth_schedule()
        self.state = TrialState(config, ranks=ranks)
        self.gradients = ShardedGradients(self.state.model, ranks=ranks, num_shards=config.training["shards"])
        self._stage = _Stage(number=self.state.stage, started=0.0, taken=StepTaken())

    def run_stage(self) -> StageRecord:
        """Run the coming stage, or take it from the trial that ran it before."""
        state = self.state
        state.beat(0)
        key = self.stage_key()
        claim = self._claim(key)
        try:
            found = self.ranks.broadcast(str(claim.found) if claim is not None and claim.found else None)
            record = self._reuse(Path(found)) if found is not None else None
            if record is None:
                record = self._run_stage()
                state.key = key
                state.history.append(record)
                state.save(f"{record.stage:03d}")
                if claim is not None and self._is_shareable(record):
                    claim.publish(*state.folders_of(record.stage))
            else:
                state.key = key
                state.history.append(record)
                state.save(f"{record.stage:03d}")
        finally:
            if claim is not None:
                claim.release()
        return record

    def _run_stage(self) -> StageRecord:
        """Step, train, fall back, evaluate, probe, decide."""
        state = self.state
        self._stage = stage = _Stage(number=state.stage, started=time.perf_counter(), taken=StepTaken())
        self._begin(stage)
        before = state.snapshot() if stage.floor is not None else {}
        self._train(stage)
        on_train = self._evaluate(stage, "train")
        if stage.floor is not None and not on_train.loss <= stage.floor * self._slack():
            stage.fallback = True
            state.fall_back(before)
            on_train = on_train._replace(loss=stage.floor)
        on_val = self._evaluate(stage, "val")
        if not (math.isfinite(on_train.loss) and math.isfinite(on_val.loss)):
            raise _StageEndError("diverged", f"the loss after stage {stage.number} is not finite")
        report = self._look(stage)
        state.spend(stage.spent)
        digest = weights_digest(state.model)
        self.ranks.agree(digest, what=f"after stage {stage.number}")
        return self._decided(self._record(stage, on_train, on_val, report, digest=digest))

    # -- stages that other trials have run -------------------------------------------------------

    def stage_key(self) -> str:
        """Address of the coming stage: everything that determines its result, as a digest.

        What the policy does with the result is not part of it, nor is the budget, unless the rates of the stage depend
        on it.
        """
        state, config, window = self.state, self.config, self.window()
        settings, total = config.training, config.budget_flops
        decaying = decaying_window(
            settings.get("rates", "restarts"), window, decay_share=settings.get("decay_share", DECAY_SHARE)
        )
        last = window.end >= 1
        return stage_key(
            base=config.base,
            data=state.splits.digest,
            seed=config.seed,
            training=settings,
            probe=config.probe,
            data_share=self.schedule.initial.data_share,
            before=state.key,
            stage=state.stage,
            changes=[change_to_dict(c) for c in state.decision.changes] if isinstance(state.decision, Grow) else [],
            until=round(window.end * total),
            decaying=[*decaying, total] if decaying or last else [],
            look=look_settings(state, self.schedule),
        )

    def _claim(self, key: str) -> Claim | None:
        """The right to run the coming stage, on rank 0 of a trial with a cache."""
        cache = self.config.cache
        if cache is None or not self.ranks.is_first:
            return None
        return StageCache(Path(cache["folder"]), limit_bytes=cache["limit_bytes"]).claim(key)

    def _is_shareable(self, record: StageRecord) -> bool:
        """Whether the stage would be the same in a trial of another budget: what had to stay free did not bind it."""
        state = self.state
        at_the_end = state.cost.forward * len(state.splits.test.targets)
        needed = max(record.flops_total, round(self._end_of(record.stage) * self.config.budget_flops)) + at_the_end
        last = record.stage + 1 == self.schedule.num_stages  # only trials of the same budget find it
        return not self._stage.blind and (last or self.config.budget_flops >= needed)

    def _reuse(self, folder: Path) -> StageRecord | None:
        """Take over the result of a stage; None where it is damaged, or where this trial would have run another."""
        state, number = self.state, self.state.stage
        try:
            found = store.load_checkpoint(folder / f"{number:03d}")
        except CheckpointError as error:
            logger.warning("Running stage %d of trial %s again, since %s", number, self.config.trial, error)
            return None
        theirs = StageRecord.from_dict(found.history[-1])
        at_the_end = found.streams["cost_forward"] * len(state.splits.test.targets)
        until = round(self._end_of(number) * self.config.budget_flops)
        if number + 1 < self.schedule.num_stages and self.config.budget_flops < at_the_end + max(
            theirs.flops_total, until
        ):
            return None
        started = time.perf_counter()
        state.adopt(found)
        state.spend(theirs.flops_total - state.budget.spent_flops)
        if self.ranks.is_first and (folder / f"{number:03d}-jumpboard").is_dir():
            state.copy_folder(folder / f"{number:03d}-jumpboard")
        self.gradients = ShardedGradients(state.model, ranks=self.ranks, num_shards=self.config.training["shards"])
        self._stage = _Stage(number=number, started=started, taken=StepTaken())
        self.ranks.agree(weights_digest(state.model), what=f"after taking over stage {number}")
        seconds = time.perf_counter() - started
        return self._decided(
            replace(
                theirs,
                trial=self.config.trial,
                budget=state.budget.to_dict(),
                stage_s=seconds,
                overhead_s=seconds,
                grow_s=0.0,
                flops_wasted=state.flops_wasted,
                attempt=state.attempt,
                reused=True,
            )
        )

    def _end_of(self, stage: int) -> float:
        return self.schedule.stage_ends()[stage]

    # -- one stage -------------------------------------------------------------------------------

    def _slack(self) -> float:
        """Factor by which a stage's training loss may rise."""
        settings = self.config.training
        annealed = settings.get("rates", "restarts") == "restarts" or self.window().end >= 1
        return 1.0 if annealed else STEADY_SLACK

    def _begin(self, stage: _Stage) -> None:
        """Execute the last decision and measure where the stage starts from."""
        state = self.state
        old = state.last
        if isinstance(state.decision, Grow):
            started = time.perf_counter()
            stage.taken = self._grow(state.decision, stage)
            stage.grown_s = time.perf_counter() - started
        if old is not None and stage.taken.words:
            stage.losses = self._jumpboard_losses(old, stage)
            stage.floor = stage.losses.jumpboard_train
            state.save(f"{stage.number:03d}-jumpboard", jumpboard=True)
        elif old is not None:
            stage.floor = old.loss_train
        estimate = look_estimate(state, self.schedule)
        stage.look_flops = estimate.flops
        state.flops_probe += estimate.cost
        self._pay(stage, estimate.cost)

    def _grow(self, decision: Grow, stage: _Stage) -> StepTaken:
        state = self.state
        taken = take_step(
            state.model,
            decision.changes,
            decided_after=stage.number - 1,
            seed=self.config.seed,
            optimizer=state.optimizer,
            train=state.splits.train,
            subset=state.subset,
            ridge=self.config.probe["ridge"],
            fold_limit=self.config.probe["train_samples"],
            ranks=self.ranks,
        )
        if taken.data_share is not None:
            state.data_share, state.position = taken.data_share, DataPosition(epoch=state.position.epoch + 1)
        # Before the wrapper is renewed: that copies rank 0's weights to all and would hide a difference.
        self.ranks.agree(weights_digest(state.model), what=f"after growing for stage {stage.number}")
        if taken.receipts:
            self.gradients.rewrap()
            state.count_cost()
        state.flops_probe += taken.flops
        self._pay(stage, taken.flops)
        return taken

    def _jumpboard_losses(self, old: StageRecord, stage: _Stage) -> _Losses:
        """Losses of the old network and the jumpboard on the subset now in force and on validation.

        Without a jumpboard step the jumpboard is the old network; its losses are known, but for
        the training loss where the subset changed.
        """
        taken = stage.taken
        if not taken.moved:
            old_train = self._evaluate(stage, "train").loss if taken.data_share is not None else old.loss_train
            return _Losses(old_train, old.loss_val, old_train, old.loss_val)
        assert taken.data_share is None, "a jumpboard step and a data step are separate decisions"
        moved_train, moved_val = self._evaluate(stage, "train").loss, self._evaluate(stage, "val").loss
        return _Losses(old.loss_train, old.loss_val, moved_train, moved_val)

    # -- training --------------------------------------------------------------------------------

    def _pay(self, stage: _Stage, flops: int) -> None:
        """Book FLOPs on the stage; what the last evaluation on test will cost stays set aside."""
        stage.spent += flops
        if stage.spent > self._room():
            reason = f"stage {stage.number} would cost more than the {self._room():.3g} FLOPs that are left"
            raise _StageEndError("budget", reason)

    def _room(self) -> int:
        """FLOPs that are free for the present stage."""
        state = self.state
        at_the_end: int = state.cost.forward * len(state.splits.test.targets)
        return max(0, state.budget.free_flops - at_the_end)

    def planned_batches(self, *, already: int = 0, look_flops: int | None = None) -> int:
        """Global batches of the coming stage: what is left of the budget's share up to its end pays for.

        One at least, as long as the rest of the budget pays for it.

        Args:
            already: FLOPs that the stage has cost so far (its grow step).
            look_flops: What its look will cost at most; None: find out.
        """
        state = self.state
        look_flops = look_estimate(state, self.schedule).flops if look_flops is None else look_flops
        evaluations: int = state.cost.forward * (self._evaluated("train") + self._evaluated("val"))
        room, others = self._room(), already + evaluations + look_flops
        until = round(self.window().end * state.budget.total_flops)
        share = min(room, until - state.budget.spent_flops)
        per_batch: int = self.config.training["batch_size"] * state.cost.train
        at_least = 1 if room - others >= per_batch else 0
        return max(at_least, (share - others) // per_batch)

    def window(self) -> Window:
        """The part of the budget that the coming stage covers."""
        ends = (0.0, *self.schedule.stage_ends())
        return Window(start=ends[self.state.stage], end=ends[self.state.stage + 1])

    def _train(self, stage: _Stage) -> None:
        """Train for as many global batches as the stage pays for."""
        state, settings = self.state, self.config.training
        num_batches = self.planned_batches(already=stage.spent, look_flops=stage.look_flops)
        window = self.window()
        self._check_trainable(stage, num_batches)
        started = last_beat = time.perf_counter()
        per_batch: int = settings["batch_size"] * state.cost.train
        state.model.train()
        with fresh_parameters(state.optimizer, self._new_parameters(stage)):
            for step in range(num_batches):
                first = stage.number == 0
                rates = stage_rates(step / num_batches, settings, first=first, window=window, scale=state.rate_scale)
                set_learning_rate(state.optimizer, rates)
                indices, state.position = next_indices(
                    state.position, subset=state.subset, batch_size=settings["batch_size"], seed=self.config.seed
                )
                shards = shards_of(state.splits.train, indices, num_shards=settings["shards"])
                kind = settings.get("augment", "none")
                shards = augmented(shards, kind, seed=self.config.seed, position=state.position)
                self.gradients.backward(shards, loss_sum)
                self._pay(stage, per_batch)
                if not _has_finite_gradient(state.model):
                    reason = f"a gradient was not finite in step {step} of stage {stage.number}"
                    raise _StageEndError("diverged", reason)
                state.optimizer.step()
                state.targets_seen += settings["batch_size"] * state.targets_per_sample
                if time.perf_counter() - last_beat > HEARTBEAT_S:
                    last_beat = time.perf_counter()
                    state.beat(stage.spent)
        stage.trained_s = time.perf_counter() - started

    def _new_parameters(self, stage: _Stage) -> list[nn.Parameter]:
        """What the stage's own grow steps added, where that is to warm up by itself."""
        if self.config.training.get("rewarm", "whole") != "new":
            return []
        names = {n for r in stage.taken.receipts if r.kind in ("insert", "widen", "stream") for n in r.parameters}
        return [p for n, p in self.state.model.named_parameters() if n in names]

    def _check_trainable(self, stage: _Stage, num_batches: int) -> None:
        if num_batches == 0 and stage.number == 0:
            raise UserError(
                f"the budget of trial {self.config.trial} ({self.config.budget_flops:.3g} FLOPs) does not pay for one "
                f"batch in the first of its {self.schedule.num_stages} stages: raise budget.trial or use fewer stages"
            )
        if num_batches == 0:
            raise _StageEndError("budget", f"what is left does not pay for one batch in stage {stage.number}")
        batch_size, subset = self.config.training["batch_size"], self.state.subset
        if batch_size > subset:
            raise UserError(
                f"training.batch_size {batch_size} is larger than the {subset} training samples in force: use a "
                f"smaller batch or a data_share above {self.state.data_share:g}"
            )

    def _evaluate(self, stage: _Stage, part: str) -> Evaluation:
        """Evaluate on the training subset in force or on another whole split, and pay for it."""
        state = self.state
        limit = self._evaluated(part)
        self._pay(stage, state.cost.forward * limit)
        return evaluate(state.model, getattr(state.splits, part), ranks=self.ranks, limit=limit)

    def _evaluated(self, part: str) -> int:
        """Samples of a split on which a loss is measured: the first of the training subset, all of another."""
        if part == "train":
            limit: int = self.config.training.get("evaluate_samples", EVALUATE_SAMPLES)
            return min(self.state.subset, limit)
        return len(getattr(self.state.splits, part).targets)

    def _look(self, stage: _Stage) -> SaturationReport | None:
        """Probe, where the policy looks and the budget pays for it."""
        state = self.state
        if stage.look_flops > self._room() - stage.spent:
            stage.blind = True
            return None
        try:
            report = look(state, self.schedule)
        except NotFiniteError as error:
            raise _StageEndError("diverged", str(error)) from None
        if report is not None:
            state.flops_probe += report.flops
            self._pay(stage, report.flops)
        return report

    # -- deciding and recording ------------------------------------------------------------------

    def _decided(self, record: StageRecord) -> StageRecord:
        """The record with what comes next, which rank 0 decides."""
        state = self.state
        reading = Reading(
            stage=record.stage,
            num_stages=self.schedule.num_stages,
            spent_flops=state.budget.spent_flops,
            budget_flops=state.budget.total_flops,
            data_share=state.data_share,
            tolerance_nats=record.tolerance_nats or tolerance_nats(None, loss_nats=0.0),
            candidates=tuple(map(CandidateReading.from_certificate, record.certificates)),
            past=tuple(map(_past, (*state.history, record))),
            loss_train=record.loss_train,
            loss_val=record.loss_val,
            params=record.params,
            targets_seen=record.targets_seen,
            targets_available=state.splits.train.targets.numel(),
            flops_per_sample=record.flops_per_sample,
            sites=tuple(s.path for s in sites(state.model)),
            seed=self.config.seed,
        )
        decision = decide(reading, self.schedule.policy)
        if self._stage.blind:
            reason = f"the {self._room():.3g} FLOPs that are left do not pay for a look"
            decision = Stop(cause="budget", reason=reason)
        state.decision = self.ranks.broadcast(decision)
        logger.info("Trial %s after stage %d: deciding %s", self.config.trial, record.stage, state.decision)
        return replace(record, decision=decision_to_dict(state.decision))

    def _record(
        self, stage: _Stage, on_train: Evaluation, on_val: Evaluation, report: SaturationReport | None, *, digest: str
    ) -> StageRecord:
        state, taken = self.state, stage.taken
        depth, width, params = size_of(state.model)
        seconds = time.perf_counter() - stage.started
        signal: dict[str, Any] = {}
        if report is not None:
            signal = {
                "verdict": report.verdict,
                "tolerance_nats": report.tolerance_nats,
                "certificates": [s.to_dict() for s in report.sites],
                "protocol": report.protocol,
            }
        return StageRecord(
            trial=self.config.trial,
            stage=stage.number,
            depth=depth,
            width=width,
            params=params,
            train_samples=state.subset,
            data_share=state.data_share,
            loss_train=on_train.loss,
            loss_val=on_val.loss,
            accuracy_val=on_val.accuracy,
            flops_total=state.budget.spent_flops,
            flops_probe=state.flops_probe,
            targets_seen=state.targets_seen,
            flops_per_sample=state.cost.train,
            budget=state.budget.to_dict(),
            decision={},
            receipts=[r.to_dict() for r in taken.receipts],
            step=taken.words,
            fallback=stage.fallback,
            ledger=_ledger(stage, on_train, on_val),
            digest=digest,
            stage_s=seconds,
            overhead_s=seconds - stage.trained_s,
            grow_s=stage.grown_s,
            flops_wasted=state.flops_wasted,
            attempt=state.attempt,
            **signal,
        )

    # -- ending ------------------------------------------------------------------------------------

    def roll_back(self, end: _StageEndError) -> None:
        """Undo the stage under way, which stays paid for; the trial ends with the network before it."""
        state = self.state
        wasted, probes = state.flops_wasted, state.flops_probe
        state.restore()
        charged = min(self._stage.spent, self._room())
        state.spend(charged)
        state.flops_wasted, state.flops_probe = wasted + self._stage.spent - charged, probes
        state.decision = Stop(cause=end.cause, reason=f"{end.reason}; rolled back to the end of the stage before")

    def finish(self) -> FinalRecord:
        """The one look at the test split, and the trial's last word."""
        state = self.state
        assert isinstance(state.decision, Stop)
        on_test = evaluate(state.model, state.splits.test, ranks=self.ranks)
        state.spend(state.cost.forward * len(state.splits.test.targets))
        last = state.last
        final = FinalRecord(
            trial=self.config.trial,
            cause=state.decision.cause,
            reason=state.decision.reason,
            num_stages=len(state.history),
            loss_val=last.loss_val if last else math.inf,
            accuracy_val=last.accuracy_val if last else 0.0,
            loss_test=on_test.loss,
            accuracy_test=on_test.accuracy,
            flops_total=state.budget.spent_flops,
            budget=state.budget.to_dict(),
            digest=weights_digest(state.model),
            flops_wasted=state.flops_wasted,
        )
        state.write_final(final)
        return final


def _past(record: StageRecord) -> Past:
    return Past(
        loss_val=record.loss_val,
        grew=record.decision.get("kind") == "grow",
        ag_max=max((float(c["ag_max"]) for c in record.certificates), default=None),
    )


def _ledger(stage: _Stage, on_train: Evaluation, on_val: Evaluation) -> dict[str, Any] | None:
    """The account of the stage's grow step; None where nothing grew."""
    if stage.losses is None:
        return None
    return Ledger(
        step=", ".join(stage.taken.words),
        **stage.losses._asdict(),
        new_train=on_train.loss,
        new_val=on_val.loss,
        fallback=stage.fallback,
    ).to_dict()


def _has_finite_gradient(model: nn.Module) -> bool:
    """False once a loss was not finite: that reaches every gradient, so the last one tells."""
    last: Tensor | None = None
    for parameter in model.parameters():
        last = parameter.grad if parameter.grad is not None else last
    return last is None or bool(torch.isfinite(last).all())
