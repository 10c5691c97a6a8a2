"""Runs a study on the Ray that is there: the only place that starts a Tuner."""

import time
import uuid
from contextlib import suppress
from typing import Any

import ray
from ray import tune

from growth_service.core.decisions import decision_to_dict
from growth_service.core.records import StageRecord, TrialRecord
from growth_service.core.referee import Verdict
from growth_service.errors import ResourceError, WorkFailedError
from growth_service.orchestration import live, plan, resources, sampling, storage
from growth_service.orchestration.exchange import make_exchange
from growth_service.orchestration.following import follow_trial
from growth_service.orchestration.lanes import Lanes, last_line
from growth_service.orchestration.profile import profile_of
from growth_service.orchestration.result import StudyResult
from growth_service.orchestration.runtime import DRIVER_MEMORY_BYTES
from growth_service.orchestration.scheduler import FailureListener, SaturationScheduler
from growth_service.orchestration.searcher import StudySearcher, WaveSuggester
from growth_service.orchestration.storage import StudyFolder
from growth_service.spec import JobSpec
from growth_service.tracking.base import Tracker
from growth_service.training.datasets import prepare_for
from growth_service.training.ranks import one_thread

FOLLOWER_RESTARTS = 3
"""How often Tune may start the process again that passes a trial's records on; the trial itself goes on meanwhile."""


class _Watch:
    """Passes events on, sees to it that there are lanes, and notes when the first training step was taken."""

    def __init__(self, observer: live.Observer, lanes: Lanes) -> None:
        self._observer, self._lanes = observer, lanes
        self._started = 0
        self.first_step: float | None = None

    def trial_started(self, trial: str) -> None:
        self._started += 1
        self._lanes.want(self._started)
        self._observer.trial_started(trial)

    def stage_done(self, record: StageRecord) -> None:
        if self.first_step is None:
            self.first_step = time.monotonic() - record.stage_s
        self._observer.stage_done(record)

    def trial_done(self, record: TrialRecord) -> None:
        self._observer.trial_done(record)


def prepare_study(job: JobSpec, folder: StudyFolder) -> dict[str, Any]:
    """Data and sizes of a study, checked: all that can be wrong is wrong here, before Ray starts.

    Returns:
        The description of the prepared data set.
    """
    one_thread()  # also this process shares the cores with its trials
    data = prepare_for(job, folder.data)
    trials = plan.planned_trials(job)
    sampling.rehearse_space(job)
    plan.check_networks(job, trials, data)
    plan.check_budgets(job, trials, data, folder=folder.path)
    return data


