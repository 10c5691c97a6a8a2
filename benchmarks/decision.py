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
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.workloads import job_data
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
from growth_service.training.stage_loop import run_trial

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
REMAINING = (0.5, 2.0, 8.0)
"""Remaining compute of a fork over what was spent before it."""
DECAY = 0.2
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
        marks = [round(self.cap / 3**k) for k in (4, 3, 2, 1)]
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


def main() -> None:
    """Record or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-share", type=float, default=1.0)
    options = parser.parse_args()
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
