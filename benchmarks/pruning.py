"""What the pruning rule would have done to studies whose trials were all run to their end.

    python -m benchmarks.pruning [OUT.jsonl of benchmarks.rivals, made like curves.jsonl]

``curves.jsonl`` has validation losses after each stage of trials on Shakespeare that had equal budgets (``a``: before,
``b``: after held-out text came from all over the file). Each study is played in 200 orders.
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np

from benchmarks.rivals import SHARES
from growth_service.simulate import play
from growth_service.spec import SchedulerSpec

BUDGET = 10**12
ORDERS = 200


def main() -> None:
    """Play and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path, nargs="?", default=Path(__file__).with_name("curves.jsonl"))
    studies: dict[str, list[list[float]]] = {}
    for line in parser.parse_args().curves.read_text(encoding="utf-8").splitlines():
        trial = json.loads(line)
        studies.setdefault(trial["study"], []).append(trial["vals"])
    rule = SchedulerSpec().of_budget(BUDGET)
    print("| study | trials | winner lost | compute spent | best loss above the winner's |\n|---|---|---|---|---|")
    for name, vals in studies.items():
        losses = np.array(vals)
        orders = [np.random.default_rng(order).permutation(len(losses)) for order in range(ORDERS)]
        found = [play(losses[order], shares=SHARES, rule=rule, budget_flops=BUDGET) for order in orders]
        lost, spent = (statistics.fmean(x) for x in ([f.winner_lost for f in found], [f.spent_share for f in found]))
        excess = statistics.fmean(f.best_loss / losses[:, -1].min() - 1 for f in found)
        print(f"| {name} | {len(losses)} | {lost:.1%} | {spent:.3f} | {excess:.2%} |")


if __name__ == "__main__":
    main()
