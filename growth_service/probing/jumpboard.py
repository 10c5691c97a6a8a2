"""The jumpboard: the network one line-searched step along the projected direction away.

Direction from one fold of training samples (heavy-tailed gradients clipped), step size from
another; if no step lowers the loss there, the step is zero and the jumpboard is the old network.
From there a few steps on the output projection alone say what a short trial would gain. The network
itself is never changed: the block runs from a hook, on a copy.
Source: the auxiliary network of Cheng et al. 2026 (arXiv:2605.08297), built by line search.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from growth_service.blocks import Block, set_projection
from growth_service.blocks.projections import flatten_projection
from growth_service.core.score import FloatArray, descent_direction, whitener
from growth_service.errors import UserError
from growth_service.models.flops import counted as counted_flops
from growth_service.models.sites import resolve, stream_of, with_stream
from growth_service.probing.candidates import (
    Batch,
    Candidate,
    Loss,
    Reduction,
    first_samples,
    is_projected,
    run_model,
    sum_loss,
    untouched,
)
from growth_service.probing.collect import SiteTotal
from growth_service.probing.cost import cost_of
from growth_service.probing.passes import Pass, square_sum, to_array
from growth_service.probing.prepare import Mapper
from growth_service.probing.samples import counted
from growth_service.probing.sums import SiteSums

RELATIVE_STEPS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""Sizes ||a D phi|| / ||z|| that the line search tries, up to r_max."""
CLIP_SHARE = 0.99
TRIAL_RELATIVE_STEP = 3e-3
"""Size of a trial's step on the output projection, relative to the stream."""


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
    held_out_gain: float | None = None
    """J: loss that the step removes on held-out samples, nats; None where there were none."""
    trial_steps: int = 0
    trial_gain: float | None = None
    """J_K: the same after K further steps on the output projection alone."""


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
    """-G Sigma^-1 with the gradient of each sample clipped at the 99th percentile of norms.

    Returns:
        The direction ``[D, K]`` and the FLOPs it took.
    """
    samples = counted(batches, what="batches", need="pass training samples", labelled=True)

    def plain(item: tuple[int, Batch]) -> tuple[SiteSums, list[float]]:
        passing = Pass(model, [candidate], loss=loss, reduction=reduction)
        for first, num, (seen,) in passing.batches([item]):
            total = SiteTotal(seen, num_samples=samples.num, exact=False)
            total.add(seen, first=first, num=num)
            assert seen.g is not None
            norms: list[float] = seen.g.flatten(1).norm(dim=1).tolist()
        return total.sums(), norms

    def clipped(item: tuple[int, Batch]) -> FloatArray:
        passing = Pass(model, [candidate], loss=loss, reduction=reduction)
        for _, num, (seen,) in passing.batches([item]):
            assert seen.g is not None
            norms = seen.g.flatten(1).norm(dim=1)
            shrink = torch.where(norms > limit, limit / torch.where(norms > 0, norms, 1.0), 1.0)
            seen.g.mul_(shrink.reshape(-1, *[1] * (seen.g.ndim - 1)))
            cross = torch.zeros(seen.shape, dtype=seen.g.dtype, device=seen.g.device)
            seen.add_cross(0, num, to=cross)
        return to_array(cross)

    parts = mapper(plain, list(samples.items()))
    limit = float(np.quantile(np.concatenate([norms for _, norms in parts]), CLIP_SHARE))
    total = parts[0][0]
    for sums, _ in parts[1:]:
        total = total.plus(sums)
    cross_DK = np.sum(mapper(clipped, list(samples.items())), axis=0) / samples.num
    cost = cost_of(model, [candidate], samples.first, loss=loss, reduction=reduction, with_pool=False)
    return descent_direction(cross_DK, whitener(total.sigma, ridge=ridge)), 2 * cost.labelled * samples.num


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
    held_out: Sequence[Batch] | None = None,
    trial_steps: int = 0,
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
        held_out: Samples on which to measure the gain of the step, J, and of the trial, J_K.
        trial_steps: K: steps on the output projection alone, from the jumpboard, one batch each.

    Returns:
        The best step of the grid; the zero step where none lowers the loss.

    Raises:
        UserError: If the block is no zero projection of features, or a trial has no held-out samples.
    """
    if not is_projected(block):
        raise UserError(f"a jumpboard moves an output projection: {type(block).__name__} has none")
    if trial_steps and held_out is None:
        raise UserError("a trial is judged on samples it was not trained on: pass held_out")
    run = mapper or (lambda function, items: [function(item) for item in items])
    branch = copy.deepcopy(block).eval()

    def loss_of(batch: Batch, matrix_DK: FloatArray | None) -> float:
        """Summed loss of a batch with the projection set to a matrix."""
        with untouched(model, with_gradient=False), added_block(model, site, branch, matrix_DK):
            return float(sum_loss(loss, run_model(model, batch[0]), batch[1], reduction=reduction))

    def losses(samples: Sequence[Batch], matrix_DK: FloatArray | None) -> float:
        """Mean loss over samples."""
        total = float(np.sum(run(lambda batch: loss_of(batch, matrix_DK), samples)))
        return total / sum(len(targets) for _, targets in samples)

    def sizes(batch: Batch) -> tuple[float, float]:
        """||D phi||^2 and ||z||^2 over the batch, to first order in the projection."""
        seen: list[tuple[float, float]] = []
        with untouched(model, with_gradient=False), measured_step(model, site, branch, direction, seen):
            run_model(model, batch[0])
        return seen[0]

    moved_sq, stream_sq = np.array(run(sizes, batches)).sum(axis=0)
    unit = math.sqrt(moved_sq / stream_sq) if stream_sq > 0 else 0.0
    loss_before = losses(batches, None)
    steps = [r for r in RELATIVE_STEPS if r <= r_max] if unit > 0 else []
    tried = [(relative, losses(batches, relative / unit * direction)) for relative in steps]
    best = min(tried, key=lambda t: t[1], default=(0.0, loss_before))
    if not best[1] < loss_before:
        best = (0.0, loss_before)
    matrix_DK = best[0] / unit * direction if best[0] > 0 else np.zeros_like(direction)
    gain = trial = None
    passes = 2 + len(steps)
    if held_out is not None:
        before = losses(held_out, None)
        gain = before - losses(held_out, matrix_DK) if best[0] else 0.0
        if trial_steps and unit > 0:
            rate = TRIAL_RELATIVE_STEP / unit * float(np.sqrt(np.square(direction).mean()))
            trained_DK = _trial(
                model, site, branch, matrix_DK, batches, loss=loss, reduction=reduction, steps=trial_steps, rate=rate
            )
            trial = before - losses(held_out, trained_DK)
    inputs, targets = batches[0]
    one_sample = counted_flops(lambda: loss_of((first_samples(inputs, 1), targets[:1]), direction))
    num = sum(len(t) for _, t in batches)
    return Jumpboard(
        matrix_DK=matrix_DK,
        relative_step=best[0],
        loss_before=loss_before,
        loss_after=best[1],
        tried=tuple(tried),
        flops=one_sample * num * passes,
        held_out_gain=gain,
        trial_steps=trial_steps,
        trial_gain=trial,
    )


def _trial(
    model: nn.Module,
    site: str,
    branch: Block,
    matrix_DK: FloatArray,
    batches: Sequence[Batch],
    *,
    loss: Loss,
    reduction: Reduction,
    steps: int,
    rate: float,
) -> FloatArray:
    """K steps of Adam on the output projection alone, from the jumpboard. ``[D, K]``."""
    set_projection(branch.project, torch.from_numpy(np.ascontiguousarray(matrix_DK)))
    parameters = list(branch.project.parameters())
    optimizer = optim.Adam(parameters, lr=rate)
    for step in range(steps):
        inputs, targets = batches[step % len(batches)]
        with untouched(model, with_gradient=True), _hooked(model, site, branch):
            total = sum_loss(loss, run_model(model, inputs), targets, reduction=reduction) / len(targets)
            found = torch.autograd.grad(total, parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return to_array(flatten_projection(branch.project))


@contextmanager
def added_block(model: nn.Module, site: str, block: Block | None, matrix_DK: FloatArray | None) -> Iterator[None]:
    """Run a copy of the block with this projection on the stream at ``site`` while inside; None: nothing is added."""
    if matrix_DK is None or block is None:
        yield
        return
    branch = copy.deepcopy(block).eval()
    set_projection(branch.project, torch.from_numpy(np.ascontiguousarray(matrix_DK)))
    with _hooked(model, site, branch):
        yield


@contextmanager
def _hooked(model: nn.Module, site: str, branch: Block) -> Iterator[None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        z = stream_of(output, path=site)
        return with_stream(output, z + branch(z.to(next(branch.parameters()).dtype)).to(z.dtype))

    handle = resolve(model, site).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def measured_step(
    model: nn.Module, site: str, block: Block, matrix_DK: FloatArray, seen: list[tuple[float, float]]
) -> Iterator[None]:
    """Note ||delta z||^2 of what a projection would add, to first order, and ||z||^2, of each batch."""
    branch = copy.deepcopy(block).eval()
    set_projection(branch.project, torch.from_numpy(np.ascontiguousarray(matrix_DK)))

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        z: Tensor = stream_of(output, path=site).to(next(branch.parameters()).dtype)
        delta = branch.project(branch.features(z))
        seen.append((square_sum(delta), square_sum(z)))

    handle = resolve(model, site).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
