"""An embedded Ray: started for one study, ended with it, reachable from this machine only."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import ray

from growth_service.orchestration.runtime import worker_environment

OBJECT_STORE_BYTES = 200 * 2**20
"""Records are small; the data set is read from the study's folder."""


@contextmanager
def embedded_ray(*, num_cpus: int | None = None) -> Iterator[None]:
    """A local Ray with dashboard on loopback; a Ray that is up in this process is used as it is.

    Args:
        num_cpus: CPUs to schedule on; None: all of this machine.
    """
    if ray.is_initialized():
        yield
        return
    environment = worker_environment()
    os.environ.update(environment)
    os.environ.pop("RAY_ADDRESS", None)
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=_free_port(),
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="error",
        configure_logging=True,
        runtime_env={"env_vars": environment},
    )
    try:
        with redirect_stdout(sys.stderr):  # Ray prints its remarks on standard output
            yield
    finally:
        ray.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
