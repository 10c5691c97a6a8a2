"""Exact FLOPs by counting what torch runs: 2 per multiply-accumulate, forward and backward.

Only matrix products and convolutions count (as in published budgets); every count here is
linear in the number of samples, so one sample is counted and multiplied.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from growth_service.blocks import Block


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores, and values by scores; all pairs of positions, also those that a causal mask hides (as torch counts)."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores once more, then the gradients of scores, query, key and value: five products."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def _fused_attention(query: Tensor, key: Tensor, _value: Tensor, width: int, *_: Any, **__: Any) -> int:
    """Of ``nn.MultiheadAttention`` in evaluation: four maps of the width, scores, and values by scores."""
    return 2 * query[..., 0].numel() * width * (4 * width + 2 * key.shape[-2])


def _convolution_backward(
    grad: Tensor, inputs: Tensor, weight: Tensor, *more: Any, out_val: Any = None, **_: Any
) -> int:
    """Each gradient costs what the forward pass does; torch's own formula charges that of a grouped weight in full."""
    *_rest, transposed, _padding, groups, wanted = more
    if groups == 1 or transposed:
        formula = flop_registry[_aten.convolution_backward]
        return int(formula(grad, inputs, weight, *more, out_val=out_val))
    forward = 2 * grad.numel() * math.prod(weight.shape[1:])
    return forward * sum(map(bool, wanted[:2]))


_aten = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._native_multi_head_attention: _fused_attention,
    _aten.convolution_backward: _convolution_backward,
}
"""What torch counts on other devices but not on the CPU, or counts wrongly."""


class FlopsPerSample(NamedTuple):
    """Cost of one sample."""

    forward: int
    backward: int

    @property
    def train(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward


class FlopCounter(TorchDispatchMode):
    """Adds up FLOP formulas, torch's own and a few missing ones, over the operations that run inside.

    ``FlopCounterMode`` counts the same where it knows all operations, but its module tracking does
    not survive ``autograd.grad`` with respect to a leaf; a test holds the two equal.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.flops: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
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
