"""New hidden units that are copies of old ones: the classical alternative to zero outgoing weights.

Outputs are equal to rounding, not bit for bit, and old outgoing weights change; it is here to be compared with.
Sources: Chen et al. 2016, "Net2Net" (arXiv:1511.05641); unequal shares, Wang et al. 2024, "LEMON" (arXiv:2310.07999).
"""

from typing import Any

import torch
from torch import Tensor, nn

from growth_service.blocks import Block, TransformerBlock
from growth_service.blocks.composed import dense_state
from growth_service.core.receipts import Receipt
from growth_service.errors import SiteError, UserError
from growth_service.growth.check import growable, outputs, unshared, whole_number
from growth_service.growth.insert import attach_and_judge
from growth_service.growth.sharding import check_unsharded
from growth_service.growth.stream import rounding_of
from growth_service.growth.transplant import Optimizers
from growth_service.growth.widen import new_units
from growth_service.models.streams import resolve

COPY_SHARE = 1 / 3
"""Share of the outgoing weights that a copy takes over; with equal shares, copies would get equal gradients always."""


@torch.no_grad()
def duplicate_units(
    model: nn.Module,
    *,
    site: str,
    units: int,
    generator: torch.Generator,
    optimizer: Optimizers | None = None,
    check_batch: Any = None,
) -> Receipt:
    """Add copies of hidden units to a block; each takes over a third of the outgoing weights of the one it copies.

    Args:
        model: The network.
        site: Path of a block whose units read the stream through its norm.
        units: How many to copy, at most as many as there are; whole groups where the block has GroupNorm.
        generator: Of the choice.
        optimizer: If given, adopts the new parameters.
        check_batch: Inputs on which outputs before and after are compared: equal to 5e-6 of the largest.

    Returns:
        The receipt, also appended to :func:`growth_log`.

    Raises:
        SiteError: If there is no block at the path.
        UserError: If its units cannot be copied, or outputs moved by more than rounding (the network is as it was).
    """
    model = growable(model)
    check_unsharded(model, what="copying units")
    host = resolve(model, site)
    if not isinstance(host, Block):
        raise SiteError(f"{site!r} is a {type(host).__name__}, not a block: only blocks have hidden units to copy")
    unshared(model, site)
    if not host.unit_writers or (isinstance(host, TransformerBlock) and not host.config()["parallel"]):
        raise UserError(
            f"units of {site!r} ({host.type_name}) cannot be copied: they do not read the stream itself; widen it by "
            "units= without copies"
        )
    chosen = _choose(host, site, whole_number(units, what="units"), generator)
    branch = _copies(host, chosen, generator)
    before = None if check_batch is None else outputs(model, check_batch)
    outgoing = dense_state(host.project)["weight"]
    columns = [outgoing.shape[1] - host.hidden + i for i in chosen]  # heads come first
    branch.project.get_parameter("weight").copy_(COPY_SHARE * outgoing[:, columns])
    kept = share_outgoing(host, chosen)

    def judge(change: float | None) -> None:
        if change is not None and before is not None and not change <= rounding_of(before):
            raise UserError(f"copies of units of {site!r} change outputs by {change:.3g}: more than rounding")

    try:
        return attach_and_judge(
            model,
            host,
            "widened",
            site,
            branch,
            optimizer=optimizer,
            before=before,
            check_batch=check_batch,
            judge=judge,
            copied=chosen,
        )
    except Exception:
        for parameter, value in kept:
            parameter.copy_(value)
        raise


def _choose(host: Block, site: str, units: int, generator: torch.Generator) -> list[int]:
    """Units to copy, without repetition; groups stay together."""
    size = 1
    for name in host.unit_norms:
        norm = host.get_submodule(name)
        if isinstance(norm, nn.GroupNorm):
            size = norm.num_channels // norm.num_groups
    if not 1 <= units <= host.hidden or units % size:
        raise UserError(
            f"{units} of the {host.hidden} units of {site!r} cannot be copied: name a number from 1 to {host.hidden}"
            + (f" that is a multiple of {size}, its group size" if size > 1 else "")
        )
    groups = torch.randperm(host.hidden // size, generator=generator)[: units // size].tolist()
    return [group * size + i for group in groups for i in range(size)]


def _copies(host: Block, chosen: list[int], generator: torch.Generator) -> Block:
    """A branch with the incoming weights of the chosen units."""
    branch = new_units(host, units=len(chosen), generator=generator)
    for name in (*host.unit_writers, *host.unit_norms):
        old = dense_state(host.get_submodule(name))
        layer = branch.get_submodule(name)
        copied = {k: v[chosen] if v.ndim and len(v) == host.hidden else v for k, v in old.items()}
        zeros = {k: torch.zeros_like(v) for k, v in layer.state_dict().items()}  # of a bias that the host has not
        layer.load_state_dict(zeros | copied)
    return branch


def share_outgoing(host: Block, chosen: list[int]) -> list[tuple[nn.Parameter, Tensor]]:
    """Leave to some units what their copies do not take over; returns the old values of what changed."""
    kept = []
    for parameter in host.project.parameters():
        if parameter.ndim > 1:
            columns = [parameter.shape[1] - host.hidden + i for i in chosen]  # heads come first
            kept.append((parameter, parameter.clone()))
            parameter[:, columns] = (1 - COPY_SHARE) * parameter[:, columns]
    return kept
