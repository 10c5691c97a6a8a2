"""From the rows of one candidate to its certificate."""

import math
from dataclasses import dataclass

import numpy as np

from growth_service.blocks import Block
from growth_service.core import certificate as cert
from growth_service.core.score import (
    FloatArray,
    Whitener,
    descent_direction,
    kappa,
    predicted_gain,
    saturation_score,
)
from growth_service.probing import collect
from growth_service.probing.candidates import Candidate
from growth_service.probing.report import Direction, SiteReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What all candidates of one look share."""

    loss_nats: float
    """Mean loss on the probe samples: no gain is larger."""
    tolerance: float
    level: float
    r_max: float
    num_candidates: int
    num_train: int
    """Training samples behind the directions; 0: none were given."""
    seed: int

    @property
    def max_resamples(self) -> int:
        """Sign flips that resolve the corrected level."""
        return math.ceil(20 * self.num_candidates / self.level)


def certify(
    candidate: Candidate,
    rows: collect.SiteUnits,
    *,
    whitening: Whitener,
    inflation: float,
    train_cross: FloatArray,
    stream_norm: float,
    added_flops: int,
    look: Look,
    s_plugin: float,
) -> tuple[SiteReport, int]:
    """From the rows of one candidate to its certificate, and what that cost in FLOPs.

    Inflation of scores by the finite pool is divided out.
    """
    gram_NN = rows.psi_NM @ rows.psi_NM.T / inflation
    n = gram_NN.shape[0]
    stat = cert.u_statistic(gram_NN)
    s_train = saturation_score(train_cross, whitening)
    moved = cert.transfer(rows.along_N, train_score=s_train, level=look.level)

    def gain(score: float) -> float:
        return predicted_gain(score, stream_norm=stream_norm, r_max=look.r_max, loss_nats=look.loss_nats)

    def moved_gain(rate: float) -> float:
        return min(look.r_max * stream_norm * rate, look.loss_nats)

    p_value = cert.significance(
        gram_NN,
        stat,
        threshold=look.level / look.num_candidates,
        max_resamples=look.max_resamples,
        seed=look.seed,
    )
    flops = cert.certificate_flops(
        num_units=n,
        numbers=rows.psi_NM.shape[1],
        features=train_cross.shape[1],
        num_resamples=p_value.resamples,
    )
    lower = stat.lower_limit(look.level / look.num_candidates)
    upper = stat.upper_limit(look.level)
    gains = cert.Gains(
        lower=gain(lower),
        upper=gain(upper),
        transfer_upper=moved_gain(moved.upper) if look.num_train else math.inf,
        p_value=p_value.value,
    )
    raw_sq = float(np.square(rows.gradient_norm_N).mean())
    direction = descent_direction(train_cross, whitening)
    cosine_denominator = math.sqrt(s_train * max(stat.value, 0.0))
    transfer_gain = moved_gain(moved.value)
    report = SiteReport(
        site=candidate.path,
        block=candidate.block.config(),
        kind=candidate.kind,
        num_samples=n,
        raw_rms=math.sqrt(raw_sq),
        ag_max=float(rows.gradient_norm_N.max()),
        s_plugin=s_plugin,
        s=stat.value,
        noise_sd=stat.noise_sd,
        lcl=lower,
        ucl=upper,
        p_value=gains.p_value,
        kappa=kappa(stat.value, stream_norm=stream_norm),
        kappa_ucl=kappa(upper, stream_norm=stream_norm),
        predicted_gain=gain(stat.value),
        gain_lcl=gains.lower,
        predicted_gain_ucl=gains.upper,
        noise_gain=gain(stat.noise_sd),
        s_train=s_train,
        realizable_share=min(1.0, max(stat.value, 0.0) / raw_sq) if raw_sq > 0 else 0.0,
        transfer=moved.value,
        transfer_gain=transfer_gain,
        transfer_ucl=gains.transfer_upper,
        cosine=min(1.0, moved.value * math.sqrt(s_train) / cosine_denominator) if cosine_denominator > 0 else 0.0,
        eta=cert.realisable_share(stat.value, cov_trace=stat.cov_trace, num_train=max(look.num_train, 1)),
        half_gain_samples=cert.half_gain_samples(stat.value, cov_trace=stat.cov_trace),
        snr=stat.snr,
        added_flops=added_flops,
        gain_per_flop=max(transfer_gain if look.num_train else gain(stat.value), 0.0) / max(added_flops, 1),
        verdict=cert.candidate_verdict(
            gains, tolerance=look.tolerance, level=look.level, num_candidates=look.num_candidates
        ),
        cross_gradient=train_cross,
        descent_direction=_as_direction(direction, candidate.block),
    )
    return report, flops


def _as_direction(matrix_DK: FloatArray, block: Block) -> Direction:
    has_bias = block.project.bias is not None
    weight = matrix_DK[:, :-1] if has_bias else matrix_DK
    shape = tuple(block.project.weight.shape)
    return Direction(matrix_DK=matrix_DK, weight=weight.reshape(shape), bias=matrix_DK[:, -1] if has_bias else None)
