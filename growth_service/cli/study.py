"""``growth run``, and :func:`run_job` for Python."""

import logging
import os
import shutil
import signal
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.text import Text

from cluster.embedded import embedded_ray
from dashboards.live import LiveView
from dashboards.terminal import profile_table, study_summary
from growth_service.cli.console import emit_json, err, out
from growth_service.core.records import StageRecord, TrialRecord
from growth_service.core.units import format_flops, format_seconds
from growth_service.errors import UserError
from growth_service.orchestration import resources, storage
from growth_service.spec import JobSpec, load_job
from search_spaces import listed_schedules, space

if TYPE_CHECKING:
    from growth_service.orchestration.result import StudyResult


logger = logging.getLogger(__name__)


class _Silent:
    """Observer that says nothing."""

    def trial_started(self, trial: str) -> None:
        """Nothing."""

    def stage_done(self, record: StageRecord) -> None:
        """Nothing."""

    def trial_done(self, record: TrialRecord) -> None:
        """Nothing."""


def run_job(job: JobSpec, *, resume: bool = False, observer: Any = None, job_text: str | None = None) -> "StudyResult":
    """Run a study on this machine (or on the Ray that this process is connected to).

    Args:
        job: From :func:`growth_service.load_job`.
        resume: Go on with the unfinished study of this job.
        observer: Told what happens; see ``orchestration.live.Observer``.
        job_text: The job file as written, kept with the records; None: the resolved job.

    Returns:
        Trials, frontier, the schedule to prefer. Also in MLflow and in the study's folder.

    Raises:
        UserError: If the job cannot run as asked; nothing was started.
    """
    started = time.monotonic()
    check_light(job)
    folder = storage.open_study(job, resume=resume)
    with folder.locked():
        try:
            return _run_in(folder, job, started=started, resume=resume, observer=observer, job_text=job_text)
        except BaseException:
            if not resume and not any(folder.trials.iterdir()):
                shutil.rmtree(folder.path, ignore_errors=True)  # nothing has run: leave nothing behind
            raise


def _run_in(
    folder: storage.StudyFolder, job: JobSpec, *, started: float, resume: bool, observer: Any, job_text: str | None
) -> "StudyResult":
    from growth_service.tracking.mlflow_client import check_reachable
    from growth_service.training.datasets import prepare_for

    check_reachable(tracking_uri(job))
    prepare_for(job, folder.data)  # before torch and Ray are loaded: data that is missing is said at once
    from growth_service.orchestration import controller
    from growth_service.tracking.mlflow_writer import MlflowTracker

    data = controller.prepare_study(job, folder)
    uri = tracking_uri(job)
    _learn_from_earlier(job, folder, uri)
    try:
        tracker = MlflowTracker(uri, job.mlflow.experiment)
    except OSError as error:
        raise UserError(f"MLflow's store {uri} cannot be opened ({error}): change mlflow.tracking_uri") from error
    prepared = time.monotonic()
    with embedded_ray():
        ray_up = time.monotonic()
        result = controller.run_study(
            job,
            folder=folder,
            data=data,
            tracker=tracker,
            observer=observer or _Silent(),
            job_text=job_text or job.model_dump_json(indent=1),
            resumed=resume,
        )
        ended = time.monotonic()
        result.machine["cpu_s"] = tree_cpu_seconds()
    before = {"check and data": prepared - started, "start Ray": ray_up - prepared}
    after = {"wrap up": ended - ray_up - sum(result.phases_s.values()), "stop Ray": time.monotonic() - ended}
    result.phases_s.update(before | result.phases_s | after)
    return result


def _learn_from_earlier(job: JobSpec, folder: storage.StudyFolder, uri: str) -> None:
    """Keep what the studies that a job names to start from have found, once.

    Raises:
        UserError: If there is no such study, or nothing that it found fits the job's space.
    """
    from growth_service.orchestration import sampling
    from growth_service.tracking.mlflow_reader import read_points

    suggest = job.search.suggest
    if suggest is None or not suggest.warm_start or folder.known_points() is not None:
        return
    points = [point.to_dict() for name in suggest.warm_start for point in read_points(uri, study=name)]
    usable = sampling.fitting(suggest, sampling.known_points(suggest, points))
    names = ", ".join(suggest.warm_start)
    if not usable:
        raise UserError(
            f"search.suggest.warm_start: of {len(points)} suggestions in {names} none fits the space "
            f"{suggest.space}: name studies that searched the same space"
        )
    logger.info("The sampler starts from %d of %d suggestions in %s", len(usable), len(points), names)
    folder.keep_known_points(points)


