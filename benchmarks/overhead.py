"""What running on Ray costs beside training: `growth run` as users start it, from its start to its end.

    python -m benchmarks.overhead [--trials 8] [--stages 3] [--seconds 20]       # about five minutes on two cores

One-worker trials of unequal schedules on digits, two at once, in stages of about so many seconds. Prints the share of
the two lanes' time that was not training, the time to the first training step, and where the rest went.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

LANES = 2
RATE = 2.6e10
"""FLOPs a second of this network on one thread: only sets how long a stage takes."""


def job(storage: Path, *, trials: int, stages: int, seconds: float) -> dict[str, object]:
    """Scratch, and one late block, with other initial weights each, so that nothing is shared."""
    size = {"blocks": [1, 1], "hidden": [16, 16]}
    schedules = [{"use": "scratch", "name": "scratch"} | size, {"use": "one_shot_late", "name": "late"} | size]
    return {
        "version": 1,
        "name": "overhead",
        "data": {"name": "digits"},
        "model": {"family": "resnet", "widths": [16, 32]},
        "training": {"learning_rate": 0.006, "shards": 1, "rates": "wsd"},
        "budget": {"trial": RATE * seconds * stages},
        "search": {"stages": stages, "repeats": trials // 2, "concurrent_trials": LANES, "schedules": schedules},
        "scheduler": {"rule": "none"},
        "cache": {"enabled": False},
        "storage": str(storage),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a stage, about")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="growth-overhead-") as folder:
        file = Path(folder) / "job.yaml"
        size = {"trials": options.trials, "stages": options.stages, "seconds": options.seconds}
        file.write_text(yaml.safe_dump(job(Path(folder) / "runs", **size)), encoding="utf-8")
        started = time.monotonic()
        command = [sys.executable, "-m", "growth_service", "run", str(file), "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        wall_s = time.monotonic() - started
    result = json.loads(done.stdout)
    stages = [stage for trial in result["trials"] for stage in trial["stages"]]
    training_s = sum(s["stage_s"] - s["overhead_s"] for s in stages)
    first = sum(result["phases_s"][p] for p in ("check and data", "start Ray", "to the first training step"))
    print(f"{len(stages)} stages of {training_s / len(stages):.1f} s of training; wall {wall_s:.0f} s")
    print(f"not training: {1 - training_s / (LANES * wall_s):.1%} of {LANES} lanes; first training step {first:.0f} s")
    print("| time of lanes | seconds | share |\n|---|---|---|")
    for part in result["profile"]:
        print(f"| {part['what']} | {part['seconds']:.1f} | {part['share']:.1%} |")
    print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in result["phases_s"].items()))


if __name__ == "__main__":
    main()
