"""What sharing the beginnings of trials saves: twelve schedules on digits, with the stage cache and without.

    python -m benchmarks.sharing [--budget '480 GFLOP']           # about two minutes on two cores; starts Ray

Prints compute and wall time of both studies, and whether their records are equal.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from growth_service.cli.study import run_job
from growth_service.core.records import TrialRecord
from growth_service.orchestration.result import StudyResult
from growth_service.spec import parse_job

SIZE = {"blocks": [1, 1], "hidden": [16, 16]}
STEPS = {"deeper": "depth*2", "wider": "width*1.5", "units": "width@groups.1.blocks.0.branch+8",
         "block": "depth@groups.1.blocks.0"}  # fmt: skip


def job(storage: Path, *, cached: bool, budget: str) -> dict[str, Any]:
    """Four steps, each after the second, third or fourth of five stages."""
    schedules = [
        {"use": "fixed", "name": f"{name}-{after}", "steps": {after: words}, **SIZE}
        for name, words in STEPS.items()
        for after in (1, 2, 3)
    ]
    return {
        "version": 1,
        "name": "sharing",
        "data": {"name": "digits"},
        "model": {"family": "resnet", "widths": [16, 32]},
        "training": {"learning_rate": 0.006, "shards": 1},
        "budget": {"trial": budget},
        "search": {"stages": 5, "concurrent_trials": 2, "schedules": schedules},
        "scheduler": {"rule": "none"},
        "cache": {"enabled": cached},
        "storage": str(storage),
    }


def run(*, cached: bool, budget: str) -> tuple[StudyResult, float]:
    """One study in a folder of its own; its result and wall seconds."""
    with tempfile.TemporaryDirectory(prefix="growth-sharing-") as folder:
        started = time.monotonic()
        result = run_job(parse_job(job(Path(folder), cached=cached, budget=budget), source="benchmark"))
        return result, time.monotonic() - started


def records(trial: TrialRecord) -> list[dict[str, Any]]:
    """What has to be equal."""
    assert trial.final is not None
    return [*(s.comparable() for s in trial.stages), trial.final.comparable()]


def main() -> None:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="120 GFLOP", help="of a trial")
    budget = parser.parse_args().budget
    shared, with_s = run(cached=True, budget=budget)
    alone, without_s = run(cached=False, budget=budget)
    equal = [records(a) == records(b) for a, b in zip(shared.trials, alone.trials, strict=True)]
    spent = shared.budget.spent_flops / alone.budget.spent_flops
    print(f"compute with / without: {spent:.3f} ({shared.budget.spent_flops:.4g} / {alone.budget.spent_flops:.4g})")
    print(f"wall time with / without: {with_s / without_s:.3f} ({with_s:.0f} s / {without_s:.0f} s)")
    print(f"equal records: {sum(equal)} of {len(equal)} trials")


if __name__ == "__main__":
    main()
