"""What the pruning rule does to real studies: replayed on recorded curves, and on and off in one that runs now.

    python -m benchmarks.pruning [OUT.jsonl of benchmarks.rivals]
    python -m benchmarks.pruning --study fashion --width 8 --budget 3e11     # starts Ray; about six minutes

A recorded study is all sizes and schedules of one workload, budget and seed. Each is played in 200 orders.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.rivals import SHARES, entries
from benchmarks.workloads import job_data
from growth_service.cli.study import run_job
from growth_service.orchestration.result import StudyResult
from growth_service.simulate import play
from growth_service.spec import SchedulerSpec, parse_job

BUDGET = 10**12
ORDERS = 200
FEWEST = 9
"""Trials of a study that is worth playing."""
SCHEDULES = ["never_grow", "one_shot_late", "stacking", "random_site", "tokens_per_param", "joint"]


def main() -> None:
    """Play or run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path, nargs="?", default=Path(__file__).with_name("standings.jsonl"))
    parser.add_argument("--study", dest="workload", help="run this workload with and without pruning")
    parser.add_argument("--width", type=int, default=8, help="of the network that grows; the grid has up to four times")
    parser.add_argument("--budget", type=float, default=3e11, help="FLOPs of a trial")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.workload:
        on_and_off(options)
    else:
        replay(options.curves)


def replay(path: Path) -> None:
    """Play each recorded set in many orders."""
    studies: dict[str, list[list[float]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        trial = json.loads(line)
        if len(trial["vals"]) == len(SHARES):  # the others ended early: too large for the budget
            name = f"{trial['workload']} {trial['budget']:.3g}, seed {trial['seed']}"
            studies.setdefault(name, []).append(trial["vals"])
    studies = {name: vals for name, vals in studies.items() if len(vals) >= FEWEST}
    rule = SchedulerSpec().of_budget(BUDGET)
    print("| study | trials | winner lost | compute spent | best loss above the winner's |\n|---|---|---|---|---|")
    rows = []
    for name, vals in studies.items():
        losses = np.array(vals)
        orders = [np.random.default_rng(order).permutation(len(losses)) for order in range(ORDERS)]
        found = [play(losses[order], shares=SHARES, rule=rule, budget_flops=BUDGET) for order in orders]
        lost, spent = (statistics.fmean(x) for x in ([f.winner_lost for f in found], [f.spent_share for f in found]))
        excess = statistics.fmean(f.best_loss / losses[:, -1].min() - 1 for f in found)
        rows.append((lost, spent, excess))
        print(f"| {name} | {len(losses)} | {lost:.1%} | {spent:.3f} | {excess:.2%} |")
    lost, spent, excess = map(statistics.fmean, zip(*rows, strict=True))
    print(f"| mean of {len(rows)} | | {lost:.1%} | {spent:.3f} | {excess:.2%} |")


def on_and_off(options: argparse.Namespace) -> None:
    """The same study twice."""
    options.widths, options.blocks = [options.width * k for k in (1, 2, 4)], [1, 2]
    options.skip, options.schedules, options.start_blocks = [f"{options.width}x1"], SCHEDULES, 1
    whole, pruned = (study(options, rule=rule) for rule in ("none", "law"))
    print("| trial | whole, val | pruned, val | ended | stages |\n|---|---|---|---|---|")
    for a, b in zip(whole.trials, pruned.trials, strict=True):
        assert a.final is not None
        assert b.final is not None
        stages = f"{b.final.num_stages} of {a.final.num_stages}"
        print(f"| {a.trial} | {a.final.loss_val:.4f} | {b.final.loss_val:.4f} | {b.final.cause} | {stages} |")
    best = [min((t.final.loss_val, t.trial) for t in r.trials if t.final is not None) for r in (whole, pruned)]
    spent = pruned.budget.spent_flops / whole.budget.spent_flops
    print(f"best: {best[0][0]:.4f} ({best[0][1]}) whole, {best[1][0]:.4f} ({best[1][1]}) pruned; spent {spent:.3f}")


def study(options: argparse.Namespace, *, rule: str) -> StudyResult:
    """One study on this machine's Ray, nothing shared."""
    with tempfile.TemporaryDirectory(prefix="growth-pruning-") as folder:
        data = job_data(
            options.workload,
            width=options.width,
            budget=options.budget,
            seed=options.seed,
            stages=list(SHARES),
            storage=folder,
        )
        data["search"] = {"stages": list(SHARES), "concurrent_trials": 2, "schedules": entries(options)}
        return run_job(parse_job(data | {"scheduler": {"rule": rule}, "cache": {"enabled": False}}, source="benchmark"))


if __name__ == "__main__":
    main()
