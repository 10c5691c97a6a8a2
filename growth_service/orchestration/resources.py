"""Whether a job fits, before anything starts. Knows neither torch nor Ray."""

from growth_service.core.budget import Budget
from growth_service.errors import ResourceError, UserError
from growth_service.spec import JobSpec


def check_resources(job: JobSpec, *, cpus: float) -> None:
    """Refuse a job that could never run, before anything starts.

    Raises:
        ResourceError: If one trial needs more CPUs than there are; says the numbers.
    """
    needed = job.resources.workers * job.resources.cpus_per_worker
    if needed > cpus:
        raise ResourceError(
            f"a trial needs {needed} CPUs (resources.workers {job.resources.workers} x cpus_per_worker "
            f"{job.resources.cpus_per_worker}), but there are {cpus:g}: use fewer workers"
        )


def concurrent(job: JobSpec, *, cpus: float) -> int:
    """Trials at once: what was asked for, as far as it fits; more would wait for each other for ever."""
    needed = job.resources.workers * job.resources.cpus_per_worker
    return max(1, min(job.search.concurrent_trials, int(cpus // needed)))


def num_trials(job: JobSpec) -> int:
    """Listed and suggested, up to the most that may run."""
    suggested = job.search.suggest.trials if job.search.suggest else 0
    found = len(job.search.schedules) * job.search.repeats + suggested
    return min(found, job.budget.trials or found)


def study_budget(job: JobSpec) -> Budget:
    """The study's account.

    Raises:
        UserError: If it cannot pay for a single trial.
    """
    trial = int(job.budget.trial)
    total = int(job.budget.study) if job.budget.study is not None else trial * num_trials(job)
    if total < trial:
        raise UserError(
            f"budget.study {total:.3g} FLOPs is less than budget.trial {trial:.3g}: not one trial could run"
        )
    return Budget(total_flops=total)
