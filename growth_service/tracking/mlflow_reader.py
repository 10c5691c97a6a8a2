"""Reading studies and runs back from MLflow, as the records that were written."""

import json
import math
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from growth_service.core.records import StageRecord, TrialRecord
from growth_service.core.units import format_flops
from growth_service.errors import UserError
from growth_service.tracking.base import DRAWN_TAG, EVENTS, SCHEDULE, STAGES
from growth_service.tracking.jsontext import from_json
from growth_service.tracking.mlflow_client import first_line, open_client, search_all, sqlite_path

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Run
    from mlflow.tracking import MlflowClient

_NUM_NAMED = 20
_ENDED = ("FINISHED", "FAILED")


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRecords:
    """One study as it stands in MLflow."""

    study: str
    experiment: str
    run_id: str
    """Of the parent run."""
    status: str
    """RUNNING, FINISHED, FAILED or KILLED."""
    trials: list[TrialRecord] = field(default_factory=list)
    """Trials that have ended, failed ones included, in the order they were started."""
    unfinished: list[TrialRecord] = field(default_factory=list)
    """The stages so far of trials that run or were killed; ``final`` is None."""
    drawn: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What a sampler drew, by trial."""
    left_out: list[str] = field(default_factory=list)
    """One line for each trial that is not in ``trials``: which, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierPoint:
    """What a sampler drew once, and what came of it."""

    trial: str
    drawn: dict[str, Any]
    """``{"params": plain values by the name under which they were drawn, "arguments": the schedule entry}``."""
    loss: float
    """Validation loss at the end, in nats."""
    flops: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRun:
    """One trial's run."""

    run_id: str
    trial: str
    study: str
    experiment: str
    status: str
    storage: str | None
    """Folder of the trial's checkpoints; None where it was not recorded."""


def read_study(tracking_uri: str, *, experiment: str | None = None, study: str | None = None) -> StudyRecords:
    """Read the trials of one study.

    Args:
        tracking_uri: ``sqlite:///PATH`` or the address of a tracking server.
        experiment: Where to look; None: in all experiments.
        study: Name; None: the study that was started last.

    Raises:
        UserError: If store, experiment or study do not exist; the message names what does.
    """
    client, experiments = _open(tracking_uri)
    names = {e.experiment_id: e.name for e in experiments}
    if experiment is not None:
        if experiment not in names.values():
            there = _listed(names.values())
            raise UserError(f"no experiment {experiment!r} in {tracking_uri}: there is {there}")
        names = {i: name for i, name in names.items() if name == experiment}
    where = f"experiment {experiment!r} of {tracking_uri}" if experiment else tracking_uri
    found = search_all(client, list(names), "tags.`growth.kind` = 'study'")
    if not found:
        raise UserError(f"no growth study in {where}: start one with 'growth run JOB.yaml'")
    wanted = [run for run in found if study is None or run.data.tags.get("growth.study") == study]
    if not wanted:
        there = _listed(run.data.tags.get("growth.study", "") for run in reversed(found))
        raise UserError(f"no study {study!r} in {where}: there is {there}")
    parent = wanted[-1]
    out = StudyRecords(
        study=parent.data.tags.get("growth.study", ""),
        experiment=names[parent.info.experiment_id],
        run_id=parent.info.run_id,
        status=parent.info.status,
    )
    below = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    for run in search_all(client, [parent.info.experiment_id], below):
        _add_trial(out, client, run)
    return out


def read_points(tracking_uri: str, *, study: str) -> list[EarlierPoint]:
    """The suggested trials of a study that ended well, in the order in which they were started.

    Raises:
        UserError: If store or study do not exist.
    """
    found = read_study(tracking_uri, study=study)
    points = []
    for trial in found.trials:
        drawn, final = found.drawn.get(trial.trial), trial.final
        if drawn and final is not None and final.cause != "failed" and math.isfinite(final.loss_val):
            points.append(EarlierPoint(drawn=drawn, loss=final.loss_val, flops=final.flops_total, trial=trial.trial))
    return points


