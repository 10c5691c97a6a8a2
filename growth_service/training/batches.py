"""Which samples come next: a pure function of seed, subset size and position."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from growth_service.core.streams import stream_seed
from growth_service.training.data import Split
from growth_service.training.gradients import Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPosition:
    """Where training is in the data: pass and offset into the present subset."""

    epoch: int = 0
    offset: int = 0


def next_indices(position: DataPosition, *, subset: int, batch_size: int, seed: int) -> tuple[Tensor, DataPosition]:
    """Indices of the next global batch; each pass over the subset is a new permutation.

    A batch never crosses passes: a rest smaller than a batch is left for another pass.

    Args:
        position: Where the last batch ended.
        subset: Samples in force, at least one batch.
        batch_size: Of the global batch.
        seed: Of the trial's data stream.

    Returns:
        Indices ``[batch_size]`` into the training split, and the new position.
    """
    if position.offset + batch_size > subset:
        position = DataPosition(epoch=position.epoch + 1)
    order = np.random.default_rng(stream_seed(seed, "epoch", position.epoch, subset)).permutation(subset)
    taken = order[position.offset : position.offset + batch_size]
    return torch.from_numpy(taken), replace(position, offset=position.offset + batch_size)


def shards_of(split: Split, indices: Tensor, *, num_shards: int) -> list[Shard]:
    """The batch cut into its fixed shards."""
    return [(split.inputs[part], split.targets[part]) for part in indices.chunk(num_shards)]


def chunks_of(split: Split, *, size: int, limit: int | None = None) -> list[Shard]:
    """A split (or its first ``limit`` samples) in order, in batches of ``size``."""
    num = len(split.targets) if limit is None else min(limit, len(split.targets))
    return [(split.inputs[i : min(i + size, num)], split.targets[i : min(i + size, num)]) for i in range(0, num, size)]
