"""Settings of all tests: one thread for linear algebra, how hard hypothesis looks, the one Ray session."""

import os
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy loads: equal bits and fair times on shared cores

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("desk", max_examples=25, deadline=None)
settings.register_profile(
    "ci",
    max_examples=200,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # shared cores stall now and then
)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "desk")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray of two CPUs for all tests that need it (about 10 s to start)."""
    from cluster.embedded import embedded_ray

    with embedded_ray(num_cpus=2):
        yield
