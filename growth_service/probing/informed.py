"""Inner weights chosen by what they could express: the best of several draws and copies, by one probe."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from growth_service.errors import UserError
from growth_service.probing.candidates import Batch, Loss, Reduction
from growth_service.probing.defaults import default_candidates
from growth_service.probing.probe import probe
from growth_service.probing.report import SaturationReport
from growth_service.probing.samples import counted


class Informed(NamedTuple):
    """A block, and the certificates of all that it was chosen from."""

    block: nn.Module
    report: SaturationReport


def informed_block(
    model: nn.Module,
    *,
    site: str,
    draws: int = 4,
    batches: Iterable[Batch],
    loss: Loss,
    reduction: Reduction,
    seed: int = 0,
    **arguments: Any,
) -> Informed:
    """The block for a site whose features have the largest projected score, of ``draws`` and a copy of a neighbour.

    The score is debiased and measured on ``batches``; a choice among many is flattering, so certify the chosen one
    again on fresh samples (``probe(..., fresh=)``) before relying on the figure.

    Args:
        model: The network; it is only looked at.
        site: Where the block would go.
        draws: Random draws, at least 1, besides the copy.
        batches: Held-out samples, as :func:`probe`.
        loss: As :func:`probe`.
        reduction: As :func:`probe`.
        seed: Of the draws.
        arguments: Further arguments of :func:`probe` (``train_batches``, ``pool``, ...).

    Returns:
        The block, ready for :func:`insert_block`, and the report.
    """
    if draws < 1:
        raise UserError(f"draws {draws} must be at least 1")
    samples = counted(batches, what="batches", need="pass held-out samples", labelled=True)
    inner = ["copy", *["random"] * draws]
    found = default_candidates(model, [site], None, example=samples.first[0], inner=inner, seed=seed)  # type: ignore[arg-type]
    report = probe(
        model, batches=samples.batches, loss=loss, reduction=reduction, candidates=found, seed=seed, **arguments
    )
    best = max(range(len(found)), key=lambda i: report.sites[i].s)
    return Informed(found[best].block, report)
