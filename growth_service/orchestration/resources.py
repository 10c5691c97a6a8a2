"""Whether a job fits, before anything starts. Knows neither torch nor Ray."""

from growth_service.errors import ResourceError
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
