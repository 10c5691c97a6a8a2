"""Losses and accuracy of a network on a split, spread over ranks, summed in a fixed order."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from growth_service.training.batches import chunks_of
from growth_service.training.data import Split
from growth_service.training.gradients import Shard
from growth_service.training.ranks import Ranks

CHUNK = 256


class Evaluation(NamedTuple):
    """Means over a split."""

    loss: float
    accuracy: float


def loss_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies of samples, in nats; that of a sequence is the mean over its tokens.

    Args:
        outputs: Logits ``[B, classes]``, or ``[B, T, vocab]``.
        targets: ``[B]``, or ``[B, T]``.
    """
    if targets.ndim == 1:
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")
    total = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / targets.shape[1]


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, *, ranks: Ranks, limit: int | None = None) -> Evaluation:
    """Mean loss and accuracy (of tokens, for sequences) in eval mode; the training mode is put back.

    Args:
        model: The network, the same on every rank.
        split: Samples.
        ranks: Share the chunks.
        limit: Only the first so many samples (the nested training subset).
    """
    was_training = model.training
    model.eval()

    def one(chunk: Shard) -> tuple[float, float, int]:
        outputs = model(chunk[0])
        correct = float((outputs.argmax(dim=-1) == chunk[1]).sum()) * len(chunk[1]) / chunk[1].numel()
        return float(loss_sum(outputs.double(), chunk[1])), correct, len(chunk[1])

    parts = ranks.map(one, chunks_of(split, size=CHUNK, limit=limit))
    model.train(was_training)
    num = sum(p[2] for p in parts)
    return Evaluation(loss=sum(p[0] for p in parts) / num, accuracy=sum(p[1] for p in parts) / num)
