"""Every schedule of a job over several seeds, one process, no Ray: the table of losses at equal compute.

    python benchmarks/schedules.py search_spaces/jobs/digits.yaml --seeds 0 1 2

Trials give the records that they give under ``growth run`` (a test holds them equal); pruning across
trials is left out, so that every schedule is seen to its own end. Prints one line a trial, then the
median over seeds as a table for a report.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from growth_service.core.records import FinalRecord, StageRecord
from growth_service.orchestration import plan
from growth_service.spec import load_job
from growth_service.training.datasets import prepare_for
from growth_service.training.ranks import Ranks, one_thread
from growth_service.training.stage_loop import run_trial


class Row(NamedTuple):
    """One trial of one seed."""

    trial: str
    seed: int
    val: float
    best_val: float
    test: float
    accuracy: float
    gflops: float
    probe_share: float
    train_s: float
    cause: str


def run(path: Path, seed: int, overrides: list[str]) -> list[Row]:
    """All listed trials of a job with one seed."""
    job = load_job(path, overrides=[f"seed={seed}", "cache.enabled=false", *overrides])
    rows = []
    with tempfile.TemporaryDirectory(prefix="growth-bench-") as scratch:
        folder = Path(scratch)
        data = prepare_for(job, folder / "data")
        for trial in plan.planned_trials(job):
            began = time.process_time()
            stages: list[StageRecord] = []
            for record in run_trial(plan.trial_config(job, trial, data=data, folder=folder), ranks=Ranks()):
                if isinstance(record, FinalRecord):
                    rows.append(_row(trial.name, seed, stages, record, cpu_s=time.process_time() - began))
                    print(_line(rows[-1]), flush=True)
                else:
                    stages.append(record)
    return rows


def _row(trial: str, seed: int, stages: list[StageRecord], final: FinalRecord, *, cpu_s: float) -> Row:
    wall_s = sum(s.stage_s for s in stages)
    train_share = sum(s.stage_s - s.overhead_s for s in stages) / wall_s
    return Row(
        trial=trial,
        seed=seed,
        val=final.loss_val,
        best_val=min(s.loss_val for s in stages),
        test=final.loss_test,
        accuracy=final.accuracy_test,
        gflops=final.flops_total / 1e9,
        probe_share=stages[-1].flops_probe / final.flops_total,
        train_s=cpu_s * train_share,
        cause=final.cause,
    )


def _line(row: Row) -> str:
    return (
        f"seed {row.seed}  {row.trial:<17} val {row.val:.4f}  test {row.test:.4f}  acc {row.accuracy:.3f}  "
        f"{row.gflops:6.1f} GFLOP ({row.probe_share:4.0%} probes)  training {row.train_s:.1f} CPU-s  {row.cause}"
    )


def _markdown(rows: list[Row]) -> str:
    seeds = sorted({r.seed for r in rows})
    head = (
        "| schedule | "
        + " | ".join(f"val, seed {s}" for s in seeds)
        + " | median val | median test | median GFLOP | probes |"
    )
    lines = [head, "|---" * (len(seeds) + 5) + "|"]
    for trial in dict.fromkeys(r.trial for r in rows):
        mine = {r.seed: r for r in rows if r.trial == trial}
        median = {
            name: statistics.median(getattr(r, name) for r in mine.values())
            for name in ("val", "test", "gflops", "probe_share")
        }
        cells = " | ".join(f"{mine[s].val:.4f}" for s in seeds)
        lines.append(
            f"| {trial} | {cells} | {median['val']:.4f} | {median['test']:.4f} | {median['gflops']:.0f} | "
            f"{median['probe_share']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=VALUE")
    options = parser.parse_args()
    one_thread()
    rows = [row for seed in options.seeds for row in run(options.job, seed, options.overrides)]
    print("\n" + _markdown(rows))


if __name__ == "__main__":
    main()