def check_light(job: JobSpec) -> None:
    """All that can be wrong about a job without loading torch, Ray or data.

    Raises:
        UserError: What, which, allowed.
    """
    listed_schedules(job)
    if job.search.suggest is not None:
        space(job.search.suggest.space)
    resources.check_resources(job, cpus=float(os.cpu_count() or 1))
    resources.study_budget(job)  # refuses one that could not pay for a single trial


def tracking_uri(job: JobSpec) -> str:
    """The job's MLflow store: as given, else a file in its storage."""
    return job.mlflow.tracking_uri or default_uri(Path(job.storage))


def default_uri(root: Path) -> str:
    """MLflow's sqlite file in a storage folder."""
    return f"sqlite:///{(root.expanduser() / 'mlflow.db').resolve()}"


def run_command(path: Path, *, overrides: list[str], resume: bool, as_json: bool, profile: bool) -> int:
    """``growth run``: live view on stderr, summary (or JSON) on stdout; returns the exit code."""
    started = time.monotonic()
    _stop_on_signals()
    job = load_job(path, overrides=overrides)
    console = err()
    view = LiveView(console, budget_flops=job.budget.trial, num_stages=job.search.num_stages)
    with view if not as_json else nullcontext():
        result = run_job(
            job, resume=resume, observer=None if as_json else view, job_text=path.read_text(encoding="utf-8")
        )
    if as_json:
        emit_json(result.to_dict())
    elif not result.trials:
        console.print("no trial could start within the limits of the study", style="yellow")
    else:
        out().print(study_summary(result.trials, result.frontier, result.preference))
        if result.saved_flops:
            _print_saved(console, result)
        _print_phases(console, result.phases_s, wall_s=time.monotonic() - started, cpu_s=result.machine["cpu_s"])
        if profile:
            console.print(profile_table(result.profile))
        _print_next(out(), job, result)
    if result.not_started:
        console.print(f"{result.not_started} trials were not started: the study's limits are reached", style="yellow")
    for trial in result.failed:
        reason = trial.final.reason if trial.final else "unfinished"
        console.print(f"trial {trial.trial} failed: {reason}", style="red", soft_wrap=True)
    return 1 if result.failed or not result.trials else 0


def _print_saved(console: Console, result: "StudyResult") -> None:
    stages = [stage for trial in result.trials for stage in trial.stages]
    total = sum(trial.final.flops_total for trial in result.trials if trial.final is not None)
    console.print(
        f"Shared: {sum(s.reused for s in stages)} of {len(stages)} stages were taken from trials that began alike, "
        f"{format_flops(result.saved_flops)} of {format_flops(total)} were not spent again",
        soft_wrap=True,
    )


def _stop_on_signals() -> None:
    """Let Ctrl+C and SIGTERM end the study in order, also where a parent shell had SIGINT ignored."""

    def interrupt(_signum: int, _frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def _print_phases(console: Console, phases_s: dict[str, float], *, wall_s: float, cpu_s: float) -> None:
    listed = ", ".join(f"{name} {format_seconds(s)}" for name, s in phases_s.items())
    console.print(f"Time: {format_seconds(wall_s)} ({listed})", soft_wrap=True)
    load, cores = os.getloadavg()[0], os.cpu_count()
    console.print(f"Machine: {cpu_s:.0f} CPU-seconds in all processes of the study; load {load:.1f} on {cores} cores")


def tree_cpu_seconds() -> float:
    """CPU seconds of this process and all below it, ended ones included where their parent lives."""
    total = 0.0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _print_next(console: Console, job: JobSpec, result: "StudyResult") -> None:
    root = job.storage
    at = "" if root == "growth-runs" else f" --storage {root}"
    if job.mlflow.tracking_uri is not None:
        at += f" --tracking-uri {job.mlflow.tracking_uri}"
    guided = next((t.trial for t in result.trials if any(r.verdict for r in t.stages)), result.trials[0].trial)
    console.print(Text("\nLook further:", style="bold"))
    for command, what in (
        (f"growth compare {result.name}{at}", "this table again, from MLflow"),
        (f"growth probe {result.name}/{guided}{at} --plot sites.png", "certificates of that network, and a picture"),
        (f"mlflow ui --backend-store-uri {tracking_uri(job)}", "curves of loss against compute, events, certificates"),
    ):
        console.print(f"  {command}", style="cyan", soft_wrap=True, end="")
        console.print(f"   # {what}", style="dim", soft_wrap=True)
