"""Builders of realistic records: what a study on digits would leave behind, without training one."""

import math
from typing import Any

import numpy as np

from growth_service.core.records import FinalRecord, StageRecord, TrialRecord

SITES = ("groups.0.blocks.0", "groups.0.blocks.1", "groups.1.blocks.0", "groups.1.blocks.1")
WIDENED = "groups.1.blocks.0.branch"


def certificate(site: str = SITES[0], *, kind: str = "depth", gain: float = 0.05, half_width: float = 0.02,
                verdict: str | None = None, tolerance: float = 0.02, **changes: Any) -> dict[str, Any]:  # fmt: skip
    """One certificate with a predicted gain in nats and an interval of +- half_width around it."""
    lower, upper = gain - half_width, gain + half_width
    if verdict is None:
        verdict = "useful" if lower > tolerance else "saturated" if upper < tolerance else "undetermined"
    score = max(gain, 0.0) / 0.1
    return {
        "site": site, "block": "MLPBlock", "kind": kind, "num_samples": 360,
        "raw_rms": 0.41, "ag_max": 2.3, "s_plugin": score + 0.05, "s": score, "noise_sd": 0.02,
        "lcl": lower / 0.1, "ucl": upper / 0.1, "p_value": 0.001 if verdict == "useful" else 0.3,
        "kappa": score * 0.9, "kappa_ucl": upper / 0.1 * 0.9,
        "predicted_gain": gain, "gain_lcl": lower, "predicted_gain_ucl": upper, "noise_gain": 0.004,
        "s_train": score * 1.4, "realizable_share": 0.35, "transfer": score * 0.6,
        "transfer_gain": gain * 0.6, "transfer_ucl": gain * 0.6 + half_width, "cosine": 0.7, "eta": 0.8,
        "half_gain_samples": 210.0 if gain > 0 else math.inf, "snr": score / 0.02,
        "added_flops": 6144, "gain_per_flop": gain / 6144, "verdict": verdict,
    } | changes  # fmt: skip


def stage_record(stage: int = 0, *, trial: str = "t00", flops: int | None = None, **changes: Any) -> StageRecord:
    """Stage ``stage`` of a trial that gets better by a third with each stage."""
    flops = (stage + 1) * 250_500_000 if flops is None else flops
    loss = 0.15 + 1.6 * 0.66**stage
    record: dict[str, Any] = {
        "trial": trial, "stage": stage, "depth": 2 + stage, "width": 32 * (2 + stage), "params": 5_000 * (2 + stage),
        "train_samples": 837, "data_share": 1.0, "loss_train": loss * 0.8, "loss_val": loss,
        "accuracy_val": 1 - loss / 4, "flops_total": flops, "flops_probe": flops // 20,
        "budget": {"total": 3_000_000_000, "spent": flops, "reserved": 0, "free": 3_000_000_000 - flops},
        "decision": {"kind": "train_on", "reason": "nothing is certain yet"},
        "verdict": "undetermined", "tolerance_nats": 0.02,
        "certificates": [certificate(site, gain=0.3 * 0.5 ** (stage + k)) for k, site in enumerate(SITES)],
        "step": [f"depth@{SITES[stage % len(SITES)]}"] if stage else [],
        "protocol": "5f3a", "digest": f"{stage:064x}", "stage_s": 1.5 + 0.1 * stage, "overhead_s": 0.2,
    }  # fmt: skip
    return StageRecord(**record | changes)


def final_record(stages: tuple[StageRecord, ...], *, trial: str = "t00", cause: str = "schedule",
                 **changes: Any) -> FinalRecord:  # fmt: skip
    """The end of a trial; a failed one has no test numbers."""
    last = stages[-1] if stages else None
    failed = cause == "failed"
    record: dict[str, Any] = {
        "trial": trial, "cause": cause, "num_stages": len(stages),
        "reason": "worker 1 died three times" if failed else f"all {len(stages)} stages are trained",
        "loss_val": last.loss_val if last else math.nan, "accuracy_val": last.accuracy_val if last else math.nan,
        "loss_test": math.nan if failed or last is None else last.loss_val * 1.05,
        "accuracy_test": math.nan if failed or last is None else last.accuracy_val - 0.01,
        "flops_total": last.flops_total if last else 0, "budget": last.budget if last else {},
        "digest": last.digest if last else "",
    }  # fmt: skip
    return FinalRecord(**record | changes)


