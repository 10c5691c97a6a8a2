"""The stage loop: one trial as a generator of records, the same on one process or many ranks.

A stage is run, or taken from a trial that ran it before; then what comes next is decided, and a checkpoint is written.
After each record the driver of the loop may send a verdict from outside (stop, or None to go on). The loop knows
neither Ray nor MLflow; every rank runs it, rank 0 decides and writes.
"""

import logging
import math
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from growth_service.core.decisions import (
    Anneal,
    CandidateReading,
    Decision,
    Past,
    Reading,
    Stop,
    decision_to_dict,
    tolerance_nats,
)
from growth_service.core.records import FinalRecord, StageRecord, flops_reused
from growth_service.core.rules import decide
from growth_service.models.sites import sites
from growth_service.training import under_way
from growth_service.training.config import TrialConfig
from growth_service.training.evaluate import evaluate
from growth_service.training.gradients import ShardedGradients
from growth_service.training.ranks import Ranks, check_world, weights_digest
from growth_service.training.sharing import claim_of, is_shareable, key_of, take_over
from growth_service.training.sizing import sizes_after
from growth_service.training.stage import Stage, StageEndError
from growth_service.training.state import TrialState

logger = logging.getLogger(__name__)
Record = StageRecord | FinalRecord


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
        except StageEndError as end:
            loop.roll_back(end)
            break
        verdict = yield record
    yield loop.finish()


class StageLoop:
    """A live trial and the steps of its stages."""

    def __init__(self, config: TrialConfig, *, ranks: Ranks) -> None:
        check_world(ranks.world_size, num_shards=config.training["shards"])
        self.config, self.ranks = config, ranks
        self.schedule = config.growth_schedule()
        self.state = TrialState(config, ranks=ranks)
        self._wrap()

    def _wrap(self) -> None:
        """Gradients and the coming stage of the network that is there."""
        settings = self.config.training
        self.gradients = ShardedGradients(
            self.state.model,
            ranks=self.ranks,
            num_shards=settings["shards"],
            precision=settings.get("precision", "fp32"),
        )
        self.stage = self._coming()

    def _coming(self) -> Stage:
        return Stage(self.state, self.schedule, gradients=self.gradients)

    def run_stage(self) -> StageRecord:
        """The coming stage, run here or taken from the trial that ran it before; its record says what comes next."""
        state = self.state
        state.beat(0)
        self.stage = self._coming()
        key = key_of(state, self.schedule, self.stage.extent, look_due=self.stage.look_due)
        claim = claim_of(self.config.cache, key) if self.ranks.is_first else None
        try:
            found = self.ranks.broadcast(str(claim.found) if claim is not None and claim.found else None)
            record = take_over(state, Path(found), extent=self.stage.extent) if found is not None else None
            if record is not None:
                self._wrap()
            else:
                record = self._run_here(key)
            state.key = key
            record = self._decided(record)
            state.history.append(record)
            state.save(f"{record.stage:03d}")
            under_way.drop(state, stage=record.stage)
            if claim is not None and not record.reused and is_shareable(state, record, stage=self.stage):
                claim.publish(*state.folders_of(record.stage))
        finally:
            if claim is not None:
                claim.release()
        return record

    def _run_here(self, key: str) -> StageRecord:
        """The coming stage, from where it was kept if it was under way when this trial was killed."""
        kept = under_way.find(self.state, key=key)
        if kept is None:
            return self.stage.run(key=key)
        logger.info("Trial %s goes on in stage %d at step %d", self.config.trial, self.state.stage, kept.far.step)
        due = self.stage.look_due
        self.state.stand_at(kept.checkpoint)
        self._wrap()
        self.stage.look_due = due  # as seen before the stage
        return self.stage.run(key=key, kept=kept)

    # -- deciding ----------------------------------------------------------------------------------

    def _decided(self, record: StageRecord) -> StageRecord:
        """The record with what comes next, which rank 0 decides."""
        state = self.state
        state.decision = self.ranks.broadcast(self._decide(record))
        logger.info("Trial %s after stage %d: deciding %s", self.config.trial, record.stage, state.decision)
        return replace(record, decision=decision_to_dict(state.decision))

    def _decide(self, record: StageRecord) -> Decision:
        state = self.state
        if isinstance(state.decision, Anneal):
            return Stop(cause=state.decision.cause, reason=state.decision.reason)
        if self.stage.blind:
            reason = f"the {self.stage.room():.3g} FLOPs that are left do not pay for a look"
            return self._ended(Stop(cause="budget", reason=reason))
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
            targets_per_sample=state.targets_per_sample,
            targets_per_step=self.config.training["batch_size"] * state.targets_per_sample,
            flops_per_sample=record.flops_per_sample,
            sizes_after=() if self.stage.extent.last else sizes_after(state, self.schedule.policy),
            sites=tuple(s.path for s in sites(state.model)),
            seed=self.config.seed,
        )
        return self._ended(decide(reading, self.schedule.policy))

    def _ended(self, decision: Decision) -> Decision:
        """A trial that ends early at its full rate decays first: its network is not finished before."""
        steady = self.config.training.get("rates", "restarts") == "wsd" and not self.stage.extent.annealed
        if isinstance(decision, Stop) and steady:
            return Anneal(cause=decision.cause, reason=decision.reason)
        return decision

    # -- ending ------------------------------------------------------------------------------------

    def roll_back(self, end: StageEndError) -> None:
        """Undo the stage under way, which stays paid for; the trial ends with the network before it."""
        state = self.state
        wasted, probes = state.flops_wasted, state.flops_probe
        state.restore()
        charged = min(self.stage.spent, self.stage.room())
        state.spend(charged)
        state.flops_wasted, state.flops_probe = wasted + self.stage.spent - charged, probes
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
            flops_reused=flops_reused(state.history),
        )
        state.write_final(final)
        under_way.drop(state, stage=state.stage)
        return final


def _past(record: StageRecord) -> Past:
    return Past(
        loss_val=record.loss_val,
        grew=record.decision.get("kind") == "grow",
        ag_max=max((float(c["ag_max"]) for c in record.certificates), default=None),
    )
