"""What a probe returns: one certificate a candidate, one verdict for the network."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from growth_service.core.advice import Advice, CandidateEvidence, Evidence, Unlock, advise
from growth_service.core.certificate import Verdict
from growth_service.core.decisions import CandidateReading
from growth_service.core.score import Covariance, FloatArray

CAVEAT = "first-order saturated under this protocol; curvature and stochastic escape not excluded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """The steepest direction -G Sigma^-1 of an output projection, estimated on training samples."""

    matrix_DK: FloatArray
    weight: FloatArray
    """In the shape of the projection's weight."""
    bias: FloatArray | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteReport:
    """The certificate of one candidate. Scores in squared loss per squared stream, gains in nats."""

    site: str
    name: str
    """Tells several candidates at one site apart; empty where there is one."""
    block: dict[str, Any]
    kind: Literal["depth", "width", "stream"]
    num_samples: int
    width: int
    """Rows of the projection: channels of the stream."""
    features: int
    """Columns: features that the projection reads, with the constant one."""
    raw_rms: float
    """Root mean square norm of the activation gradient: an upper bound of sqrt(S)."""
    ag_max: float
    gradmax: float
    """Squared norm of the cross-gradient, un-whitened: the score of GradMax, for comparison."""
    s_plugin: float
    """Biased score of the probe sample, formula tr(G Sigma^+ G^T)."""
    s: float
    """Debiased score; may be negative."""
    noise_sd: float
    lcl: float
    """Lower limit of S at level / number of candidates."""
    ucl: float
    """Upper limit of S at the level."""
    p_value: float
    kappa: float
    kappa_ucl: float
    predicted_gain: float
    gain_lcl: float
    predicted_gain_ucl: float
    noise_gain: float
    """Predicted gain of a score one noise standard deviation above zero."""
    s_train: float
    """Score on the training samples themselves: exact, no sampling error."""
    train_gain: float
    """Predicted gain of it: what a block could remove from the training loss."""
    realizable_share: float
    transfer: float
    """X_n: held-out decrease rate along the training direction; units of sqrt(S)."""
    transfer_gain: float
    transfer_ucl: float
    """Expected gain of that direction and its upper limit, in nats."""
    cosine: float
    """Agreement of training and held-out gradients, X / sqrt(S_train S)."""
    eta: float
    half_gain_samples: float
    snr: float
    effective_rank: float
    """(tr C)^2 / ||C||_F^2 of the whitened cross-gradients: width makes signals visible where it grows with it."""
    added_flops: int
    gain_per_flop: float
    """Transferable gain per added FLOP of a training sample."""
    verdict: Verdict
    notes: tuple[str, ...]
    """What to know before relying on the figures."""
    cross_gradient: FloatArray
    """Mean cross-gradient of the training samples (of the held-out ones, where none were given)."""
    descent_direction: Direction

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, without the matrices; infinite figures become null."""
        data = {f: getattr(self, f) for f in self.__dataclass_fields__}
        del data["cross_gradient"], data["descent_direction"]
        data["notes"] = list(self.notes)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}

    def evidence(self) -> CandidateEvidence:
        """The part that advice needs."""
        return CandidateEvidence(
            kind=self.kind,
            path=self.site,
            verdict=self.verdict,
            gain=self.predicted_gain,
            gain_lower=self.gain_lcl,
            gain_upper=self.predicted_gain_ucl,
            noise_gain=self.noise_gain,
            transfer_gain=self.transfer_gain,
            transfer_upper=self.transfer_ucl,
            eta=self.eta,
            half_gain_samples=self.half_gain_samples,
            cosine=self.cosine,
            snr=self.snr,
            effective_rank=self.effective_rank,
            s_train_gain=self.train_gain,
            width=self.width,
            features=self.features,
            added_flops=self.added_flops,
        )

    def reading(self) -> CandidateReading:
        """The part that a decision needs."""
        return CandidateReading.from_certificate(self.to_dict())


@dataclass(frozen=True, kw_only=True, slots=True)
class PastLook:
    """One look of several."""

    num_samples: int
    level: float
    """Error level spent on it."""
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class SaturationReport:
    """Certificates of all candidates at one moment of training."""

    sites: list[SiteReport]
    verdict: Verdict
    best: SiteReport | None
    """Largest transferable gain per FLOP among the useful ones; None where none is useful."""
    covariance: dict[str, Covariance]
    """Channel covariance of the activation gradients by path."""
    loss_nats: float
    """Mean loss on the probe samples."""
    loss_train_nats: float | None
    """Mean loss on the training samples; None where there were none."""
    tolerance_nats: float
    level: float
    ridge: float
    r_max: float
    num_samples: int
    """Held-out samples."""
    num_train: int
    """Training samples behind directions and transfer; 0: none."""
    flops: int
    """What this probe cost."""
    protocol: str
    """sha256 of sites, blocks, inner weights, ridge, tolerance, level: fixed before any gradient."""
    blocks: dict[tuple[str, str], Any]
    """The candidate blocks themselves, by (kind, path), the best of several: what is scored is what is inserted."""
    confirmed: SiteReport | None = None
    """The best candidate, certified again on samples that did not choose it."""
    notes: tuple[str, ...] = ()
    """What to know about the samples before relying on the figures."""
    looks: tuple[PastLook, ...] = ()
    """All looks, where there were several."""

    def evidence(self, *, max_probe: int | None = None, more_train_available: bool = True) -> Evidence:
        """What the certificates say, for :func:`growth_service.core.advice.advise`.

        Args:
            max_probe: Further held-out samples that exist; None: unknown.
            more_train_available: Whether there is training data that is not in use.
        """
        return Evidence(
            tolerance_nats=self.tolerance_nats,
            level=self.level,
            loss_train=self.loss_train_nats if self.loss_train_nats is not None else self.loss_nats,
            loss_heldout=self.loss_nats,
            num_probe=self.num_samples,
            max_probe=max_probe,
            num_train=self.num_train,
            more_train_available=more_train_available,
            candidates=tuple(s.evidence() for s in self.sites),
        )

    def advice(self, *, max_probe: int | None = None, more_train_available: bool = True) -> Advice:
        """What to do next, why, and what would settle or change it; arguments of :meth:`evidence`."""
        return advise(self.evidence(max_probe=max_probe, more_train_available=more_train_available))

    def unlock(self, site: SiteReport) -> Unlock:
        """What would settle or change the verdict of one candidate."""
        alone = replace(self.evidence(), candidates=(site.evidence(),))
        return advise(alone).unlock

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "verdict": self.verdict,
            "best": self.best.site if self.best else None,
            "caveat": CAVEAT,
            "loss_nats": self.loss_nats,
            "loss_train_nats": self.loss_train_nats,
            "tolerance_nats": self.tolerance_nats,
            "level": self.level,
            "ridge": self.ridge,
            "r_max": self.r_max,
            "num_samples": self.num_samples,
            "num_train": self.num_train,
            "confirmed": self.confirmed.to_dict() if self.confirmed else None,
            "notes": list(self.notes),
            "looks": [asdict(look) for look in self.looks],
            "flops": self.flops,
            "protocol": self.protocol,
            "covariance": {path: asdict(c) for path, c in self.covariance.items()},
            "sites": [s.to_dict() | {"unlock": asdict(self.unlock(s))} for s in self.sites],
            "advice": self.advice().to_dict(),
        }

    def table(self) -> str:
        """Certificates as aligned text, one line a candidate."""
        head = f"{'candidate':<38}{'gain, nats [limits]':>26}{'transfer [upper]':>20}{'p':>8}  verdict"
        lines = [head]
        for s in self.sites:
            gain = f"{s.predicted_gain:.3f} [{s.gain_lcl:.3f}, {s.predicted_gain_ucl:.3f}]"
            moved = f"{s.transfer_gain:+.3f} [{s.transfer_ucl:+.3f}]"
            name = " ".join(filter(None, (s.kind, s.site, s.name)))
            lines.append(f"{name:<38}{gain:>26}{moved:>20}{s.p_value:>8.3f}  {s.verdict}")
        lines.append(f"network: {self.verdict} at tolerance {self.tolerance_nats:.3g} nats, level {self.level:g}")
        return "\n".join(lines)
