"""`joint` against the grid of sizes and against other schedules, at equal total compute, one process, no Ray.

    python -m benchmarks.rivals OUT.jsonl --workload docs --width 32 --budget 2e12 --seeds 0 1 2 \
        --blocks 1 2 4 8 --widths 32 --schedules joint

Prints and appends a line a trial: losses on validation and test, compute, what grew, why it ended. Trials that begin
alike share their beginning through the stage cache; the compute that is shown is what each would cost alone.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.workloads import job_data
from growth_service.core.records import FinalRecord, StageRecord
from growth_service.errors import UserError
from growth_service.orchestration import plan
from growth_service.spec import parse_job
from growth_service.training.config import TrialConfig
from growth_service.training.datasets import prepare_for
from growth_service.training.ranks import Ranks, one_thread
from growth_service.training.stage_loop import run_trial

SHARES = (1 / 64, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of the budget: decisions are taken when it has doubled, the last one at its half."""
RIVALS = {
    "never_grow": {"use": "scratch"},
    "depth_only": {"use": "depth_only", "until_share": 0.5},
    "one_shot_late": {"use": "one_shot_late", "at_share": 0.5},
    "stacking": {"use": "stacking", "steps": 2, "until_share": 0.25},
    "random_site": {"use": "random_site", "steps": 2, "until_share": 0.25},
    "plateau": {"use": "plateau"},
    "ag_plateau": {"use": "ag_plateau"},
    "tokens_per_param": {"use": "tokens_per_param"},
    "width_early": {"use": "width_only", "factor": 2.0, "steps": 1, "until_share": 1 / 64},
    "joint": {"use": "joint"},
    "joint-depth": {"use": "joint", "axes": ["depth"]},
}


def entries(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The grid, then the schedules that start from the smallest size."""
    text = options.workload in ("docs", "sources", "shakespeare")
    groups = 2 if options.workload in ("digits", "fashion", "cifar") else 1

    def size(width: int, blocks: int) -> dict[str, Any]:
        widths = [width * 2**g for g in range(groups)]
        return {"blocks": [blocks] * groups, "hidden": [4 * w if text else w for w in widths], "widths": widths}

    grid = [
        {"use": "scratch", "name": f"scratch-w{w}-b{b}"} | size(w, b)
        for w in options.widths
        for b in options.blocks
        if f"{w}x{b}" not in options.skip
    ]
    start = size(options.width, options.start_blocks)
    return grid + [RIVALS[name] | {"name": name} | start for name in options.schedules]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--width", type=int, required=True, help="of the network that grows")
    parser.add_argument("--start-blocks", type=int, default=1)
    parser.add_argument("--budget", type=float, required=True, help="FLOPs of each trial")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--widths", type=int, nargs="*", default=[], help="of the grid")
    parser.add_argument("--blocks", type=int, nargs="*", default=[1], help="of the grid, in each group")
    parser.add_argument("--skip", nargs="*", default=[], help="cells of the grid, as 128x8")
    parser.add_argument("--schedules", nargs="*", default=["joint"], choices=sorted(RIVALS))
    parser.add_argument("--rate", type=float, default=None, help="learning rate; by width if left out")
    options = parser.parse_args()
    one_thread()
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(prefix="growth-rivals-") as scratch:
            _run(options, seed, Path(scratch))


def _run(options: argparse.Namespace, seed: int, scratch: Path) -> None:
    data = job_data(
        options.workload,
        width=options.width,
        budget=options.budget,
        seed=seed,
        stages=list(SHARES),
        storage=str(scratch),
    )
    data["search"] = {"stages": list(SHARES), "schedules": entries(options)}
    if options.rate is not None:
        data["training"] = data["training"] | {"learning_rate": options.rate}
    job = parse_job(data, source=options.workload)
    prepared = prepare_for(job, scratch / "data")
    for trial in plan.planned_trials(job):
        started = time.process_time()
        config = plan.trial_config(job, trial, data=prepared, folder=scratch).to_dict()
        cache = {"folder": str(scratch / "cache"), "limit_bytes": 4 << 30}
        stages: list[StageRecord] = []
        try:
            for record in run_trial(TrialConfig.from_dict(config | {"cache": cache}), ranks=Ranks()):
                if isinstance(record, FinalRecord):
                    _write(options, seed, trial.name, stages, record, time.process_time() - started)
                else:
                    stages.append(record)
        except UserError as error:  # too large to train at all with this budget
            print(f"{options.workload} s{seed} {trial.name:<18} {error}", flush=True)


def _write(
    options: argparse.Namespace, seed: int, name: str, stages: list[StageRecord], final: FinalRecord, cpu_s: float
) -> None:
    grown = [f"{record.stage}:{word}" for record in stages for word in record.step]
    line = {
        "workload": options.workload, "budget": options.budget, "seed": seed, "schedule": name,
        "val": final.loss_val, "test": final.loss_test, "accuracy": final.accuracy_test, "flops": final.flops_total,
        "probes": stages[-1].flops_probe, "params": stages[-1].params, "depth": stages[-1].depth,
        "grown": grown, "cause": final.cause, "vals": [s.loss_val for s in stages], "cpu_s": cpu_s,
        "reasons": [s.decision["reason"] for s in stages],
    }  # fmt: skip
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(
        f"{options.workload} s{seed} {name:<18} val {final.loss_val:.4f} test {final.loss_test:.4f} "
        f"{final.flops_total:.3g} FLOP ({stages[-1].flops_probe / final.flops_total:.1%} probes) "
        f"{stages[-1].params} params {final.cause} {' '.join(grown)} {cpu_s:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
