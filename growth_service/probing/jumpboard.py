"""The jumpboard: the network one line-searched step along the projected direction away.

Direction from one fold of training samples (heavy-tailed gradients clipped), step size from
another; if no step lowers the loss there, the step is zero and the jumpboard is the old network.
Source: the auxiliary network of Cheng et al. 2026 (arXiv:2605.08297), built by line search.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from growth_service.blocks import Block, stream_positions, tangent_features
from growth_service.core.score import FloatArray, descent_direction, whitener
from growth_service.models.flops import FlopCounter, counted
from growth_service.models.sites import resolve, stream_of, with_stream
from growth_service.probing import collect
from growth_service.probing.candidates import Batch, Candidate, Loss, Reduction, summed, untouched
from growth_service.probing.probe import Mapper, numbered

RELATIVE_STEPS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""Sizes ||a D phi|| / ||z|| that the line search tries, up to r_max."""
CLIP_SHARE = 0.99


@dataclass(frozen=True, kw_only=True, slots=True)
class Jumpboard:
    """A line-searched step of one candidate."""

    matrix_DK: FloatArray
    """Output projection of the jumpboard: step times direction; zeros where no step helps."""
    relative_step: float
    """||delta z|| / ||z|| of the chosen step; 0.0: the jumpboard is the old network."""
    loss_before: float
    loss_after: float
    """Mean losses on the line-search fold, nats."""
    tried: tuple[tuple[float, float], ...]
    """(relative step, loss) of each size tried."""
    flops: int


def clipped_direction(
    model: nn.Module,
    *,
    candidate: Candidate,
    batches: Sequence[Batch],
    loss: Loss,
    reduction: Reduction,
    ridge: float,
    mapper: Mapper,
) -> tuple[FloatArray, int]:
    """-G Sigma^-1 with the cross-gradient of each sample clipped at the 99th percentile of its norm.

    Returns:
        The direction ``[D, K]`` and the FLOPs it took.
    """

    def one(item: tuple[int, Batch]) -> tuple[collect.Moments, collect.Units]:
        first, batch = item
        plain = collect.moments(model, [candidate], batch, first=first, loss=loss, reduction=reduction)
        width, features = plain.sites[0].cross_DK.shape
        identity, nothing = np.eye(features), np.zeros((width, features))
        norms = collect.units(
            model,
            [candidate],
            batch,
            inv_sqrt=[identity],
            train_whitened=[nothing],
            loss=loss,
            reduction=reduction,
            sketch_seed=0,
        )
        return plain, norms

    parts = mapper(one, numbered(batches, size=lambda batch: len(batch[1])))
    norms_N = np.concatenate([units.sites[0].gradient_norm_N for _, units in parts])
    limit = float(np.quantile(norms_N, CLIP_SHARE))

    def clipped(batch: Batch) -> tuple[FloatArray, int]:
        with FlopCounter() as counter:
            cross_DK = _clipped_cross(model, candidate, batch, loss=loss, reduction=reduction, limit=limit)
        return cross_DK, counter.flops

    total = parts[0][0]
    for plain, _ in parts[1:]:
        total = total.plus(plain)
    clipped_parts = mapper(clipped, batches)
    cross_DK = np.sum([cross for cross, _ in clipped_parts], axis=0) / total.num_samples
    sigma_KK = total.sites[0].sigma_KK
    flops = sum(plain.flops + units.flops for plain, units in parts) + sum(cost for _, cost in clipped_parts)
    return descent_direction(cross_DK, whitener(sigma_KK, ridge=ridge)), flops


