"""Account for a grow step on samples that nothing was fitted to: measure what the test-risk report needs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from growth_service.blocks import Block
from growth_service.core.risk import BlockClass, NetworkLosses, TestRiskReport, test_risk
from growth_service.core.score import FloatArray
from growth_service.errors import UserError
from growth_service.probing.candidates import Batch, Candidate, run_model, untouched
from growth_service.probing.jumpboard import added_block, measured_step
from growth_service.probing.passes import Pass, to_array

PerSample = Callable[[Any, Any], Tensor]
"""Losses of samples, ``[B]``, from outputs and targets."""
_NORMS = (nn.LayerNorm, nn.RMSNorm)


def measure_test_risk(
    old: nn.Module,
    new: nn.Module,
    *,
    site: str,
    block: Block,
    jumpboard_train_DK: FloatArray,
    jumpboard_pop_DK: FloatArray,
    train: Sequence[Batch],
    test: Sequence[Batch],
    loss: PerSample,
    bound: float,
    delta: float = 0.05,
) -> TestRiskReport:
    """Measure the four networks of a grow step and report both routes' bounds.

    Args:
        old: The network before the step; left as it is.
        new: The network after growing and training.
        site: Where the block was inserted.
        block: The block as it was inserted, before training.
        jumpboard_train_DK: Output projection of the jumpboard from the training samples.
        jumpboard_pop_DK: The same from an independent fold, in neither ``train`` nor ``test``.
        train: All training samples in force.
        test: Samples that nothing was fitted to, the acceptance included.
        loss: Per-sample losses.
        bound: Losses are truncated here, in nats; for C classes ln C + 3 is usual.
        delta: Error level of each ingredient.

    Returns:
        Margins, deviations, bounds, which route applies, and the exact three-term identity.
    """
    steps = {"old": None, "train": jumpboard_train_DK, "pop": jumpboard_pop_DK}
    losses = {
        name: NetworkLosses(
            train_M=_losses(old, train, loss, site, block, matrix),
            test_K=_losses(old, test, loss, site, block, matrix),
        )
        for name, matrix in steps.items()
    }
    grown = NetworkLosses(train_M=_losses(new, train, loss), test_K=_losses(new, test, loss))
    candidate = Candidate(path=site, block=block)
    steepest, (rows, features) = 0.0, (0, 0)
    for name, matrix in steps.items():
        with added_block(old, site, block, matrix):
            passing = Pass(old, [candidate], loss=lambda o, t: loss(o, t).sum(), reduction="sum")
            for _, _, (seen,) in passing.batches((0, batch) for batch in train):
                assert seen.g is not None, name
                rows, features = seen.shape
                steepest = max(steepest, float(seen.g.flatten(1).norm(dim=1).max()))
    smallest, eps = _smallest_rms(new, [*train, *test])
    return test_risk(
        old=losses["old"],
        jumpboard_pop=losses["pop"],
        jumpboard_train=losses["train"],
        new=grown,
        bound=bound,
        delta=delta,
        block=BlockClass(
            lipschitz=steepest,
            weight_norm=_added_size(old, train, site, block, jumpboard_train_DK),
            width=rows,
            features=features,
        ),
        smallest_rms=smallest,
        norm_eps=eps,
    )


def _losses(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: PerSample,
    site: str | None = None,
    block: Block | None = None,
    matrix_DK: FloatArray | None = None,
) -> FloatArray:
    """Per-sample losses, with a block's projection set to a matrix where one is given. ``[N]``."""
    found = []
    for inputs, targets in batches:
        with untouched(model, with_gradient=False), added_block(model, site or "", block, matrix_DK):
            values = loss(run_model(model, inputs), targets)
        if values.shape != (len(targets),):
            raise UserError(
                f"a test-risk report needs one loss a sample: got shape {tuple(values.shape)} for {len(targets)}"
            )
        found.append(to_array(values))
    return np.concatenate(found)


def _added_size(model: nn.Module, batches: Sequence[Batch], site: str, block: Block, matrix_DK: FloatArray) -> float:
    """Root mean square over samples of what the block adds: ||W Sigma^(1/2)||_F."""
    seen: list[tuple[float, float]] = []
    for inputs, _ in batches:
        with untouched(model, with_gradient=False), measured_step(model, site, block, matrix_DK, seen):
            run_model(model, inputs)
    return float(np.sqrt(sum(moved for moved, _ in seen) / sum(len(targets) for _, targets in batches)))


def _smallest_rms(model: nn.Module, batches: Sequence[Batch]) -> tuple[float | None, float | None]:
    """Smallest root mean square at any LayerNorm or RMSNorm, relative to sqrt(eps), and that norm's eps."""
    norms = [m for m in model.modules() if isinstance(m, _NORMS)]
    if not norms:
        return None, None
    found: list[tuple[float, float]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], _output: Tensor) -> None:
        z = args[0] - args[0].mean(dim=-1, keepdim=True) if isinstance(module, nn.LayerNorm) else args[0]
        eps = module.eps if isinstance(module.eps, float) else torch.finfo(z.dtype).eps
        found.append((float(z.square().mean(dim=-1).sqrt().min()), float(eps)))

    handles = [m.register_forward_hook(note) for m in norms]
    try:
        with untouched(model, with_gradient=False):
            for inputs, _ in batches:
                run_model(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return min(found, key=lambda pair: pair[0] / max(pair[1], 1e-300) ** 0.5)
