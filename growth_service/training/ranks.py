"""The ranks of one trial: the same work with the same bits on one process or several.

Work is cut into pieces that do not depend on the number of ranks (four shards of a batch,
chunks of a data set); results are combined in one fixed order, whoever computed them.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from growth_service.errors import GrowthError, RankDisagreementError, UserError


class Ranks:
    """This process's place in the process group of its trial; one rank without a group."""

    def __init__(self) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if grouped else 0
        self.world_size = dist.get_world_size() if grouped else 1

    @property
    def is_first(self) -> bool:
        """Rank 0 decides, writes and reports."""
        return self.rank == 0

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Apply ``function`` to all items, each on one rank; every rank gets all results in order."""
        if self.world_size == 1:
            return [function(item) for item in items]
        mine: list[Any] = []
        failed: GrowthError | None = None
        try:
            mine = [function(item) for item in items[self.rank :: self.world_size]]
        except GrowthError as error:  # the others wait for this rank: tell them, and fail together
            failed = error
        told: list[Any] = [None] * self.world_size
        dist.all_gather_object(told, (mine, failed))
        for _, why in told:
            if why is not None:
                raise why
        gathered = [found for found, _ in told]
        results: list[Any] = [None] * len(items)
        for rank, found in enumerate(gathered):
            results[rank :: self.world_size] = found
        return results

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def agree(self, digest: str, *, what: str) -> None:
        """Check that all ranks hold the same bits.

        Raises:
            RankDisagreementError: If one does not.
        """
        digests = self.map(lambda _: digest, range(self.world_size))
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise RankDisagreementError(
                    f"rank {rank} holds other weights than rank 0 {what} ({other[:12]} against {digests[0][:12]}): "
                    "the trial stops, since its ranks would train different networks"
                )

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier()


def check_world(world_size: int, *, num_shards: int) -> None:
    """Refuse a number of ranks that cannot keep the fixed summation tree.

    Raises:
        UserError: If it does not divide the number of shards.
    """
    if num_shards % world_size or world_size & (world_size - 1):
        allowed = ", ".join(str(w) for w in (1, 2, 4, 8, 16) if num_shards % w == 0)
        raise UserError(
            f"{world_size} workers cannot share the {num_shards} shards of a batch evenly: use {allowed} workers, "
            "or set training.shards to a multiple"
        )


def weights_digest(model: nn.Module) -> str:
    """sha256 of all parameters and buffers, names and bits."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def tree_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum in a fixed binary tree: equal bits however the terms are spread over ranks."""
    terms = list(tensors)
    while len(terms) > 1:
        pairs = [terms[i] + terms[i + 1] for i in range(0, len(terms) - 1, 2)]
        terms = pairs + ([terms[-1]] if len(terms) % 2 else [])
    return terms[0]


def one_thread() -> None:
    """Pin this process to one thread: two on a busy machine are 10-30 times slower."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