def run_study(
    job: JobSpec,
    *,
    folder: StudyFolder,
    data: dict[str, Any],
    tracker: Tracker,
    observer: live.Observer,
    job_text: str,
    resumed: bool,
) -> StudyResult:
    """Run, or go on with, a study; Ray must be up.

    Args:
        job: The job.
        folder: Its study's folder, from :func:`storage.open_study`.
        data: From :func:`prepare_study`.
        tracker: Written by this process alone.
        observer: Told what happens.
        job_text: The job file as written, for the record.
        resumed: True when an earlier process left the study unfinished.

    Raises:
        ResourceError: If a trial can never fit, or Ray runs without its dashboard.
    """
    started, started_at = time.monotonic(), time.time()
    cpus = float(ray.cluster_resources().get("CPU", 0))
    resources.check_resources(job, cpus=cpus)
    _check_dashboard()
    at_once = resources.concurrent(job, cpus=cpus)
    study_id = f"{folder.name}-{uuid.uuid4().hex[:8]}"
    before_s = folder.state().get("ran_s", 0.0)
    folder.write_state(attempt=folder.state()["attempt"] + 1)
    exchange = make_exchange(study_id, restarts=job.resources.max_worker_restarts)
    lanes = Lanes(
        study_id,
        exchange,
        most=at_once,
        deaths=(job.resources.max_worker_restarts + 1) * resources.num_trials(job),
        resources=job.resources,
        storage=folder.path / "train",
    )
    watch = _Watch(observer, lanes)

    def post(verdict: Verdict) -> None:
        exchange.post.remote(verdict.trial, verdict.stage, decision_to_dict(verdict.decision))

    study = live.LiveStudy(
        job,
        folder=folder,
        data=data,
        listed=plan.planned_trials(job),
        suggester=_suggester(job, folder),
        budget=resources.study_budget(job),
        wave_size=job.search.concurrent_trials,
        tracker=tracker,
        observer=watch,
        post=post,
        abandon=lambda trial: exchange.abandon.remote(trial),
        gone=lanes.gone,
        exchange=study_id,
        ran_s=lambda: before_s + time.monotonic() - started,
    )
    live.register(study_id, study)
    tracker.open_study(folder.name, job=job.model_dump(mode="json"), job_text=job_text)
    if not resumed:  # of a resumed one, all trials may be over
        lanes.want(resources.num_trials(job))  # their workers start while Tune does
    try:
        study.explain_failures(_fit(study_id, folder, at_once=at_once))
        if study.interrupted is not None:
            raise WorkFailedError(f"the study was interrupted: {study.interrupted}; go on with --resume")
        profile = profile_of(lanes.close(), study.heard_stages, started=started_at, ended=time.time(), lanes=len(lanes))
    except BaseException as error:
        with suppress(Exception):  # the study's own error is the one to see
            tracker.interrupt_study(f"{type(error).__name__}: the driver ended; go on with --resume")
        with suppress(Exception):
            folder.write_state(ran_s=before_s + time.monotonic() - started)
        lanes.abort()
        raise
    finally:
        live.forget(study_id)
        with suppress(ray.exceptions.RayError):
            ray.kill(exchange)
    ended = time.monotonic()
    trials = [study.done[name] for name in sorted(study.done, key=lambda n: study.planned[n].index)]
    first = max(watch.first_step or ended, started)
    result = StudyResult(
        name=folder.name,
        folder=str(folder.path),
        trials=trials,
        budget=study.budget,
        decisions=study.decisions,
        phases_s={"to the first training step": first - started, "trials": ended - first},
        profile=profile,
        not_started=study.not_started,
        resumed=resumed,
    )
    tracker.close_study(trials, summary=_summary(result), ok=not result.failed)
    storage.write_json(folder.path / "result.json", result.to_dict())
    folder.write_state(status="finished", ran_s=before_s + time.monotonic() - started)
    return result


def _suggester(job: JobSpec, folder: StudyFolder) -> WaveSuggester | None:
    """The sampler of a job, if it has one, with what is known from earlier studies."""
    suggest = job.search.suggest
    if suggest is None:
        return None
    known = sampling.known_points(suggest, folder.known_points() or [])
    return WaveSuggester(job, wave_size=job.search.concurrent_trials, known=known)


def _fit(study_id: str, folder: StudyFolder, *, at_once: int) -> dict[str, str]:
    """Run all trials; returns the causes of those whose work failed."""
    tuner = tune.Tuner(
        tune.with_resources(follow_trial, {"memory": DRIVER_MEMORY_BYTES}),
        tune_config=tune.TuneConfig(
            search_alg=StudySearcher(study_id),
            scheduler=SaturationScheduler(study_id),
            num_samples=-1,
            max_concurrent_trials=at_once,
            reuse_actors=True,
            trial_name_creator=lambda trial: str(trial.trial_id),
            trial_dirname_creator=lambda trial: str(trial.trial_id),
        ),
        run_config=tune.RunConfig(
            name=study_id,
            storage_path=str((folder.path / "tune").resolve()),
            callbacks=[FailureListener(study_id)],
            failure_config=tune.FailureConfig(max_failures=FOLLOWER_RESTARTS),
            verbose=0,
        ),
    )
    results = tuner.fit()
    return {r.config["trial"]["trial"]: last_line(r.error) for r in results if r.error is not None and r.config}


def _check_dashboard() -> None:
    """Without its dashboard Ray never frees the resources of a trial that is killed."""
    if not ray.worker.global_worker.node.address_info.get("webui_url"):
        raise ResourceError(
            "Ray runs without its dashboard, so that a killed trial would block the next one for ever: start Ray with "
            "include_dashboard=True (ray start --include-dashboard=true), and install ray[default]"
        )


def _summary(result: StudyResult) -> dict[str, Any]:
    preference = result.preference
    return {
        "frontier": [o._asdict() for o in result.frontier],
        "prefer": preference._asdict() if preference else None,
        "budget": result.budget.to_dict(),
        "saved_flops": result.saved_flops,
        "decisions": result.decisions,
    }
