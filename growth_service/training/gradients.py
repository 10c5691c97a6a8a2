"""Gradients of a global batch of fixed shards, summed in one fixed tree over all ranks.

With one rank the shards are worked off one after the other; with several, data-parallel
training does it, with a communication hook that gathers and sums in tree order. 1, 2 and 4
ranks give equal bits.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from growth_service.training.ranks import Ranks, tree_sum

Shard = tuple[Tensor, Tensor]
Precision = Literal["fp32", "bf16"]
"""Of the forward and backward passes of training; weights, their updates, evaluations and certificates stay in fp32."""


class ShardedGradients:
    """Fills ``.grad`` with the gradient of the mean loss over all shards of a batch."""

    def __init__(self, model: nn.Module, *, ranks: Ranks, num_shards: int, precision: Precision = "fp32") -> None:
        self._model, self._ranks, self._num_shards = model, ranks, num_shards
        self._half = precision == "bf16"
        if self._half:  # RMS norms say that they are not fused then
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        self._stash: list[dict[nn.Parameter, Tensor]] = []
        self._parallel: DistributedDataParallel | None = None
        self.rewrap()

    def rewrap(self) -> None:
        """Take in parameters added since: a wrapper made before growth silently ignores them."""
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        if self._ranks.world_size == 1:
            return
        self._parallel = DistributedDataParallel(self._model)
        self._parallel.register_comm_hook(None, self._gather_and_sum)

    def backward(self, shards: Sequence[Shard], loss_sum: Callable[[Tensor, Tensor], Tensor]) -> float:
        """Set every parameter's ``.grad`` for one global batch.

        Args:
            shards: All shards of the batch (each rank works on its own stretch of them).
            loss_sum: Sum of per-sample losses of (outputs, targets).

        Returns:
            Mean loss over this rank's shards, for watching only.
        """
        num_samples = sum(len(targets) for _, targets in shards)
        per_rank = self._num_shards // self._ranks.world_size
        mine = shards[self._ranks.rank * per_rank : (self._ranks.rank + 1) * per_rank]
        seen, losses = 0, 0.0
        self._stash = []
        for index, (inputs, targets) in enumerate(mine):
            last_of_many = self._parallel is not None and index == per_rank - 1
            network = self._parallel if last_of_many else self._model
            assert network is not None
            with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=self._half):
                outputs = network(inputs)
            loss = loss_sum(outputs.float() if self._half else outputs, targets) / num_samples
            seen, losses = seen + len(targets), losses + float(loss.detach()) * num_samples
            if last_of_many:
                for parameter in self._parameters:
                    parameter.grad = None
                loss.backward()
            else:
                grads = torch.autograd.grad(loss, self._parameters)
                self._stash.append(dict(zip(self._parameters, grads, strict=True)))
        if self._parallel is None:
            for parameter in self._parameters:
                parameter.grad = tree_sum([grads[parameter] for grads in self._stash])
        return losses / max(seen, 1)

    def _gather_and_sum(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Communication hook (torch checks its annotations): this rank's shards, then all ranks, in tree order."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient.copy_(tree_sum([*(grads[parameter] for grads in self._stash), gradient]))
        buffer = bucket.buffer()
        gathered = [torch.empty_like(buffer) for _ in range(self._ranks.world_size)]
        dist.all_gather(gathered, buffer)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(tree_sum(gathered))
        return done
