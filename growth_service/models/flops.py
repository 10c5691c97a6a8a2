"""Exact FLOPs by counting what torch runs: 2 per multiply-accumulate, forward and backward.

Only matrix products and convolutions count (as in published budgets); every count here is
linear in the number of samples, so one sample is counted and multiplied.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from growth_service.blocks import Block


class FlopsPerSample(NamedTuple):
    """Cost of one sample."""

    forward: int
    backward: int

    @property
    def train(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward


class FlopCounter(TorchDispatchMode):
    """Adds up torch's own FLOP formulas over the operations that run inside.

    ``FlopCounterMode`` counts the same, but its module tracking does not survive
    ``autograd.grad`` with respect to a leaf; a test holds the two equal.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.flops: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


def counted(work: Callable[[], Any]) -> int:
    """FLOPs of the torch operations that ``work`` runs."""
    with FlopCounter() as counter:
        work()
    total: int = counter.flops
    return total


def flops_per_sample(model: nn.Module, sample: Tensor) -> FlopsPerSample:
    """Forward and exact backward cost of one sample, as a training step pays it.

    Args:
        model: Any module returning one tensor; parameters, gradients and mode are left alone.
        sample: One input with its batch axis, ``[1, ...]``.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        forward = counted(lambda: model(sample))
    total = counted(lambda: torch.autograd.grad(model(sample).sum(), parameters, allow_unused=True))
    return FlopsPerSample(forward=forward, backward=total - forward)


def block_flops_per_sample(block: Block, stream: Tensor) -> int:
    """Forward and backward FLOPs that a block adds per sample of a stream ``[1, ...]``."""
    z = stream.detach().requires_grad_()
    inputs = [z, *(p for p in block.parameters() if p.requires_grad)]
    return counted(lambda: torch.autograd.grad(block(z).sum(), inputs, allow_unused=True))