def jumpboard(
    model: nn.Module,
    *,
    site: str,
    block: Block,
    direction: FloatArray,
    batches: Sequence[Batch],
    loss: Loss,
    reduction: Reduction,
    r_max: float = 0.3,
    mapper: Mapper | None = None,
) -> Jumpboard:
    """Line-search a step of the block's projection along ``direction``; the network is unchanged.

    Args:
        model: The network without the block.
        site: Where the block would be inserted.
        block: The candidate.
        direction: Of its projection. ``[D, K]``, for example ``report.best.descent_direction.matrix_DK``.
        batches: Training samples, disjoint from those that gave the direction.
        loss: Of outputs and targets.
        reduction: What it does over samples.
        r_max: Largest relative step, in (0, 1).
        mapper: As in :func:`probe`.

    Returns:
        The best step of the grid; the zero step where none lowers the loss.
    """
    run = mapper or (lambda function, items: [function(item) for item in items])
    matrix = torch.from_numpy(np.ascontiguousarray(direction))

    def sizes(batch: Batch) -> tuple[float, float, float, int]:
        """Sums over the batch: ||D phi||^2, ||z||^2, loss, samples."""
        moved: list[tuple[float, float]] = []
        with untouched(model, with_gradient=False), _added(model, site, block, matrix, scale=0.0, seen=moved):
            value = float(_sum_loss(model, batch, loss, reduction))
        return moved[0][0], moved[0][1], value, len(batch[1])

    sums = np.array(run(sizes, batches)).sum(axis=0)
    num, loss_before = int(sums[3]), float(sums[2] / sums[3])
    unit = math.sqrt(sums[0] / sums[1]) if sums[1] > 0 else 0.0
    tried = []
    steps = [r for r in RELATIVE_STEPS if r <= r_max] if unit > 0 else []
    for relative in steps:

        def at(batch: Batch, scale: float = relative / unit) -> float:
            with untouched(model, with_gradient=False), _added(model, site, block, matrix, scale=scale):
                return float(_sum_loss(model, batch, loss, reduction))

        tried.append((relative, float(np.sum(run(at, batches))) / num))
    inputs, targets = batches[0]
    flops = counted(lambda: sizes((inputs[:1], targets[:1]))) * num * (1 + len(steps))
    best = min(tried, key=lambda t: t[1], default=(0.0, loss_before))
    if not best[1] < loss_before:
        best = (0.0, loss_before)
    scale = best[0] / unit if unit > 0 else 0.0
    return Jumpboard(
        matrix_DK=scale * direction,
        relative_step=best[0],
        loss_before=loss_before,
        loss_after=best[1],
        tried=tuple(tried),
        flops=flops,
    )


def _clipped_cross(
    model: nn.Module, candidate: Candidate, batch: Batch, *, loss: Loss, reduction: Reduction, limit: float
) -> FloatArray:
    """Sum of cross-gradients of one batch, each sample's gradient scaled down to norm ``limit``."""
    with untouched(model, with_gradient=True):
        _, _, _, taps, gradients, _ = collect.forward_backward(
            model, [candidate], batch, loss=loss, reduction=reduction
        )
        g = stream_positions(gradients[candidate.path])
        norms = g.double().square().sum(dim=(1, 2)).sqrt()
        shrink = torch.clamp(limit / norms.clamp(min=torch.finfo(torch.float64).tiny), max=1.0).to(g)
        phi = collect.candidate_features(candidate, taps)
        cross: FloatArray = torch.einsum("bdp,bkp->dk", g * shrink[:, None, None], phi).double().cpu().numpy()
    return cross


@contextmanager
def _added(
    model: nn.Module,
    site: str,
    block: Block,
    matrix_DK: Tensor,
    *,
    scale: float,
    seen: list[tuple[float, float]] | None = None,
) -> Iterator[None]:
    """Add ``scale * matrix phi(z)`` to the stream at ``site`` while inside; note its size."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        z = stream_of(output, path=site)
        delta = torch.einsum("dk,bkp->bdp", matrix_DK.to(z), tangent_features(block, z))
        if seen is not None:
            seen.append((float(delta.double().square().sum()), float(z.double().square().sum())))
        layout = delta.transpose(1, 2) if z.ndim == 3 else delta
        moved = z + scale * layout.reshape(z.shape) if scale else z
        return with_stream(output, moved)

    handle = resolve(model, site).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _sum_loss(model: nn.Module, batch: Batch, loss: Callable[[Any, Any], Tensor], reduction: Reduction) -> Tensor:
    inputs, targets = batch
    return summed(loss(model(inputs), targets), reduction=reduction, num_samples=len(targets))
