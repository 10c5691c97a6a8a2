"""Would more channels of the residual stream help? The same certificates as for depth and width, on a widened copy.

A wider stream is exact whatever its new rows are zero for (see ``growth.stream``), so they are a zero projection: of
what every existing block on the stream computes already, read by random new columns behind the norms. First order
sees only what existing blocks can write there at once, so it undervalues width: treat a small score as no verdict
against it. Of a sequential transformer block one path is left out: what its own feed-forward part would read of the
new channels that its heads write.
"""

import copy
from typing import Any

import torch
from torch import nn

from growth_service.blocks.rows import NewRows
from growth_service.errors import UserError
from growth_service.growth import widen_stream
from growth_service.models.flops import flops_per_sample
from growth_service.models.sites import blocks_of
from growth_service.probing import Candidate, SaturationReport, probe
from growth_service.probing.candidates import first_samples
from growth_service.probing.samples import counted


def probe_stream(
    model: nn.Module, *, site: str, channels: int, generator: torch.Generator, batches: Any, **arguments: Any
) -> SaturationReport:
    """Certificates of new channels of a stream, one a block that would write to them; the network is only looked at.

    Args:
        model: A network of this project's families with LayerNorm or RMSNorm.
        site: Any site on the stream.
        channels: How many channels.
        generator: Of the columns with which they would be read; pass one in the same state to
            :func:`widen_stream` to get the very channels that were scored.
        batches: Held-out samples, as :func:`probe`.
        arguments: Further arguments of :func:`probe` (loss, reduction, train_batches, ...).

    Returns:
        A report whose sites are the writing blocks; ``added_flops`` of each is that of the whole wider stream.

    Raises:
        UserError: If the stream cannot be widened so, or no block writes to it.
    """
    samples = counted(batches, what="batches", need="pass held-out samples", labelled=True)
    wider = copy.deepcopy(model)
    group = widen_stream(wider, site=site, channels=channels, generator=generator).path
    writers = {path: block for path, block in blocks_of(wider).items() if path.startswith(f"{group}.")}
    if not writers:
        raise UserError(f"no block writes to the stream at {site!r}: only the entry does, which is not scored")
    if any(isinstance(m, nn.GroupNorm | nn.BatchNorm2d) for m in wider.get_submodule(group).modules()):
        raise UserError(
            "new channels under GroupNorm or BatchNorm begin with random rows and zero columns, and are not scored "
            "yet: compare short trials instead"
        )
    one = first_samples(samples.first[0], 1)
    added = flops_per_sample(wider, one).train - flops_per_sample(model, one).train
    found = [
        Candidate(
            path=path,
            block=NewRows(block.project, channels=channels),  # type: ignore[arg-type]  # no gates on a stream
            kind="stream",
            shared=path,
            added_flops=added,
        )
        for path, block in writers.items()
    ]
    return probe(wider, batches=samples.batches, candidates=found, **arguments)
