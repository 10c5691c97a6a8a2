"""What a block that is there is worth: the loss that removing it would cost, exactly.

The mirror of the saturation score. Small on both counts, a block's share of the stream and the loss without it, says
that it may go; either alone does not (a small branch can matter, and a large one can be undone by those behind it).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from growth_service.blocks import Block, TransformerBlock
from growth_service.errors import SiteError, UserError
from growth_service.models.streams import resolve
from growth_service.probing.candidates import Batch, Loss, Reduction, run_model, sum_loss, untouched
from growth_service.probing.passes import square_sum
from growth_service.probing.samples import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovalCost:
    """What removing one block would change."""

    block: str
    """Its path, as :func:`remove_block` takes it."""
    relative_size: float
    """r_b: root mean square of ||h(z)|| over that of ||z||."""
    loss_increase: float
    """Mean loss without it less with it, nats a sample; negative where the network would be better off."""
    standard_error: float
    """Of ``loss_increase``, over batches; inf for one batch."""
    params: int


@torch.no_grad()
def removal_costs(
    model: nn.Module, *, batches: Iterable[Batch], loss: Loss, reduction: Reduction, blocks: list[str] | None = None
) -> list[RemovalCost]:
    """Exact removal losses, cheapest first; the network is only looked at.

    One forward pass a block, and one with all of them.

    Args:
        model: A network with blocks: one of this project's families, or any that was grown.
        batches: Samples that the network was not trained on.
        loss: ``loss(outputs, targets)``.
        reduction: What it does over samples.
        blocks: Paths; None: every residual branch and every branch of new units.
    """
    paths = _removable(model) if blocks is None else blocks
    for path in paths:
        resolve(model, path)
    samples = counted(batches, what="batches", need="pass at least one batch", labelled=True)
    sizes = dict.fromkeys(paths, (0.0, 0.0))
    with untouched(model, with_gradient=False):
        listeners = [resolve(model, p).register_forward_hook(_measure(sizes, p)) for p in paths]
        try:
            whole = _losses(model, samples.batches, loss, reduction)
        finally:
            for listener in listeners:
                listener.remove()
        found = []
        for path in paths:
            block = resolve(model, path)
            silence = block.register_forward_hook(lambda _m, _a, out: torch.zeros_like(out))
            try:
                without = _losses(model, samples.batches, loss, reduction)
            finally:
                silence.remove()
            moved, stream = sizes[path]
            increase, error = _difference(without, whole, samples.sizes)
            found.append(
                RemovalCost(
                    block=path,
                    relative_size=math.sqrt(moved / stream) if stream > 0 else 0.0,
                    loss_increase=increase,
                    standard_error=error,
                    params=sum(p.numel() for p in block.parameters()),
                )
            )
    return sorted(found, key=lambda cost: cost.loss_increase)


def _removable(model: nn.Module) -> list[str]:
    """Branches of the base, inserted blocks, branches of new units; not blocks inside another block."""
    found = [p for p, m in model.named_modules() if isinstance(m, Block)]
    return [p for p in found if p.rpartition(".")[2] == "branch" or p.split(".")[-2:-1] in (["grown"], ["widened"])]


def _measure(sizes: dict[str, tuple[float, float]], path: str) -> Any:
    def hook(_module: nn.Module, args: tuple[Tensor, ...], delta: Tensor) -> None:
        moved, stream = sizes[path]
        sizes[path] = (moved + square_sum(delta), stream + square_sum(args[0]))

    return hook


def _losses(model: nn.Module, batches: Iterable[Batch], loss: Loss, reduction: Reduction) -> list[float]:
    """Sum of the losses of each batch."""
    return [float(sum_loss(loss, run_model(model, x), y, reduction=reduction)) for x, y in batches]


def _difference(without: list[float], whole: list[float], sizes: list[int]) -> tuple[float, float]:
    """Mean difference a sample, and its standard error over batches."""
    num, parts = sum(sizes), len(sizes)
    mean = sum(a - b for a, b in zip(without, whole, strict=True)) / num
    if parts < 2:
        return mean, math.inf
    spread = sum((a - b - n * mean) ** 2 for a, b, n in zip(without, whole, sizes, strict=True))
    return mean, math.sqrt(parts / (parts - 1) * spread) / num


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCost:
    """What removing one hidden unit or head would change."""

    index: int
    """As :func:`remove_units` takes it."""
    loss_increase: float
    """Mean loss without it less with it, nats a sample."""
    standard_error: float
    """Over batches; inf for one batch."""


@torch.no_grad()
def unit_costs(
    model: nn.Module,
    *,
    site: str,
    kind: Literal["units", "heads"] = "units",
    batches: Iterable[Batch],
    loss: Loss,
    reduction: Reduction,
) -> list[UnitCost]:
    """Exact loss without each hidden unit or head of a block, cheapest first; the network is only looked at.

    One forward pass a unit, and one with all of them.

    Args:
        model: The network.
        site: Path of a block.
        kind: ``units`` or ``heads``.
        batches: Samples that the network was not trained on.
        loss: ``loss(outputs, targets)``.
        reduction: What it does over samples.

    Raises:
        UserError: If the block has no such units.
    """
    block = resolve(model, site)
    if not isinstance(block, Block):
        raise SiteError(f"{site!r} is a {type(block).__name__}, not a block: only blocks have units")
    groups = _columns(block, site, kind)
    axis = 1 if isinstance(block.project, nn.Conv2d) else -1
    heads = kind == "heads" and isinstance(block, TransformerBlock)
    reader = block.get_submodule("joined" if heads else "project")  # units of a sequential block read heads too
    samples = counted(batches, what="batches", need="pass at least one batch", labelled=True)
    found = []
    with untouched(model, with_gradient=False):
        whole = _losses(model, samples.batches, loss, reduction)
        for index, columns in enumerate(groups):
            silence = reader.register_forward_pre_hook(_without(columns, axis))
            try:
                without = _losses(model, samples.batches, loss, reduction)
            finally:
                silence.remove()
            increase, error = _difference(without, whole, samples.sizes)
            found.append(UnitCost(index=index, loss_increase=increase, standard_error=error))
    return sorted(found, key=lambda cost: cost.loss_increase)


def _columns(block: Block, site: str, kind: str) -> list[list[int]]:
    """Columns of the projection that belong to each unit or head."""
    heads = block.query.out_features if isinstance(block, TransformerBlock) else 0
    if kind == "heads":
        if not isinstance(block, TransformerBlock):
            raise UserError(f"a block of type {block.type_name!r} ({site!r}) has no attention heads")
        size = heads // block.config()["heads"]
        return [list(range(i * size, (i + 1) * size)) for i in range(block.config()["heads"])]
    return [[heads + i] for i in range(block.hidden)]


def _without(columns: list[int], axis: int) -> Any:
    def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        index = torch.tensor(columns, device=args[0].device)
        return (args[0].index_fill(axis, index, 0.0),)

    return hook
