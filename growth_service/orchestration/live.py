"""The study that this process drives: the one place where its live state is.

Tune pickles schedulers, searchers and callbacks to disk; they therefore hold the study's id
alone and look the state up here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from growth_service.core.budget import Budget
from growth_service.core.decisions import Stop, decision_to_dict
from growth_service.core.records import FinalRecord, StageRecord, TrialRecord, flops_reused
from growth_service.core.referee import Referee, Verdict
from growth_service.core.units import format_seconds
from growth_service.errors import WorkFailedError
from growth_service.orchestration.plan import PlannedTrial, suggested_name, suggested_trial, trial_config
from growth_service.orchestration.storage import StudyFolder
from growth_service.spec import JobSpec
from growth_service.tracking.base import Tracker

UNEXPLAINED = "its workers failed for good; see the error above and the logs in Ray's session folder"
"""Reason of a failed trial until Tune says more."""

_STUDIES: dict[str, "LiveStudy"] = {}


class Observer(Protocol):
    """Somebody who watches a study: the live table, a log, a test."""

    def trial_started(self, trial: str) -> None:
        """A trial was handed to Tune."""

    def stage_done(self, record: StageRecord) -> None:
        """A record arrived (once a stage)."""

    def trial_done(self, record: TrialRecord) -> None:
        """A trial ended."""


class Suggester(Protocol):
    """The part of a searcher that the study needs."""

    def tell(self, number: int, loss: float, flops: float = 0.0) -> None:
        """Note a result."""

    def ask(self, number: int) -> dict[str, Any] | None:
        """Suggest, or None to wait."""

    def drawn(self, number: int) -> dict[str, Any]:
        """What was drawn for a suggestion."""


class LiveStudy:
    """State of a running study: what was planned, started, heard and decided."""

    def __init__(
        self,
        job: JobSpec,
        *,
        folder: StudyFolder,
        data: dict[str, Any],
        listed: list[PlannedTrial],
        suggester: Suggester | None,
        budget: Budget,
        wave_size: int,
        tracker: Tracker,
        observer: Observer,
        post: Callable[[Verdict], None],
        abandon: Callable[[str], object],
        gone: Callable[[], str | None],
        exchange: str,
        ran_s: Callable[[], float],
    ) -> None:
        self.job, self.folder, self.data = job, folder, data
        self.tracker, self.observer, self.budget = tracker, observer, budget
        self._listed, self._suggester, self._post, self._exchange = listed, suggester, post, exchange
        self._num_suggested = job.search.suggest.trials if job.search.suggest else 0
        self._ran_s, self._abandon, self._gone = ran_s, abandon, gone
        self._next = 0
        self._handed_out: dict[str, int] = {}
        """Trials that this process started, with their stages of earlier processes."""
        self.interrupted: str | None = None
        """Why no trial can run any more, where that came about."""
        self.planned: dict[str, PlannedTrial] = {}
        self.stages: dict[str, dict[int, StageRecord]] = {}
        self.done: dict[str, TrialRecord] = {}
        self._verdicts: dict[tuple[str, int], Verdict] = {}
        self.referee = Referee(
            wave_size=wave_size,
            deterministic=job.search.deterministic,
            rule=job.scheduler.of_budget(job.budget.trial),
        )
        for trial in listed:
            self.referee.enlist(trial.name, index=trial.index)

    # -- starting ------------------------------------------------------------------------------

    @property
    def all_started(self) -> bool:
        """True once no further trial will be asked for: all were, or a limit of the study is reached."""
        left = self.budget.free_flops + self.budget.reserved_flops
        most = min(self._num_trials, self.job.budget.trials or self._num_trials)
        if self._next >= most or left < self.trial_flops or self.interrupted is not None:
            return True
        return self.out_of_time and not self._was_begun(self._next)

    @property
    def out_of_time(self) -> bool:
        """Whether the study's time, or its money, is used up."""
        return self._ran_s() >= self.job.budget.seconds

    def _was_begun(self, index: int) -> bool:
        """Whether an earlier process began a trial: it is ended, or heard, also when the time is up."""
        name = self._listed[index].name if index < len(self._listed) else suggested_name(index)
        return (self.folder.trials / name / "trial.json").is_file()

    @property
    def _num_trials(self) -> int:
        return len(self._listed) + self._num_suggested

    @property
    def not_started(self) -> int:
        """Trials that the study's limits did not leave room for."""
        return self._num_trials - self._next

    @property
    def trial_flops(self) -> int:
        """What a trial reserves."""
        return int(self.job.budget.trial)

    def next_trial(self) -> tuple[str, dict[str, Any]] | None:
        """Name and Tune configuration of the next trial that still has to run; None to wait, or at the end."""
        while not self.all_started:
            if self.budget.free_flops < self.trial_flops:
                return None  # a running trial may return what it does not spend
            trial = self._trial_at(self._next)
            if trial is None:
                return None
            self._next += 1
            self.planned[trial.name] = trial
            self.budget = self.budget.reserve(self.trial_flops)
            found = self.folder.trial_record(trial.name, schedule=trial.schedule.to_dict(), seed=trial.seed)
            self.tracker.open_trial(
                trial.name,
                schedule=found.schedule,
                seed=trial.seed,
                storage=str((self.folder.trials / trial.name).resolve()),
                drawn=self._drawn(trial.index),
            )
            if found.final is None:
                self._handed_out[trial.name] = len(found.stages)
                self.observer.trial_started(trial.name)
                return trial.name, self._tune_config(trial)
            self._replay(found)
        return None

    def _trial_at(self, index: int) -> PlannedTrial | None:
        if index < len(self._listed):
            return self._listed[index]
        number = index - len(self._listed)
        assert self._suggester is not None
        arguments = self._suggester.ask(number)
        if arguments is None:
            return None
        journal = self.folder.journal()
        if number >= len(journal):
            self.folder.append_journal({"number": number, "arguments": arguments})
        elif journal[number]["arguments"] != arguments:
            raise WorkFailedError(
                f"the sampler suggests {arguments} where the study's journal has {journal[number]['arguments']}: it "
                "was started with another version; finish it with that one, or start a new study"
            )
        trial = suggested_trial(self.job, index=index, arguments=arguments)
        self.referee.enlist(trial.name, index=index)
        return trial

    def _drawn(self, index: int) -> dict[str, Any] | None:
        number = index - len(self._listed)
        return self._suggester.drawn(number) if self._suggester is not None and number >= 0 else None

    def _tune_config(self, trial: PlannedTrial) -> dict[str, Any]:
        config = trial_config(self.job, trial, data=self.data, folder=self.folder.path.resolve())
        return {
            "trial": config.to_dict(),
            "exchange": self._exchange,
        }

    def _replay(self, found: TrialRecord) -> None:
        """A trial that ended in an earlier process counts as if it had ended now."""
        for record in found.stages:
            self.hear_stage(record)
        assert found.final is not None
        self.hear_final(found.final)

    # -- hearing -------------------------------------------------------------------------------

    def hear_stage(self, record: StageRecord) -> None:
        """A stage record, possibly repeated after a restart of the trial."""
        seen = self.stages.setdefault(record.trial, {})
        if record.stage in seen:
            self._publish(self._known_verdicts(record))
            return
        seen[record.stage] = record
        self.tracker.log_stage(record)
        self.folder.write_state(ran_s=self._ran_s())
        self.observer.stage_done(record)
        self._publish(self.referee.hear(record))

    def hear_final(self, final: FinalRecord) -> None:
        """The last record of a trial."""
        if final.trial in self.done:
            return
        planned = self.planned[final.trial]
        stages = self.stages.get(final.trial, {})
        record = TrialRecord(
            trial=final.trial,
            schedule=planned.schedule.to_dict(),
            seed=planned.seed,
            stages=tuple(stages[s] for s in sorted(stages)),
            final=final,
        )
        self.done[final.trial] = record
        self.budget = self.budget.settle(reserved=self.trial_flops, spent=final.flops_total - final.flops_reused)
        number = planned.index - len(self._listed)
        if self._suggester is not None and number >= 0:
            loss = final.loss_val if final.cause != "failed" else float("inf")
            self._suggester.tell(number, loss, float(final.flops_total))
        self.tracker.close_trial(record)
        self.folder.write_state(ran_s=self._ran_s())
        self.observer.trial_done(record)
        self._publish(self.referee.hear_end(final.trial))

    def hear_failure(self, trial: str, reason: str) -> None:
        """A trial whose work failed for good: it ends with what it has."""
        if trial in self.done or self.interrupted is not None:
            return
        self.interrupted = self._gone()
        if self.interrupted is not None:  # not the trial's own failure: it runs when the study is resumed
            return
        self._abandon(trial)
        stages = self.stages.get(trial, {})
        last = stages[max(stages)] if stages else None
        self.hear_final(
            FinalRecord(
                trial=trial,
                cause="failed",
                reason=reason,
                num_stages=len(stages),
                loss_val=last.loss_val if last else float("inf"),
                accuracy_val=last.accuracy_val if last else 0.0,
                loss_test=float("nan"),
                accuracy_test=float("nan"),
                flops_total=last.flops_total if last else 0,
                budget=last.budget if last else {},
                flops_reused=flops_reused([stages[s] for s in sorted(stages)]),
            )
        )

    def explain_failures(self, reasons: dict[str, str]) -> None:
        """Put causes that became known later into the records of failed trials."""
        for trial, reason in reasons.items():
            record = self.done.get(trial)
            if record is not None and record.final is not None and record.final.reason == UNEXPLAINED:
                self.done[trial] = replace(record, final=replace(record.final, reason=reason))

    def _publish(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            ends = self.out_of_time and self._goes_on(verdict)
            given = verdict._replace(decision=self._out_of_time()) if ends else verdict
            self._post(self._verdicts.setdefault((verdict.trial, verdict.stage), given))

    def _goes_on(self, verdict: Verdict) -> bool:
        """Whether a trial would train on after this stage, which an earlier process had not gone beyond."""
        record = self.stages[verdict.trial][verdict.stage]
        is_newest = verdict.stage + 1 >= self._handed_out.get(verdict.trial, record.stage + 2)
        return is_newest and record.decision.get("kind") != "stop"

    def _out_of_time(self) -> Stop:
        allowed = format_seconds(self.job.budget.seconds)
        return Stop(cause="budget", reason=f"the {allowed} that the study's time and money allow are used up")

    def _known_verdicts(self, record: StageRecord) -> list[Verdict]:
        """The verdict that a repeated record got before, if it has one."""
        known = self._verdicts.get((record.trial, record.stage))
        return [] if known is None else [known]

    @property
    def heard_stages(self) -> list[StageRecord]:
        """Stages that were run or taken over under this process, in no order."""
        return [
            record
            for name, earlier in self._handed_out.items()
            for record in self.stages.get(name, {}).values()
            if record.stage >= earlier
        ]

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """All verdicts in the order in which they were given, as plain JSON."""
        return [
            {"trial": v.trial, "stage": v.stage, "decision": decision_to_dict(v.decision)}
            for v in self._verdicts.values()
        ]


def register(study_id: str, study: LiveStudy) -> None:
    """Make a study findable by the objects that Tune holds."""
    _STUDIES[study_id] = study


def study(study_id: str) -> LiveStudy:
    """The live study of an id; a KeyError means another process's pickle was loaded."""
    return _STUDIES[study_id]


def forget(study_id: str) -> None:
    """Drop a study that ended."""
    _STUDIES.pop(study_id, None)