def find_run(tracking_uri: str, run: str) -> FoundRun:
    """Find one trial's run by whatever a person has at hand.

    Args:
        tracking_uri: ``sqlite:///PATH`` or the address of a tracking server.
        run: A run id, a trial name, or ``STUDY/TRIAL``.

    Raises:
        UserError: If there is no such trial, more than one, or the run is a study.
    """
    client, experiments = _open(tracking_uri)
    names = {e.experiment_id: e.name for e in experiments}
    trials = search_all(client, list(names), "tags.`growth.kind` = 'trial'")

    def full(found: "Run") -> str:
        return f"{found.data.tags.get('growth.study', '')}/{found.data.tags.get('growth.trial', '')}"

    hits = [t for t in trials if run in (t.info.run_id, t.data.tags.get("growth.trial"), full(t))]
    if not hits:
        studies = search_all(client, list(names), "tags.`growth.kind` = 'study'")
        if any(run in (s.info.run_id, s.data.tags.get("growth.study")) for s in studies):
            below = _listed(full(t) for t in trials if run in (t.data.tags.get("growth.study"), _parent(t)))
            raise UserError(f"{run!r} is a study: name one of its trials, {below}")
        there = _listed(full(t) for t in reversed(trials))
        raise UserError(f"no run or trial {run!r} in {tracking_uri}: there is {there}")
    if len(hits) > 1:
        there = _listed(f"{full(t)} (run {t.info.run_id})" for t in reversed(hits))
        raise UserError(f"{run!r} names {len(hits)} trials: say STUDY/TRIAL or a run id, one of {there}")
    tags = hits[0].data.tags
    return FoundRun(
        run_id=hits[0].info.run_id,
        trial=tags.get("growth.trial", ""),
        study=tags.get("growth.study", ""),
        experiment=names[hits[0].info.experiment_id],
        status=hits[0].info.status,
        storage=tags.get("growth.storage"),
    )


def _open(tracking_uri: str) -> "tuple[MlflowClient, list[Experiment]]":
    """A client and all experiments; never makes a store."""
    database = sqlite_path(tracking_uri)
    if database is not None and not database.is_file():
        raise UserError(
            f"no MLflow store at {database}: run a study first ('growth run JOB.yaml'), or name another store"
        )
    client = open_client(tracking_uri)
    from mlflow.exceptions import MlflowException

    experiments: list[Experiment] = []
    token: str | None = None
    try:
        while True:
            page = client.search_experiments(page_token=token)
            experiments.extend(page)
            token = page.token
            if not token:
                return client, experiments
    except MlflowException as error:
        raise UserError(f"cannot read the MLflow store at {tracking_uri}: {first_line(error)}") from error


def _add_trial(out: StudyRecords, client: "MlflowClient", run: "Run") -> None:
    """Read one trial into ``out``: ended, unfinished, or only a line why not."""
    trial = run.data.tags.get("growth.trial", run.info.run_name or run.info.run_id)
    if DRAWN_TAG in run.data.tags:
        out.drawn[trial] = from_json(run.data.tags[DRAWN_TAG])
    head = f"{trial} ({run.info.status}, run {run.info.run_id})"
    try:
        if run.info.status in _ENDED:  # else a record is of an earlier attempt, or about to be final
            events = _read_json(client, run, EVENTS)
            if events is not None:
                out.trials.append(TrialRecord.from_dict(events))
                return
        partial = _partial_record(client, run, trial)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        out.left_out.append(f"{head}: its record cannot be read ({type(error).__name__}: {first_line(error)})")
        return
    if partial is None or not partial.stages:
        out.left_out.append(f"{head}: no stage has ended yet")
        return
    out.unfinished.append(partial)
    last = partial.stages[-1]
    out.left_out.append(
        f"{head}: not ended; {len(partial.stages)} stages so far, "
        f"validation loss {last.loss_val:.4g} nats at {format_flops(last.flops_total)}"
    )


def _partial_record(client: "MlflowClient", run: "Run", trial: str) -> TrialRecord | None:
    """What is known of a trial without an end; None where it has not even started."""
    start = _read_json(client, run, SCHEDULE)
    if start is None:
        return None
    paths = sorted(item.path for item in client.list_artifacts(run.info.run_id, STAGES))
    read = [_read_json(client, run, path) for path in paths]
    stages = tuple(StageRecord.from_dict(data) for data in read if data is not None)
    return TrialRecord(trial=trial, schedule=start["schedule"], seed=start["seed"], stages=stages, final=None)


def _read_json(client: "MlflowClient", run: "Run", path: str) -> Any:
    """The data of a JSON artifact, or None where there is no such artifact."""
    folder = str(Path(path).parent)
    if all(item.path != path for item in client.list_artifacts(run.info.run_id, folder)):
        return None
    with tempfile.TemporaryDirectory() as scratch:
        local = client.download_artifacts(run.info.run_id, path, scratch)
        return from_json(Path(local).read_text(encoding="utf-8"))


def _parent(run: "Run") -> str:
    return str(run.data.tags.get("mlflow.parentRunId", ""))


def _listed(names: Any) -> str:
    """Some names for a message, without repeats; says how many more there are."""
    unique = list(dict.fromkeys(str(name) for name in names))
    more = f" and {len(unique) - _NUM_NAMED} more" if len(unique) > _NUM_NAMED else ""
    return (", ".join(unique[:_NUM_NAMED]) or "none") + more
