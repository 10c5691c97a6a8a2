"""Candidates: blocks that could be added somewhere, held beside the network, never in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from growth_service.blocks import Block
from growth_service.errors import SiteError
from growth_service.models.sites import resolve, stream_of, with_stream

Loss = Callable[[Any, Any], Tensor]
Reduction = Literal["mean", "sum", "none"]
Batch = tuple[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A block with a zero projection, and the module whose output it would add to."""

    path: str
    """Site of a new block (depth), or the block that would get new units (width)."""
    block: Block
    kind: Literal["depth", "width"] = "depth"
    """A new block reads the output of the module, new units read its input; both add to the output."""


@contextmanager
def untouched(model: nn.Module, *, with_gradient: bool) -> Iterator[None]:
    """Eval mode and frozen parameters inside; everything as it was afterwards, whatever happens.

    Freezing lets autograd skip all weight gradients: only stream gradients are computed.
    """
    modes = [(m, m.training) for m in model.modules()]
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    model.eval()
    try:
        for p, _ in frozen:
            p.requires_grad_(False)
        with torch.set_grad_enabled(with_gradient):
            yield
    finally:
        for p, flag in frozen:
            p.requires_grad_(flag)
        for module, training in modes:
            module.training = training


class Taps:
    """Forward hooks that keep what candidates read and write during one forward pass.

    With gradients on, each tapped output is part of the graph (the first one its leaf), so the
    gradient of the loss with respect to all streams comes from one data-only backward pass.
    """

    def __init__(self, model: nn.Module, paths: list[str], *, with_gradient: bool) -> None:
        self._model, self._paths, self._with_gradient = model, paths, with_gradient
        self._handles: list[Any] = []
        self.read: dict[str, Tensor] = {}
        self.stream: dict[str, Tensor] = {}

    def __enter__(self) -> "Taps":
        """Attach the hooks."""
        try:
            self.stream.clear()
            for path in self._paths:
                hook = self._hook(path)
                self._handles.append(resolve(self._model, path).register_forward_hook(hook))
        except BaseException:
            self.__exit__(BaseException)
            raise
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        """Detach them; all modules must have run, unless an error came first."""
        for handle in self._handles:
            handle.remove()
        missing = [p for p in self._paths if p not in self.stream]
        if kind is None and missing:
            raise SiteError(f"{missing[0]!r} does not run in a forward pass of these inputs: no block can go there")

    def _hook(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def hook(_module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if path in self.stream:
                raise SiteError(
                    f"{path!r} runs more than once in a forward pass (a shared module), and so would a block there: "
                    "choose a module that runs once"
                )
            stream = stream_of(output, path=path)
            if self._with_gradient:
                stream = stream if stream.requires_grad else stream.detach().requires_grad_()
                output = with_stream(output, stream.clone())  # what changes it in place later changes the copy
            self.read[path] = args[0].detach() if args and isinstance(args[0], Tensor) else stream.detach()
            self.stream[path] = stream
            return output

        return hook


def summed(loss_value: Tensor, *, reduction: Reduction, num_samples: int) -> Tensor:
    """The sum of per-sample losses, from a loss that averages, sums, or does neither."""
    match reduction:
        case "mean":
            return loss_value * num_samples
        case "sum":
            return loss_value
        case "none":
            return loss_value.reshape(num_samples, -1).sum()
