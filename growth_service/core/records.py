"""The records that a trial leaves behind: plain JSON, one a stage and one at the end.

Everything downstream - scheduler, tracker, planner, tables - reads these and nothing else.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT_VERSION = 1

METRICS: dict[str, str] = {
    "loss/train_nats": "mean loss on the training subset in force, eval mode",
    "loss/val_nats": "mean validation loss",
    "loss/test_nats": "test loss, once, when the trial ends",
    "accuracy/val": "validation accuracy, share",
    "accuracy/test": "test accuracy, share, once",
    "signal/kappa_max": "largest debiased scale-free score over the candidates, nats per relative step",
    "signal/kappa_ucl": "largest upper limit of it",
    "signal/s_max": "largest debiased score",
    "signal/ag_max": "largest activation-gradient norm of one sample over the sites",
    "signal/realizable_share": "largest share of gradient energy that a block can reach",
    "signal/eta": "largest share of the gain realisable with the training samples in force",
    "signal/undetermined_sites": "candidates without a verdict",
    "arch/depth": "residual blocks",
    "arch/width": "hidden units over all blocks",
    "arch/params": "parameters",
    "data/train_samples": "training samples in force",
    "compute/flops_total": "training, evaluation, probes and rejected steps so far",
    "compute/flops_probe": "probes and line searches so far",
    "compute/flops_wasted": "work repeated after faults so far, outside the budget",
    "time/stage_s": "wall seconds of the stage",
    "time/overhead_s": "wall seconds of the stage that were not training",
    "time/grow_s": "wall seconds of the grow step at the beginning of the stage",
    "ledger/delta_r": "validation gain of the jumpboard, nats",
    "ledger/delta_erm": "training gain from the jumpboard on, nats",
    "ledger/gamma": "growth of the generalisation gap, nats",
}
"""Every metric name that a tracker may write, with its meaning."""

_VOLATILE = ("stage_s", "overhead_s", "grow_s", "flops_wasted", "attempt", "reused", "flops_reused")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecord:
    """One stage of one trial: sizes, losses, certificates, the decision and its receipts."""

    trial: str
    stage: int
    depth: int
    width: int
    params: int
    train_samples: int
    data_share: float
    loss_train: float
    loss_val: float
    accuracy_val: float
    flops_total: int
    flops_probe: int
    budget: dict[str, int]
    """The trial's account after the stage: total, spent, reserved, free."""
    decision: dict[str, Any]
    """What the trial decided after the stage, with its reason."""
    targets_seen: int = 0
    """Predictions that training has been corrected on so far: classes of samples, or tokens of sequences, repeated
    ones too."""
    flops_per_sample: int = 0
    """Forward and backward of one training sample through the network as it is now."""
    verdict: str | None = None
    """Network verdict; None where the policy does not probe."""
    tolerance_nats: float | None = None
    certificates: list[dict[str, Any]] = field(default_factory=list)
    """One a candidate; see ``probing.report.SiteReport``."""
    receipts: list[dict[str, Any]] = field(default_factory=list)
    """Grow steps taken at the start of this stage."""
    step: list[str] = field(default_factory=list)
    """The same in words."""
    fallback: bool = False
    """True where training ended above where it began on the training subset, and was undone."""
    ledger: dict[str, Any] | None = None
    protocol: str | None = None
    """Digest of the probe protocol, fixed before any gradient was read."""
    digest: str = ""
    """sha256 of the weights after the stage."""
    stage_s: float = 0.0
    overhead_s: float = 0.0
    grow_s: float = 0.0
    """Wall seconds of the grow step: line search, change, agreement of ranks, new wrapper."""
    flops_wasted: int = 0
    attempt: int = 0
    reused: bool = False
    """True where another trial had run this very stage and its result was taken; its FLOPs are booked all the same."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "StageRecord":
        """Inverse of :meth:`to_dict`."""
        return cls(**data)

    def comparable(self) -> dict[str, Any]:
        """All fields that an undisturbed run would repeat exactly."""
        return {k: v for k, v in self.to_dict().items() if k not in _VOLATILE}

    def metrics(self) -> dict[str, float]:
        """The stage in the names of :data:`METRICS`; absent figures are left out."""
        out = {
            "loss/train_nats": self.loss_train,
            "loss/val_nats": self.loss_val,
            "accuracy/val": self.accuracy_val,
            "arch/depth": self.depth,
            "arch/width": self.width,
            "arch/params": self.params,
            "data/train_samples": self.train_samples,
            "compute/flops_total": self.flops_total,
            "compute/flops_probe": self.flops_probe,
            "compute/flops_wasted": self.flops_wasted,
            "time/stage_s": self.stage_s,
            "time/overhead_s": self.overhead_s,
            "time/grow_s": self.grow_s,
        }
        if self.certificates:
            sites = self.certificates
            out |= {
                "signal/kappa_max": max(s["kappa"] for s in sites),
                "signal/kappa_ucl": max(s["kappa_ucl"] for s in sites),
                "signal/s_max": max(s["s"] for s in sites),
                "signal/ag_max": max(s["ag_max"] for s in sites),
                "signal/realizable_share": max(s["realizable_share"] for s in sites),
                "signal/eta": max(s["eta"] for s in sites),
                "signal/undetermined_sites": sum(s["verdict"] == "undetermined" for s in sites),
            }
        if self.ledger is not None:
            out |= {f"ledger/{k}": self.ledger[k] for k in ("delta_r", "delta_erm", "gamma")}
        return {k: float(v) for k, v in out.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalRecord:
    """The end of a trial: why, and the one look at the test split."""

    trial: str
    cause: str
    """A stop cause of ``core.decisions``, or ``failed``."""
    reason: str
    num_stages: int
    loss_val: float
    accuracy_val: float
    loss_test: float
    accuracy_test: float
    flops_total: int
    budget: dict[str, int]
    digest: str = ""
    flops_wasted: int = 0
    flops_reused: int = 0
    """Of ``flops_total``, what other trials had spent already on stages that were taken over."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "FinalRecord":
        """Inverse of :meth:`to_dict`."""
        return cls(**data)

    def comparable(self) -> dict[str, Any]:
        """All fields that an undisturbed run would repeat exactly."""
        return {k: v for k, v in self.to_dict().items() if k not in _VOLATILE}

    def metrics(self) -> dict[str, float]:
        """Test loss and accuracy in the names of :data:`METRICS`, where they are finite."""
        out = {"loss/test_nats": self.loss_test, "accuracy/test": self.accuracy_test}
        return {k: v for k, v in out.items() if math.isfinite(v)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """A whole trial: its schedule, its stages, its end (None while it runs)."""

    trial: str
    schedule: dict[str, Any]
    seed: int
    stages: tuple[StageRecord, ...]
    final: FinalRecord | None

    @property
    def events(self) -> list[str]:
        """Grow steps in words, in order."""
        return [step for record in self.stages for step in record.step]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; the content of ``growth/events.json``."""
        return {
            "format_version": FORMAT_VERSION,
            "trial": self.trial,
            "schedule": self.schedule,
            "seed": self.seed,
            "stages": [s.to_dict() for s in self.stages],
            "final": self.final.to_dict() if self.final else None,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TrialRecord":
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: If it was written in another format version.
        """
        if data.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"trial record has format version {data.get('format_version')!r}, this version reads {FORMAT_VERSION}"
            )
        return cls(
            trial=data["trial"],
            schedule=data["schedule"],
            seed=data["seed"],
            stages=tuple(map(StageRecord.from_dict, data["stages"])),
            final=FinalRecord.from_dict(data["final"]) if data["final"] else None,
        )


def flops_reused(stages: Sequence[StageRecord]) -> int:
    """FLOPs of the stages that were taken over from other trials."""
    before = [0, *(r.flops_total for r in stages)]
    return sum(r.flops_total - spent for r, spent in zip(stages, before, strict=False) if r.reused)


def compute_step(flops: int, previous: int) -> int:
    """MLflow step: megaFLOPs rounded up, forced above the previous one."""
    return max(-(-flops // 1_000_000), previous + 1)
