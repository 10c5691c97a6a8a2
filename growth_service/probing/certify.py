"""From the rows of one candidate to its certificate."""

import math
from dataclasses import dataclass

from growth_service.blocks.projections import projection_shape
from growth_service.core import certificate as cert
from growth_service.core.score import FloatArray, gradmax_score, kappa, predicted_gain
from growth_service.probing.candidates import Candidate, is_projected
from growth_service.probing.frames import Geometry
from growth_service.probing.report import Direction, SiteReport
from growth_service.probing.rows import SiteRows

ENOUGH_SAMPLES = 32
"""Independent samples below which the upper limit covers too seldom (measured: 0.75 at 8, 0.88 at 16)."""
SORTED_Z = 4.0
"""Standard errors by which neighbouring chunks may agree more than distant ones before samples look sorted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What all candidates of one look share."""

    loss_nats: float
    """Mean loss on the probe samples: no gain is larger."""
    tolerance: float
    level: float
    """Error level of this look over all candidates."""
    r_max: float
    num_candidates: int
    num_samples: int
    """Held-out samples."""
    num_train: int
    """Training samples behind the directions; 0: none were given."""
    seed: int

    @property
    def max_resamples(self) -> int:
        """Sign flips that resolve the corrected level."""
        return math.ceil(20 * self.num_candidates / self.level)


def certify(
    candidate: Candidate, rows: SiteRows, *, geometry: Geometry, added_flops: int, look: Look
) -> tuple[SiteReport, int]:
    """From the rows of one candidate to its certificate, and the sign flips that it took.

    Inflation of scores by the finite pool is divided out.
    """
    n, num_rows = look.num_samples, len(rows.along_N)
    scale = num_rows / n  # sums over chunks, in units of one chunk's mean
    gram_NN = geometry.gram(rows) * scale**2 / geometry.inflation
    s_plugin = geometry.score(rows.cross_DJ / n)
    residual = geometry.solver.residual if geometry.solver is not None else 0.0
    stat = cert.u_statistic(gram_NN, num_samples=n, plug_in=s_plugin / geometry.inflation)
    deflate = math.sqrt(geometry.inflation)
    moved = cert.transfer(rows.along_N * scale / deflate, train_score=geometry.s_train, level=look.level)

    def gain(score: float) -> float:
        return predicted_gain(score, stream_norm=geometry.stream_norm, r_max=look.r_max, loss_nats=look.loss_nats)

    def moved_gain(rate: float) -> float:
        return min(look.r_max * geometry.stream_norm * rate, look.loss_nats)

    p_value = cert.significance(
        gram_NN,
        stat,
        threshold=look.level / look.num_candidates,
        max_resamples=look.max_resamples,
        seed=look.seed,
    )
    lower = stat.lower_limit(look.level / look.num_candidates)
    upper = stat.upper_limit(look.level)
    gains = cert.Gains(
        lower=gain(lower),
        upper=gain(upper),
        transfer_upper=moved_gain(moved.upper) if look.num_train else math.inf,
        p_value=p_value.value,
    )
    raw_sq = rows.gradient_sq / n
    transfer_gain = moved_gain(moved.value)
    verdict = cert.candidate_verdict(
        gains, tolerance=look.tolerance, level=look.level, num_candidates=look.num_candidates
    )
    notes = geometry.notes
    if residual > 1e-3:
        notes += (f"conjugate gradients left a relative residual of {residual:.2g}: raise the ridge",)
    if n < ENOUGH_SAMPLES:
        notes += (f"{n} samples are too few for a verdict: limits hold from {ENOUGH_SAMPLES} on",)
        verdict = "undetermined"
    if cert.order_excess(gram_NN, stat) > SORTED_Z:
        notes += (
            "neighbouring samples agree more than distant ones: they look sorted, and no limit holds; shuffle them",
        )
        verdict = "undetermined"
    cosine = moved.value / math.sqrt(stat.value) if stat.value > 0 else 0.0
    report = SiteReport(
        site=candidate.path,
        name=candidate.name,
        block=candidate.block.config() if is_projected(candidate.block) else {"type": type(candidate.block).__name__},
        kind=candidate.kind,
        num_samples=n,
        width=geometry.num_rows,
        features=geometry.num_features,
        raw_rms=math.sqrt(raw_sq),
        ag_max=rows.gradient_max,
        gradmax=gradmax_score(rows.cross_DJ / n),
        s_plugin=s_plugin,
        s=stat.value,
        noise_sd=stat.noise_sd,
        lcl=lower,
        ucl=upper,
        p_value=gains.p_value,
        kappa=kappa(stat.value, stream_norm=geometry.stream_norm),
        kappa_ucl=kappa(upper, stream_norm=geometry.stream_norm),
        predicted_gain=gain(stat.value),
        gain_lcl=gains.lower,
        predicted_gain_ucl=gains.upper,
        noise_gain=gain(stat.noise_sd),
        s_train=geometry.s_train,
        train_gain=gain(geometry.s_train),
        realizable_share=min(1.0, max(stat.value, 0.0) / raw_sq) if raw_sq > 0 else 0.0,
        transfer=moved.value,
        transfer_gain=transfer_gain,
        transfer_ucl=gains.transfer_upper,
        cosine=min(1.0, max(-1.0, cosine)),
        eta=cert.realisable_share(stat.value, cov_trace=stat.cov_trace, num_train=max(look.num_train, 1)),
        half_gain_samples=cert.half_gain_samples(stat.value, cov_trace=stat.cov_trace),
        snr=stat.snr,
        effective_rank=stat.effective_rank,
        added_flops=added_flops,
        gain_per_flop=max(transfer_gain if look.num_train else gain(stat.value), 0.0) / max(added_flops, 1),
        verdict=verdict,
        notes=notes,
        cross_gradient=geometry.train_cross_DK if look.num_train else geometry.of_new(rows.cross_DJ / n),
        descent_direction=_as_direction(
            geometry.direction_DK if look.num_train else geometry.descent(rows.cross_DJ / n), candidate
        ),
    )
    return report, p_value.resamples


def _as_direction(matrix_DK: FloatArray, candidate: Candidate) -> Direction:
    project = getattr(candidate.block, "project", None)
    weight = getattr(project, "weight", None)
    if weight is None or projection_shape(project) != matrix_DK.shape:  # type: ignore[arg-type]
        return Direction(matrix_DK=matrix_DK, weight=matrix_DK, bias=None)
    has_bias = project.bias is not None  # type: ignore[union-attr]
    found = matrix_DK[:, :-1] if has_bias else matrix_DK
    return Direction(
        matrix_DK=matrix_DK, weight=found.reshape(tuple(weight.shape)), bias=matrix_DK[:, -1] if has_bias else None
    )