def schedule_dict(name: str = "joint-grow", *, num_stages: int = 3) -> dict[str, Any]:
    """A growth schedule as plain JSON."""
    policy = {"kind": "signal", "axes": ["depth", "width", "data"], "level": 0.05, "tolerance_nats": None,
              "data_factor": 2.0, "units": 8, "inner": "random", "jumpboard": True}  # fmt: skip
    initial = {"blocks": [2, 2], "hidden": [16, 32], "data_share": 0.5}
    return {"name": name, "initial": initial, "policy": policy, "num_stages": num_stages}


def trial_record(trial: str = "t00", *, num_stages: int = 3, cause: str | None = "schedule", seed: int = 11,
                 stages: tuple[StageRecord, ...] | None = None) -> TrialRecord:  # fmt: skip
    """A whole trial; ``cause=None`` is one that still runs."""
    if stages is None:
        stages = tuple(stage_record(s, trial=trial) for s in range(num_stages))
    final = None if cause is None else final_record(stages, trial=trial, cause=cause)
    schedule = schedule_dict(num_stages=num_stages)
    return TrialRecord(trial=trial, schedule=schedule, seed=seed, stages=stages, final=final)


def study_records(*, num_trials: int = 9, num_stages: int = 6, seed: int = 0) -> list[TrialRecord]:
    """A study whose trials differ as schedules do: cheap and poor, dear and good, and some bad ones.

    Five candidates a stage (four sites and one block to widen) whose gains fade from 0.6 nats to
    below the tolerance, with noise of either sign around zero at the end.
    """
    rng = np.random.default_rng(seed)
    steps = [f"depth@{SITES[1]}", f"width@{WIDENED}+8", "data@0.50", f"depth@{SITES[2]}", "data@1.00"]
    out = []
    for i in range(num_trials):
        trial, cost, floor = f"t{i:02d}", 10 ** rng.uniform(7.6, 9.0), 0.10 + 0.35 * rng.random()
        stages, flops, loss = [], 0.0, 2.1
        for s in range(num_stages if i % 4 else num_stages - 1):
            flops += cost * (1 + 0.35 * s)
            loss = floor + (loss - floor) * rng.uniform(0.45, 0.7)
            gains = 0.6 * np.exp(-1.1 * s) * np.array([1.0, 0.55, 0.3, 0.12, 0.2]) * rng.uniform(0.7, 1.3, 5)
            gains += rng.normal(0, 0.002, 5)
            places = [*((site, "depth") for site in SITES), (WIDENED, "width")]
            tolerance = max(0.01, 0.02 * loss)
            found = [
                certificate(p, kind=k, gain=float(g), half_width=0.003 + 0.25 * abs(float(g)), tolerance=tolerance)
                for (p, k), g in zip(places, gains, strict=True)
            ]
            grown = [] if s == 0 or (s + i) % 3 == 2 else [steps[(s + i) % len(steps)]]
            verdicts = {c["verdict"] for c in found}
            verdict = "useful" if "useful" in verdicts else "saturated" if verdicts == {"saturated"} else "undetermined"
            record = stage_record(s, trial=trial, flops=int(flops), loss_val=loss, loss_train=loss * 0.8,
                                  certificates=found, step=grown, verdict=verdict, tolerance_nats=tolerance)  # fmt: skip
            stages.append(record)
        cause = "failed" if i == num_trials - 1 else ("schedule", "saturated", "pruned")[i % 3]
        out.append(trial_record(trial, cause=cause, stages=tuple(stages), seed=i))
    return out
