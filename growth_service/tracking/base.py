"""What a tracker does, whatever it writes to.

The driver is the only writer and speaks :class:`Tracker`: one study, its trials, their stages.
:class:`RunTracker` holds the rules (what is logged when, at which step, and that nothing is
logged twice, by this process or an earlier one) over a :class:`RunStore`, which only stores.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from growth_service.core.records import StageRecord, TrialRecord, compute_step
from growth_service.tracking.jsontext import to_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
"""State of a run, in MLflow's words."""

EVENTS = "growth/events.json"
"""The whole trial record; written when the trial ends."""
SCHEDULE = "growth/schedule.json"
"""Schedule and seed; written when the trial starts."""
STAGES = "growth/stages"
"""One stage record a file; what there is to read of a trial that has not ended."""

MAX_REASON = 5000
_MAX_PARAMS = 90  # MLflow takes 100 in one batch
_MAX_PARAM = 500
_PARENT_TAG = "mlflow.parentRunId"
DRAWN_TAG = "growth.drawn"
"""Of a suggested trial: what the sampler drew, as JSON."""


class Tracker(Protocol):
    """The records of one study, as the driver writes them.

    Every method may be repeated: what is there already, also from an earlier process, is not
    written again.
    """

    def open_study(self, name: str, *, job: dict[str, Any], job_text: str) -> None:
        """Start or resume the study ``name``; one at a time, by one process.

        Args:
            name: Finds the study again on resume.
            job: The job with all defaults; its small scalars become params, once.
            job_text: The job file as written, kept as ``job.yaml``.
        """

    def open_trial(
        self,
        trial: str,
        *,
        schedule: dict[str, Any],
        seed: int,
        storage: str | None = None,
        drawn: dict[str, Any] | None = None,
    ) -> None:
        """Start or resume a trial of the open study.

        A trial that was killed or failed runs again; a finished one stays finished.

        Args:
            trial: Name, unique in its study.
            schedule: Its growth schedule as plain JSON.
            seed: Of the trial.
            storage: Folder of its checkpoints, where there is one.
            drawn: What a sampler drew for it, where one did, as plain JSON.

        Raises:
            RuntimeError: If no study is open, or the trial is known with another schedule or seed.
        """

    def log_stage(self, record: StageRecord) -> None:
        """Write one stage; nothing happens where it is there already.

        Raises:
            RuntimeError: If the trial is not open, has ended, or a later stage came first.
        """

    def close_trial(self, record: TrialRecord) -> None:
        """End a trial with its whole record; stages not logged so far are logged now.

        Raises:
            RuntimeError: If the trial is not open.
            ValueError: If the record has no end.
        """

    def close_study(self, trials: Sequence[TrialRecord], *, summary: dict[str, Any], ok: bool) -> None:
        """End the study; trials still running are marked killed.

        Args:
            trials: All of its trials. Those with an end that are still open are closed.
            summary: The result of the study as plain JSON.
            ok: False where the study as a whole failed.
        """

    def interrupt_study(self, reason: str) -> None:
        """Mark the study and its running trials killed; to be resumed by :meth:`open_study`.

        Does nothing where no study is open.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """A run as a store knows it."""

    run_id: str
    status: str
    tags: Mapping[str, str]
    params: Mapping[str, str]


class RunStore(Protocol):
    """Where runs are kept. It stores what it is told and knows nothing of trials."""

    def study(self, name: str) -> StoredRun | None:
        """The first run with tags ``growth.kind=study`` and ``growth.study=name``."""

    def children(self, parent_id: str) -> list[StoredRun]:
        """All runs below a run, oldest first."""

    def create(self, name: str, *, tags: Mapping[str, str]) -> str:
        """Make a running run and return its id."""

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Write params, all or none; never called twice for a run."""

    def log_metrics(self, run_id: str, metrics: Mapping[str, float], *, step: int) -> None:
        """Write metrics at one step, all or none."""

    def history(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        """Steps and values of one metric, by step; empty where there is none."""

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set or replace tags."""

    def log_text(self, run_id: str, text: str, path: str) -> None:
        """Write or replace a text artifact."""

    def log_figure(self, run_id: str, figure: "Figure", path: str) -> None:
        """Write or replace a picture artifact."""

    def set_status(self, run_id: str, status: Status) -> None:
        """Set the state of a run."""


@dataclass(kw_only=True, slots=True)
class _Trial:
    """What the tracker remembers of an open trial."""

    run_id: str
    is_closed: bool = False
    last_step: int = -1
    stages: set[int] = field(default_factory=set)
    """Stages that this process has logged or recognised."""
    seen_flops: set[float] = field(default_factory=set)
    """Exact compute of the stages that an earlier process logged: it identifies them."""


class RunTracker:
    """The rules of :class:`Tracker` over any :class:`RunStore`."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._study: str | None = None
        self._study_run = ""
        self._trials: dict[str, _Trial] = {}

    def run_id(self, trial: str | None = None) -> str:
        """Id of the run of a trial, or of the study itself.

        Raises:
            RuntimeError: If it is not open.
        """
        self._require_study()
        return self._study_run if trial is None else self._require_trial(trial).run_id

    def open_study(self, name: str, *, job: dict[str, Any], job_text: str) -> None:
        """See :meth:`Tracker.open_study`."""
        found = self._store.study(name)
        if found is None:
            tags = {"growth.kind": "study", "growth.study": name}
            self._study_run = self._store.create(name, tags=tags)
        else:
            self._study_run = found.run_id
            if found.status != "RUNNING":
                self._store.set_status(found.run_id, "RUNNING")
        if found is None or not found.params:
            self._store.log_params(self._study_run, flat_params(job) | {"job_hash": short_hash(job)})
        self._store.log_text(self._study_run, job_text, "job.yaml")
        self._study, self._trials = name, {}

    def open_trial(
        self,
        trial: str,
        *,
        schedule: dict[str, Any],
        seed: int,
        storage: str | None = None,
        drawn: dict[str, Any] | None = None,
    ) -> None:
        """See :meth:`Tracker.open_trial`."""
        study = self._require_study()
        params = flat_params(schedule, name="schedule")
        params |= {"schedule_hash": short_hash(schedule), "seed": str(seed)}
        known = {run.tags.get("growth.trial"): run for run in self._store.children(self._study_run)}
        run = known.get(trial)
        if run is None:
            tags = {"growth.kind": "trial", "growth.trial": trial, "growth.study": study}
            tags |= {_PARENT_TAG: self._study_run} | ({"growth.storage": storage} if storage else {})
            tags |= {DRAWN_TAG: to_json(drawn)} if drawn else {}
            run_id, stored = self._store.create(trial, tags=tags), None
            state = _Trial(run_id=run_id)
        else:
            stored = run.params
            state = self._resumed(run)
        if not stored:
            self._store.log_text(state.run_id, to_json({"schedule": schedule, "seed": seed}), SCHEDULE)
            self._store.log_params(state.run_id, params)
        elif any(stored.get(key) != params[key] for key in ("schedule_hash", "seed")):
            raise RuntimeError(
                f"trial {trial} of study {study} is in the tracker with another schedule or seed "
                f"(run {state.run_id}): resume with the job that started it, or use another study name"
            )
        self._trials[trial] = state

    def log_stage(self, record: StageRecord) -> None:
        """See :meth:`Tracker.log_stage`."""
        state = self._require_trial(record.trial)
        if record.stage in state.stages or float(record.flops_total) in state.seen_flops:
            state.stages.add(record.stage)
            return
        where = f"stage {record.stage} of trial {record.trial}"
        if state.is_closed:
            raise RuntimeError(f"{where} is new, but the trial is closed: it takes no more numbers")
        if record.stage < max(state.stages, default=-1) or record.flops_total < max(state.seen_flops, default=0.0):
            raise RuntimeError(f"{where} comes after a later stage: log stages in order")
        # The file first: where the metrics are, the file is.
        self._store.log_text(state.run_id, to_json(record.to_dict()), f"{STAGES}/{record.stage:04d}.json")
        step = compute_step(record.flops_total, state.last_step)
        self._store.log_metrics(state.run_id, _finite(record.metrics()), step=step)
        state.last_step = step
        state.stages.add(record.stage)

    def close_trial(self, record: TrialRecord) -> None:
        """See :meth:`Tracker.close_trial`."""
        state, final = self._require_trial(record.trial), record.final
        if final is None:
            raise ValueError(f"trial {record.trial} has no end: close it with a final record, or interrupt the study")
        for stage in record.stages:
            self.log_stage(stage)
        if state.is_closed:
            return
        missing = {k: v for k, v in final.metrics().items() if not self._store.history(state.run_id, k)}
        if missing:
            self._store.log_metrics(
                state.run_id, missing, step=max(compute_step(final.flops_total, -1), state.last_step)
            )
        self._store.log_text(state.run_id, to_json(record.to_dict()), EVENTS)
        if any(stage.certificates for stage in record.stages):
            from growth_service.tracking.figures import draw_sites, site_series

            title = f"{record.trial}: what a new block or new units could gain"
            self._store.log_figure(state.run_id, draw_sites(site_series(record), title=title), "growth/sites.png")
        verdict = record.stages[-1].verdict if record.stages else None
        tags = {"growth.cause": final.cause, "growth.reason": final.reason[:MAX_REASON]}
        self._store.set_tags(state.run_id, tags | ({"growth.verdict": verdict} if verdict else {}))
        self._store.set_status(state.run_id, "FAILED" if final.cause == "failed" else "FINISHED")
        state.is_closed = True

    def close_study(self, trials: Sequence[TrialRecord], *, summary: dict[str, Any], ok: bool) -> None:
        """See :meth:`Tracker.close_study`."""
        self._require_study()
        for record in trials:
            if record.final is not None and record.trial in self._trials:
                self.close_trial(record)
        self._kill_running()
        if any(record.stages for record in trials):
            from growth_service.tracking.figures import draw_frontier, frontier_points

            self._store.log_figure(self._study_run, draw_frontier(frontier_points(list(trials))), "frontier.png")
        self._store.log_text(self._study_run, to_json(summary), "result.json")
        self._log_study_metrics(trials)
        self._store.set_status(self._study_run, "FINISHED" if ok else "FAILED")
        self._study = None

    def interrupt_study(self, reason: str) -> None:
        """See :meth:`Tracker.interrupt_study`."""
        if self._study is None:
            return
        self._kill_running()
        self._store.set_tags(self._study_run, {"growth.reason": reason[:MAX_REASON]})
        self._store.set_status(self._study_run, "KILLED")
        self._study = None

    def _resumed(self, run: StoredRun) -> _Trial:
        """Take up a run where an earlier process, or this one, left it."""
        if run.status in ("KILLED", "FAILED"):
            self._store.set_status(run.run_id, "RUNNING")
        history = self._store.history(run.run_id, "compute/flops_total")
        return _Trial(
            run_id=run.run_id,
            is_closed=run.status == "FINISHED",
            last_step=max((step for step, _ in history), default=-1),
            seen_flops={value for _, value in history},
        )

    def _log_study_metrics(self, trials: Sequence[TrialRecord]) -> None:
        """Compute of the whole study and its best loss, so that the parent's row is not empty."""
        finals = [record.final for record in trials if record.final is not None]
        total = sum(final.flops_total for final in finals)
        finite = [final for final in finals if math.isfinite(final.loss_val)]
        history = self._store.history(self._study_run, "compute/flops_total")
        if not finals or any(value == float(total) for _, value in history):
            return
        metrics = {"compute/flops_total": float(total)}
        if finite:
            best = min(finite, key=lambda final: final.loss_val)
            metrics |= {"loss/val_nats": best.loss_val, "accuracy/val": best.accuracy_val}
            self._store.set_tags(self._study_run, {"growth.best": best.trial})
        last = max((step for step, _ in history), default=-1)
        self._store.log_metrics(self._study_run, _finite(metrics), step=compute_step(total, last))

    def _kill_running(self) -> None:
        for run in self._store.children(self._study_run):
            if run.status == "RUNNING":
                self._store.set_status(run.run_id, "KILLED")

    def _require_study(self) -> str:
        if self._study is None:
            raise RuntimeError("no study is open: call open_study first")
        return self._study

    def _require_trial(self, trial: str) -> _Trial:
        study = self._require_study()
        if trial not in self._trials:
            raise RuntimeError(f"trial {trial} of study {study} is unknown: call open_trial first")
        return self._trials[trial]


def short_hash(data: Mapping[str, Any]) -> str:
    """12 hex digits of sha256 over plain JSON data; equal for equal data, whatever its key order."""
    text = json.dumps(json.loads(to_json(data)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def flat_params(data: Mapping[str, Any], *, name: str = "name") -> dict[str, str]:
    """The small values of nested plain JSON data as params.

    Keys of nested dicts are joined by dots; lists are written as JSON (``[2,2,2]``). None, empty
    values, and values of more than 500 characters are left out, as is what comes after the first
    90 params: the artifact holds everything.

    Args:
        data: For example a growth schedule.
        name: What the key ``name`` at the top is called in the params.
    """
    out: dict[str, str] = {}

    def put(key: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for inner, item in value.items():
                put(f"{key}.{inner}", item)
            return
        text = value if isinstance(value, str) else json.dumps(json.loads(to_json(value)), separators=(",", ":"))
        if value is not None and 0 < len(text) <= _MAX_PARAM and len(out) < _MAX_PARAMS:
            out[re.sub(r"[^\w\-. :/]", "_", key)] = text

    for key, value in data.items():
        put(name if key == "name" else key, value)
    return out


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Infinite values as NaN: MLflow would store 1.8e308 and flatten every chart."""
    return {key: value if math.isfinite(value) else math.nan for key, value in metrics.items()}
