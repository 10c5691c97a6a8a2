"""What a probe costs in FLOPs: counted on one sample, multiplied, never measured on the way."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from growth_service.core.certificate import certificate_flops
from growth_service.models.flops import FlopCounter, block_flops_per_sample
from growth_service.probing.candidates import (
    Batch,
    Candidate,
    Loss,
    Reduction,
    first_samples,
    is_projected,
)
from growth_service.probing.passes import Pass, Seen
from growth_service.probing.sketch import MAX_EXACT, MAX_NUMBERS
from growth_service.probing.sums import thinning


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """FLOPs of one sample, and of what each candidate would add to a training sample."""

    labelled: int
    """Forward, data-only backward, features and cross-gradients of all candidates."""
    unlabelled: int
    """Forward and features of all candidates."""
    added: list[int]
    shapes: list[tuple[int, int, int]]
    """Rows D, joint features J and positions P of each candidate; J = 0 where rows have features of their own."""


def cost_of(
    model: nn.Module, candidates: list[Candidate], batch: Batch, *, loss: Loss, reduction: Reduction, with_pool: bool
) -> Cost:
    """Count one sample of a batch."""
    inputs, targets = batch
    one = first_samples(inputs, 1)
    flops, seen = _one_sample(model, candidates, (one, targets[:1]), loss=loss, reduction=reduction)
    unlabelled = _one_sample(model, candidates, one, loss=None, reduction=reduction)[0] if with_pool else 0
    return Cost(
        labelled=flops,
        unlabelled=unlabelled,
        added=_added_flops(candidates, seen),
        shapes=[(s.shape[0], s.shape[1] if s.shares_features else 0, s.num_positions) for s in seen],
    )


def _one_sample(
    model: nn.Module,
    candidates: list[Candidate],
    one: Any,
    *,
    loss: Loss | None,
    reduction: Reduction,
    copying: bool = False,
) -> tuple[int, list[Seen]]:
    """FLOPs of one sample, and what candidates see of it."""
    passing = Pass(model, candidates, loss=loss, reduction=reduction, copying=copying)
    with FlopCounter() as counter:
        for _, num, found in passing.batches([(0, one)]):
            seen = list(found)
            for s in seen:
                if s.g is not None:
                    s.add_cross(0, num, to=torch.zeros(s.shape, dtype=s.g.dtype, device=s.g.device))
    if passing.copying and not copying:  # it ran twice, to find out that it writes into its streams
        return _one_sample(model, candidates, one, loss=loss, reduction=reduction, copying=True)
    return counter.flops, seen


def probe_flops(
    cost: Cost, *, num_train: int, num_pool: int, num_held_out: int, num_chunks: int, resamples: list[int]
) -> int:
    """FLOPs of a whole probe: passes, second moments, sketches, certificates.

    Args:
        cost: Of one sample.
        num_train: Training samples (0: none).
        num_pool: Samples of a pool of its own (0: the training samples serve).
        num_held_out: Held-out samples.
        num_chunks: Rows of a certificate.
        resamples: Sign flips taken by each candidate.
    """
    total = cost.labelled * (num_train + num_held_out) + cost.unlabelled * num_pool
    for (rows, features, positions), flips in zip(cost.shapes, resamples, strict=True):
        if features and num_pool:
            total += 2 * num_pool * positions * features**2
        elif features and num_train:
            thin = thinning(num_samples=num_train, num_positions=positions, num_features=features)
            total += 2 * (num_train // thin.every) * (thin.positions or positions) * features**2
        numbers = rows * features if rows * features <= MAX_EXACT else MAX_NUMBERS
        total += 2 * num_chunks * features * numbers
        total += certificate_flops(num_rows=num_chunks, numbers=numbers, features=features, num_resamples=flips)
    return total


def _added_flops(candidates: list[Candidate], seen: list[Seen]) -> list[int]:
    """FLOPs that each candidate would add to a training sample; alike blocks on alike streams are counted once."""
    counts: dict[Any, int] = {}
    found = []
    for candidate, s in zip(candidates, seen, strict=True):
        if candidate.added_flops is not None:
            found.append(candidate.added_flops)
            continue
        config = json.dumps(candidate.block.config()) if is_projected(candidate.block) else id(candidate.block)
        key = (config, s.source.shape)
        if key not in counts:
            with torch.enable_grad():
                counts[key] = block_flops_per_sample(candidate.block, s.source)
        found.append(counts[key])
    return found
