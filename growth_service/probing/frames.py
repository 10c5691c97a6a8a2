"""From the sums over training samples (or a pool) to how held-out gradients are whitened."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from growth_service.blocks.projections import projection_shape
from growth_service.core.score import (
    FloatArray,
    Whitener,
    descent_direction,
    partial_out,
    pool_inflation,
    saturation_score,
    whitener,
)
from growth_service.probing.candidates import Candidate
from growth_service.probing.jacobian import NormalSolver, ParameterTangent
from growth_service.probing.rows import SiteRows
from growth_service.probing.sums import Frame, SiteSums, check_finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The metric of one candidate's features, and the training gradient in it."""

    frame: Frame
    inflation: float
    """Factor by which the finite pool inflates scores; they are divided by it."""
    train_cross_DK: FloatArray
    """Mean cross-gradient of the training samples, existing features taken off where asked for."""
    s_train: float
    stream_norm: float
    """Root mean square over samples of ||z||."""
    num_rows: int
    """D."""
    num_features: int
    """K, without the features that are taken off."""
    whitening: Whitener | None
    """None: the metric is applied by ``solver``."""
    keep_JK: FloatArray | None = None
    """Takes existing features off; None: there are none."""
    notes: tuple[str, ...] = ()
    solver: NormalSolver | None = None

    @property
    def direction_DK(self) -> FloatArray:
        """-G Sigma^-1 of the training gradient."""
        if self.keep_JK is None:
            return -self.frame.along_DJ
        return descent_direction(self.train_cross_DK, self.metric)

    @property
    def metric(self) -> Whitener:
        """The whitening; a general block has none."""
        assert self.whitening is not None
        return self.whitening

    def of_new(self, cross_DJ: FloatArray) -> FloatArray:
        """A joint cross-gradient with what existing features can express taken off. ``[D, K]``."""
        return cross_DJ if self.keep_JK is None else cross_DJ @ self.keep_JK

    def descent(self, cross_DJ: FloatArray) -> FloatArray:
        """-G Sigma^-1. ``[D, K]``."""
        if self.whitening is None:
            assert self.solver is not None
            return -self.solver.solve(cross_DJ)
        return descent_direction(self.of_new(cross_DJ), self.whitening)

    def gram(self, rows: SiteRows) -> FloatArray:
        """Inner products of chunk sums in the metric. ``[N, N]``."""
        rows_NM = rows.rows.full()
        if self.solver is None:
            return rows_NM @ rows_NM.T
        gram_NN = rows_NM @ self.solver.solve(rows_NM).T
        return (gram_NN + gram_NN.T) / 2

    def score(self, cross_DJ: FloatArray) -> float:
        """Plug-in score of a mean cross-gradient."""
        if self.whitening is None:
            return -float((cross_DJ * self.descent(cross_DJ)).sum())
        return saturation_score(self.of_new(cross_DJ), self.whitening)


def geometry(
    candidate: Candidate,
    pooled: SiteSums,
    *,
    num_pool: int,
    train_cross_DJ: FloatArray,
    ridge: float,
    seed: int,
) -> Geometry:
    """Whiten one candidate's features.

    Args:
        candidate: The candidate.
        pooled: Sums over the pool (the training samples, where there is no other).
        num_pool: Samples in it.
        train_cross_DJ: Mean cross-gradient of the training samples; zeros where there are none.
        ridge: Share of the mean diagonal added to the second moment.
        seed: Of trace probes of a general block.

    Raises:
        UserError: If features are not finite.
    """
    name = candidate.path
    stream_norm = pooled.stream_norm
    check_finite(name, np.array([stream_norm]))
    check_finite(name, train_cross_DJ)
    if pooled.streams:
        return _general(candidate, pooled, train_cross_DJ, ridge=ridge, seed=seed, stream_norm=stream_norm)
    sigma, cross, keep_JK = pooled.sigma, train_cross_DJ, None
    check_finite(name, sigma)
    inflation = 1.0
    if pooled.kept_b:  # of the joint features, all estimated
        inflation = pool_inflation(pooled.half_a / pooled.kept_a, pooled.half_b / pooled.kept_b, ridge=ridge)
    if candidate.beside:
        num_new = projection_shape(candidate.block.project)[1]
        keep_JK, sigma = partial_out(sigma, num_new=num_new, ridge=ridge)
        cross = cross @ keep_JK
    whitening = whitener(sigma, ridge=ridge)
    white_DR = whitening.whiten(cross)
    along = whitening.back(white_DR)
    held = precision_of(candidate.block)  # of what is kept while gradients are collected
    whitening = whitening.held_in(held)
    root = whitening.inv_sqrt
    if keep_JK is not None:
        root, along = (keep_JK @ root).astype(held), along @ keep_JK.T
    return Geometry(
        frame=Frame(root=root, along_DJ=along.astype(held, copy=False)),
        inflation=inflation,
        train_cross_DK=cross.astype(held, copy=False),
        s_train=float(np.square(white_DR).sum()),
        stream_norm=stream_norm,
        num_rows=cross.shape[0],
        num_features=sigma.shape[-1],
        whitening=whitening,
        keep_JK=keep_JK,
        notes=_notes(rank=whitening.rank, num_features=sigma.shape[-1], num_pool=num_pool, ridge=ridge),
    )


def _general(
    candidate: Candidate, pooled: SiteSums, cross_DJ: FloatArray, *, ridge: float, seed: int, stream_norm: float
) -> Geometry:
    tangent = ParameterTangent(candidate.block)
    kept = pooled.kept_a + pooled.kept_b
    solver = NormalSolver(tangent, list(pooled.streams), num_samples=kept, ridge=ridge, seed=seed)
    along = solver.solve(cross_DJ)
    return Geometry(
        frame=Frame(root=None, along_DJ=along),
        inflation=1.0,
        train_cross_DK=cross_DJ,
        s_train=float((cross_DJ * along).sum()),
        stream_norm=stream_norm,
        num_rows=1,
        num_features=tangent.size,
        whitening=None,
        notes=("a general block: scored through Jacobian products, the inflation of its pool is not measured",),
        solver=solver,
    )


def precision_of(block: nn.Module) -> np.dtype[Any]:
    """In which numbers measured through a block are kept: double for double, single for all others."""
    double = next(block.parameters()).dtype == torch.float64
    return np.dtype(np.float64 if double else np.float32)


def _notes(*, rank: int, num_features: int, num_pool: int, ridge: float) -> tuple[str, ...]:
    if rank == 0:
        return ("all features of the block are zero here: it can express nothing, at any loss",)
    if num_pool < num_features:
        return (
            f"the second moment of {num_features} features comes from {num_pool} samples: scores hold within the "
            f"ridge of {ridge:g}, a larger pool would sharpen them",
        )
    return ()
