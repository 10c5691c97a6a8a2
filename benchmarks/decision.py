"""What growing is worth against training on: networks forked at recorded checkpoints, each way trained to its end.

    python benchmarks/decision.py record OUT.jsonl --workload docs --width 32 --seed 0
    python benchmarks/decision.py fit OUT.jsonl [OUT.jsonl ...]

A small network is trained at a steady rate. At four moments it is forked: trained on, made deeper by copies (exact,
and by plain stacking), made wider by a half and by two, given all data where it had a part. Each fork is trained with
as much compute as every other, for several amounts of remaining compute, and annealed at the end. Common
beginnings run once, through the stage cache. ``fit`` asks what predicts the advantage over training on.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

from benchmarks.workloads import CALIBRATION, job_data
from growth_service.core.advantage import BLIND_LINES, LINES
from growth_service.core.policies import FixedSteps, Sight
from growth_service.core.records import FinalRecord, StageRecord
from growth_service.core.schedule import GrowthSchedule, InitialSize
from growth_service.core.steps import AddData, Change, Deepen, Widen
from growth_service.orchestration import plan
from growth_service.probing import probe
from growth_service.spec import JobSpec, parse_job
from growth_service.training.batches import chunks_of
from growth_service.training.checkpoint import load_checkpoint
from growth_service.training.config import TrialConfig
from growth_service.training.data import open_splits, subset_size
from growth_service.training.datasets import prepare_for
from growth_service.training.evaluate import CHUNK, loss_sum
from growth_service.training.growing import candidates
from growth_service.training.ranks import Ranks, one_thread
from growth_service.training.stage_loop import StageLoop, run_trial

FORKS: dict[str, tuple[Change, ...]] = {
    "train_on": (),
    "deepen": (Deepen(),),
    "stack": (Deepen(exact=False),),
    "widen1.5": (Widen(times=1.5),),
    "widen2": (Widen(times=2.0),),
}
CAPS = {
    "docs": {16: 2e11, 32: 5e11, 64: 1e12, 128: 2e12},
    "digits": {8: 5e10, 16: 1.5e11},
    "planted": {16: 5e9, 64: 4e10},
}
"""Most compute of one fork; the checkpoints are at a third, a ninth, ... of it."""
REMAINING = (0.5, 2.0, 8.0, 32.0)
"""Remaining compute of a fork over what was spent before it."""
DECAY = 0.2
EVALUATIONS = 8
"""A checkpoint comes after at least as much compute as so many evaluations: they are not what is compared."""
BLOCKS = 1


class Recorder:
    """Runs the forks of one workload, width and seed; appends a line a fork."""

    def __init__(self, out: Path, workload: str, *, width: int, seed: int, data_share: float, scratch: Path) -> None:
        self.out, self.workload, self.width, self.seed, self.scratch = out, workload, width, seed, scratch
        self.data_share = data_share
        self.cap = CAPS.get(workload, CAPS["docs"])[width]
        self.data = prepare_for(self.job(self.cap), scratch / "data")

    def job(self, budget: float) -> JobSpec:
        """The job of one fork."""
        data = job_data(
            self.workload, width=self.width, budget=budget, seed=self.seed, stages=[1.0], storage=str(self.scratch)
        )
        return parse_job(data, source=self.workload)

    def run(self) -> None:
        """All checkpoints and all their forks."""
        marks = [m for k in (4, 3, 2, 1) if (m := round(self.cap / 3**k)) > EVALUATIONS * self.evaluation()]
        for index, spent in enumerate(marks):
            started = time.perf_counter()
            facts = self.checkpoint(marks[: index + 1])
            forks = FORKS | ({"data": (AddData(share=1.0),)} if self.data_share < 1 else {})
            ratios = [r for r in REMAINING if spent * (1 + r) <= self.cap * 1.01]
            for name, changes in forks.items():
                for number, ratio in enumerate(ratios):
                    ends = marks[: index + 1]
                    ends = ends + [round((1 - DECAY) * spent * (1 + r)) for r in ratios[: number + 1]]
                    ends.append(round(spent * (1 + ratio)))
                    stages, final = self.trial(f"{index}-{name}-{ratio:g}", ends, {index: changes})
                    self.write(facts | {
                        "fork": name, "remaining": ratio, "loss": stages[-1].loss_val, "loss_test": final.loss_test,
                        "params": stages[-1].params, "flops": final.flops_total, "cause": final.cause,
                        "targets_end": stages[-1].targets_seen, "per_sample": stages[-1].flops_per_sample,
                    })  # fmt: skip
            print(f"{self.workload} {self.width} s{self.seed} at {spent:.2e}: {time.perf_counter() - started:.0f} s",
                  flush=True)  # fmt: skip

    def evaluation(self) -> int:
        """FLOPs of the evaluations of one stage of the initial network."""
        loop = StageLoop(self.config("nowhere", [round(self.cap)], {}), ranks=Ranks())
        num = len(loop.state.splits.val.targets) + loop.config.training["evaluate_samples"]
        return int(num * loop.state.cost.forward)

    def trial(
        self, name: str, ends: list[int], steps: dict[int, tuple[Change, ...]]
    ) -> tuple[list[StageRecord], FinalRecord]:
        """One trial whose stages end at these FLOPs."""
        config = self.config(name, ends, steps)
        stages: list[StageRecord] = []
        for record in run_trial(config, ranks=Ranks()):
            if isinstance(record, FinalRecord):
                return stages, record
            stages.append(record)
        raise AssertionError("a trial ends with its final record")

    def config(self, name: str, ends: list[int], steps: dict[int, tuple[Change, ...]]) -> TrialConfig:
        """Its configuration."""
        job = self.job(float(ends[-1]))
        starts = [0, *ends[:-1]]
        text = job.model.family == "gpt"
        hidden = [4 * w if text else w for w in job.model.widths]
        schedule = GrowthSchedule(
            name=name,
            initial=InitialSize(blocks=(BLOCKS,) * len(hidden), hidden=tuple(hidden), data_share=self.data_share),
            policy=FixedSteps(steps=tuple((s, c) for s, c in steps.items() if c)),
            num_stages=len(ends),
            shares=tuple((e - s) / ends[-1] for s, e in zip(starts, ends, strict=True)),
        )
        planned = plan.PlannedTrial(index=0, name=name, schedule=schedule, seed=self.seed)
        config = plan.trial_config(job, planned, data=self.data, folder=self.scratch).to_dict()
        cache = {"folder": str(self.scratch / "cache"), "limit_bytes": 4 << 30}
        return TrialConfig.from_dict(config | {"cache": cache})

    def checkpoint(self, marks: list[int]) -> dict[str, Any]:
        """Train up to the last mark; what is known there, the certificates included."""
        name = f"trunk-{len(marks)}"
        ends = [*marks, round(marks[-1] * 1.5)]  # the end is far enough that the rate is still steady at the last mark
        config = self.config(name, ends, {})
        loop = run_trial(config, ranks=Ranks())
        record = None
        for _ in marks:
            record = next(loop)
        loop.close()
        assert isinstance(record, StageRecord)
        folder = self.scratch / "trials" / name / "stages" / f"{len(marks) - 1:03d}"
        return {
            "workload": self.workload, "width": self.width, "seed": self.seed, "data_share": self.data_share,
            "spent": record.flops_total, "loss_train": record.loss_train, "loss_val": record.loss_val,
            "targets_seen": record.targets_seen, "params_before": record.params, "depth_before": record.depth,
            "per_sample_before": record.flops_per_sample, "num_train": record.train_samples,
            "signal": self.signal(folder, config),
        }  # fmt: skip

    def signal(self, folder: Path, config: TrialConfig) -> list[dict[str, Any]]:
        """Certificates of blocks and units on the probe split."""
        model = load_checkpoint(folder).model
        splits, limits = open_splits(self.scratch / "data"), config.probe
        sight = Sight(axes=("depth", "width"), inner="copy", units=8)
        subset = min(subset_size(len(splits.train.targets), self.data_share), limits["train_samples"])
        report = probe(
            model,
            batches=chunks_of(splits.probe, size=CHUNK, limit=limits["samples"]),
            train_batches=chunks_of(splits.train, size=CHUNK, limit=subset),
            loss=loss_sum,
            reduction="sum",
            candidates=candidates(model, sight, stage=0, seed=self.seed),
            seed=self.seed,
        )
        keep = ("kind", "site", "verdict", "s", "s_train", "kappa", "kappa_ucl", "predicted_gain", "gain_lcl",
                "predicted_gain_ucl", "train_gain", "transfer_gain", "transfer_ucl", "cosine", "eta", "snr",
                "added_flops", "realizable_share", "ag_max")  # fmt: skip
        return [{k: site.to_dict()[k] for k in keep} for site in report.sites]

    def write(self, line: dict[str, Any]) -> None:
        """Append a fork."""
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Fork(NamedTuple):
    """One step at one checkpoint with one remaining budget, beside training on."""

    workload: str
    step: str
    advantage: float
    """log(loss of training on / loss of growing), held to +-0.3: beyond that a fork only says yes or no."""
    inputs: dict[str, float]
    cell: tuple[Any, ...] = ()
    """Checkpoint and remaining budget."""


def forks_of(paths: list[Path]) -> list[Fork]:
    """Pairs of forks with what was known when they parted; those whose budget ran out early are left out."""
    lines = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["cause"] == "schedule"]
    trunk = {(*_cell(x), x["remaining"]): x for x in lines if x["fork"] == "train_on"}
    found = []
    for line in lines:
        other = trunk.get((*_cell(line), line["remaining"]))
        if other is None or line["fork"] not in STEP_NAMES or _distorted(line):
            continue
        advantage = math.log(other["loss"] / line["loss"])
        inputs = _inputs(line)
        cell = (*_cell(line), line["remaining"])
        found.append(Fork(line["workload"], STEP_NAMES[line["fork"]], min(max(advantage, -0.3), 0.3), inputs, cell))
    return found


STEP_NAMES = {"deepen": "depth*2", "stack": "stack*2", "widen1.5": "width*1.5", "widen2": "width*2"}


def _cell(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[key] for key in ("workload", "width", "seed", "data_share", "spent"))


def _distorted(line: dict[str, Any]) -> bool:
    """Whether evaluations were a large part of what was spent: early checkpoints of the first recordings."""
    samples = 1536 if line["workload"] == "digits" else 768
    return bool(line["spent"] < EVALUATIONS * samples * line["per_sample_before"] / 3)


def _inputs(line: dict[str, Any]) -> dict[str, float]:
    """What is known at the moment of the decision; logarithms but for shares."""
    text = line["workload"] in ("docs", "sources")
    per_sample = 64 if text else 1
    settings = CALIBRATION[line["workload"]]["training"]
    factor = line["per_sample"] / line["per_sample_before"]
    after = line["targets_seen"] * line["remaining"] / factor
    targets = line["targets_seen"] + after
    steps = targets / (settings["batch_size"] * per_sample)
    gap = (line["loss_val"] - line["loss_train"]) / line["loss_val"]
    depth = [s for s in line["signal"] if s["kind"] == "depth"]
    width = [s for s in line["signal"] if s["kind"] == "width"]
    capped = line["loss_val"]
    return {
        "one": 1.0,
        "steps": math.log(steps),
        "targets per parameter": math.log(targets / line["params"]),
        "targets per parameter after": math.log(after / line["params"]),
        "targets per parameter now": math.log(line["targets_seen"] / line["params_before"]),
        "remaining": math.log(line["remaining"]),
        "gap": min(max(gap, 0.0), 1.0),
        "transfer gain": max(s["transfer_gain"] for s in depth) / capped,
        "predicted gain": max(s["predicted_gain"] for s in depth) / capped,
        "transfer of units": max(s["transfer_gain"] for s in width) / capped,
        "kappa": math.log(max(*(s["kappa"] for s in depth), 1e-6)),
        "cosine": max(s["cosine"] for s in depth),
    }


AFTER = ("one", "targets per parameter after")
SETS: dict[str, tuple[str, ...]] = {
    "nothing": ("one",),
    "targets per parameter now": ("one", "targets per parameter now"),
    "targets per parameter now, remaining": ("one", "targets per parameter now", "remaining"),
    "targets per parameter at the end": ("one", "targets per parameter"),
    "steps at the end": ("one", "steps"),
    "targets per parameter after": AFTER,
    "after, gap": (*AFTER, "gap"),
    "after, transfer gain": (*AFTER, "transfer gain"),
    "after, predicted gain": (*AFTER, "predicted gain"),
    "after, transfer of units": (*AFTER, "transfer of units"),
    "after, kappa": (*AFTER, "kappa"),
    "after, cosine": (*AFTER, "cosine"),
    "after, cosine, predicted gain": (*AFTER, "cosine", "predicted gain"),
}


def fit(paths: list[Path]) -> None:
    """What predicts the advantage: errors on workloads left out, and the lines of all together."""
    forks = forks_of(paths)
    for step in STEP_NAMES.values():
        mine = [f for f in forks if f.step == step]
        grew = statistics.fmean(f.advantage > 0 for f in mine)
        print(f"\n### {step}: {len(mine)} forks, better than training on in {grew:.0%}\n")
        print("| inputs | mean error | sign right | regret | line |\n|---|---|---|---|---|")
        for name, inputs in SETS.items():
            print(_row(name, mine, inputs))
    for inputs in (CHOSEN, BLIND):
        policy_regret(paths, inputs)


def policy_regret(paths: list[Path], inputs_of: dict[str, tuple[str, ...]], *, confidence: float = 0.55) -> None:
    """What the whole policy (the best of three steps, or training on) loses against knowing, on a workload left out."""
    chosen = {step: inputs_of[step] for step in ("depth*2", "width*1.5", "width*2")}
    cells: dict[tuple[str, Any], dict[str, Fork]] = {}
    for fork in forks_of(paths):
        cells.setdefault((fork.workload, fork.cell), {})[fork.step] = fork
    whole = [(w, {s: c[s] for s in chosen}) for (w, _), c in cells.items() if set(chosen) <= set(c)]
    print(f"\n### the policy {'seeing' if inputs_of is CHOSEN else 'blind'}, on each workload left out\n")
    print("| workload | cells | regret | of never growing |\n|---|---|---|---|")
    for left_out in sorted({w for w, _ in whole}):
        lost, never = [], []
        fitted = {}
        for step, inputs in chosen.items():
            known = [f for w, c in whole if w != left_out for f in (c[step],)]
            line = _least_squares(known, inputs)
            sd = (LINES if inputs_of is CHOSEN else BLIND_LINES)[step].sd
            fitted[step] = (inputs, line, NormalDist().inv_cdf(confidence) * sd)
        for _, cell in ((w, c) for w, c in whole if w == left_out):
            lower = {
                s: float(line @ [cell[s].inputs[i] for i in inputs]) - off for s, (inputs, line, off) in fitted.items()
            }
            taken = max(lower, key=lambda s: lower[s])
            best = max(0.0, *(f.advantage for f in cell.values()))
            lost.append(best - (cell[taken].advantage if lower[taken] > 0 else 0.0))
            never.append(best)
        print(f"| {left_out} | {len(lost)} | {statistics.fmean(lost):.4f} | {statistics.fmean(never):.4f} |")


CHOSEN = {
    "depth*2": AFTER,
    "width*1.5": (*AFTER, "cosine", "predicted gain"),
    "width*2": (*AFTER, "cosine", "predicted gain"),
}
"""Inputs that the default policy uses."""
BLIND = CHOSEN | {"width*1.5": (*AFTER, "gap"), "width*2": (*AFTER, "gap")}
"""Those where nobody looked."""


def _row(name: str, forks: list[Fork], inputs: tuple[str, ...]) -> str:
    errors, signs, regrets = [], [], []
    for left_out in sorted({f.workload for f in forks}):
        line = _least_squares([f for f in forks if f.workload != left_out], inputs)
        for fork in (f for f in forks if f.workload == left_out):
            predicted = float(line @ [fork.inputs[i] for i in inputs])
            errors.append(abs(predicted - fork.advantage))
            signs.append((predicted > 0) == (fork.advantage > 0))
            regrets.append(max(0.0, fork.advantage) - (fork.advantage if predicted > 0 else 0.0))
    weights = ", ".join(f"{w:+.3f}" for w in _least_squares(forks, inputs))
    mean, right, regret = map(statistics.fmean, (errors, signs, regrets))
    return f"| {name} | {mean:.4f} | {right:.0%} | {regret:.4f} | {weights} |"


def _least_squares(forks: list[Fork], inputs: tuple[str, ...]) -> Any:
    """Weights of a line; those of steps and of targets per parameter are held above zero."""
    x = np.array([[f.inputs[i] for i in inputs] for f in forks])
    low = [0.0 if i in ("steps", "targets per parameter", AFTER[1]) else -np.inf for i in inputs]
    return lsq_linear(x, [f.advantage for f in forks], bounds=(low, np.inf)).x


def main() -> None:
    """Record or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--workload", required=True, choices=sorted(CALIBRATION))
    recording.add_argument("--width", type=int, required=True)
    recording.add_argument("--seed", type=int, default=0)
    recording.add_argument("--data-share", type=float, default=1.0)
    fitting = commands.add_parser("fit")
    fitting.add_argument("recorded", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "fit":
        fit(options.recorded)
        return
    one_thread()
    with tempfile.TemporaryDirectory(prefix="growth-decision-") as scratch:
        Recorder(
            options.out,
            options.workload,
            width=options.width,
            seed=options.seed,
            data_share=options.data_share,
            scratch=Path(scratch),
        ).run()


if __name__ == "__main__":
    main()
