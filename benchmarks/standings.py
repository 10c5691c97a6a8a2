"""How `joint` stands among schedules and sizes of equal compute: tables out of what benchmarks.rivals wrote.

    python -m benchmarks.standings [OUT.jsonl ...]      # benchmarks/standings.jsonl if none is named

For each workload and budget: test losses by seed; whether `joint` is first among the schedules, or behind the first by
no more than that one's spread over seeds; its distance to the best size of the grid; and the compute of successive
halving over the grid's sizes, in units of a trial, with the loss that it ends with.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rivals import SHARES

Trials = Mapping[str, Mapping[int, dict[str, Any]]]
"""Lines by schedule and seed, of one workload and budget."""
FIRST_RUNG = 3
"""Successive halving compares first when an eighth of the budget is spent."""


class Halving(NamedTuple):
    """What successive halving over sizes chose and cost."""

    schedule: str
    loss: float
    cost: float
    """In units of one trial."""


def halving(grid: Mapping[str, dict[str, Any]]) -> Halving:
    """Keep the better half (by validation loss) at an eighth, a quarter and a half of the budget."""
    left, cost, reached = dict(grid), 0.0, 0.0
    for stage in range(FIRST_RUNG, len(SHARES)):
        spent = sum(SHARES[: stage + 1])
        cost += len(left) * (spent - reached)
        reached = spent
        if stage + 1 < len(SHARES):
            best = sorted(left, key=lambda name: _loss_after(left[name], stage))
            left = {name: left[name] for name in best[: max(1, len(best) // 2)]}
    (winner,) = left
    return Halving(winner, left[winner]["test"], cost)


def _loss_after(line: dict[str, Any], stage: int) -> float:
    """Validation loss; infinite where the trial could not even train so far."""
    return float(line["vals"][stage]) if stage < len(line["vals"]) else float("inf")


def main() -> None:
    """Read and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", default=[Path(__file__).with_name("standings.jsonl")])
    cells: dict[tuple[str, float], dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for path in parser.parse_args().files:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            cells[line["workload"], line["budget"]][line["schedule"]][line["seed"]] = line
    for (workload, budget), trials in sorted(cells.items()):
        print(f"\n### {workload}, {budget:.3g} FLOPs a trial\n")
        _table(trials)
        if "joint" in trials:
            _verdicts(trials)


def _table(trials: Trials) -> None:
    seeds = sorted({seed for lines in trials.values() for seed in lines})
    print("| schedule | " + " | ".join(f"seed {s}" for s in seeds) + " | mean | grown |")
    print("|---|" + "---|" * (len(seeds) + 2))
    for name in sorted(trials, key=lambda n: _mean(trials[n])):
        lines = trials[name]
        losses = [f"{lines[s]['test']:.4f}" if s in lines else "" for s in seeds]
        grown = "; ".join(" ".join(lines[s]["grown"]) or "-" for s in sorted(lines)) if name.startswith("joint") else ""
        bold = "**" if name.startswith("joint") else ""
        print(f"| {bold}{name}{bold} | {' | '.join(losses)} | {_mean(lines):.4f} | {grown} |")


def _mean(lines: Mapping[int, dict[str, Any]]) -> float:
    return statistics.fmean(line["test"] for line in lines.values())


def _verdicts(trials: Trials) -> None:
    joint = trials["joint"]
    whole = {name: lines for name, lines in trials.items() if set(joint) <= set(lines)}
    schedules = {n: {s: lines[s] for s in joint} for n, lines in whole.items() if not n.startswith("scratch-")}
    first = min(schedules, key=lambda n: _mean(schedules[n]))
    behind = _mean(joint) / _mean(schedules[first]) - 1
    losses = [line["test"] for line in schedules[first].values()]
    spread = statistics.stdev(losses) / statistics.fmean(losses) if len(losses) > 1 else float("nan")
    print(f"\n- Among schedules: joint is {behind:+.1%} from {first}, whose spread over seeds is {spread:.1%}.")
    for seed in sorted(joint):
        sizes = {n: x[seed] for n, x in trials.items() if seed in x and (n.startswith("scratch-") or n == "never_grow")}
        best = min(sizes, key=lambda n: sizes[n]["test"])
        halved, own = halving(sizes), joint[seed]["test"]
        print(
            f"- Seed {seed}: joint {own:.4f}, best of {len(sizes)} sizes {sizes[best]['test']:.4f} ({best}, "
            f"{own / sizes[best]['test'] - 1:+.1%}); successive halving {halved.loss:.4f} ({halved.schedule}) for "
            f"{halved.cost:.2f} trials, {own / halved.loss - 1:+.1%}."
        )


if __name__ == "__main__":
    main()
