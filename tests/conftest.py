"""Settings of all tests: one thread for linear algebra, and how hard hypothesis looks."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy loads: equal bits and fair times on shared cores

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
