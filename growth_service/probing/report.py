"""What a probe returns: one certificate a candidate, one verdict for the network."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from growth_service.blocks import Block
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
    block: dict[str, Any]
    kind: Literal["depth", "width"]
    num_samples: int
    raw_rms: float
    """Root mean square norm of the activation gradient: an upper bound of sqrt(S)."""
    ag_max: float
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
    added_flops: int
    gain_per_flop: float
    """Transferable gain per added FLOP of a training sample."""
    verdict: Verdict
    cross_gradient: FloatArray
    descent_direction: Direction

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, without the matrices; infinite figures become null."""
        data = {f: getattr(self, f) for f in self.__dataclass_fields__}
        del data["cross_gradient"], data["descent_direction"]
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}

    def reading(self) -> CandidateReading:
        """The part that a decision needs."""
        return CandidateReading(
            kind=self.kind,
            path=self.site,
            verdict=self.verdict,
            gain_lower=self.gain_lcl,
            gain_upper=self.predicted_gain_ucl,
            transfer_gain=self.transfer_gain,
            transfer_upper=self.transfer_ucl,
            realisable=self.eta,
            added_flops=self.added_flops,
        )


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
    tolerance_nats: float
    level: float
    ridge: float
    r_max: float
    flops: int
    """What this probe cost."""
    protocol: str
    """sha256 of sites, blocks, inner weights, ridge, tolerance, level: fixed before any gradient."""
    blocks: dict[tuple[str, str], Block]
    """The candidate blocks themselves, by (kind, path): what is scored is what is inserted."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "verdict": self.verdict,
            "best": self.best.site if self.best else None,
            "caveat": CAVEAT,
            "loss_nats": self.loss_nats,
            "tolerance_nats": self.tolerance_nats,
            "level": self.level,
            "ridge": self.ridge,
            "r_max": self.r_max,
            "flops": self.flops,
            "protocol": self.protocol,
            "covariance": {path: asdict(c) for path, c in self.covariance.items()},
            "sites": [s.to_dict() for s in self.sites],
        }

    def table(self) -> str:
        """Certificates as aligned text, one line a candidate."""
        head = f"{'candidate':<38}{'gain, nats [limits]':>26}{'transfer [upper]':>20}{'p':>8}  verdict"
        lines = [head]
        for s in self.sites:
            gain = f"{s.predicted_gain:.3f} [{s.gain_lcl:.3f}, {s.predicted_gain_ucl:.3f}]"
            moved = f"{s.transfer_gain:+.3f} [{s.transfer_ucl:+.3f}]"
            name = f"{s.kind} {s.site}"
            lines.append(f"{name:<38}{gain:>26}{moved:>20}{s.p_value:>8.3f}  {s.verdict}")
        lines.append(f"network: {self.verdict} at tolerance {self.tolerance_nats:.3g} nats, level {self.level:g}")
        return "\n".join(lines)
