"""Add hidden units and attention heads to blocks of a live network without changing its function.

New units and heads are a branch of their own with its own matrix products, added last: concatenated columns would
change the rounding of the old ones, and a padded tensor would inherit the optimiser's step count.
"""

from typing import Any

import torch
from torch import nn

from growth_service.blocks import Block, TransformerBlock, block_from_config
from growth_service.blocks.composed import dense_state
from growth_service.core.receipts import Receipt
from growth_service.errors import SiteError, UserError
from growth_service.growth.check import growable, unshared, whole_number
from growth_service.growth.insert import attach_exactly
from growth_service.growth.sharding import whole
from growth_service.growth.transplant import Optimizers
from growth_service.models.streams import resolve


@torch.no_grad()
def widen(
    model: nn.Module,
    *,
    site: str,
    units: int | Block | None = None,
    heads: int | None = None,
    generator: torch.Generator,
    optimizer: Optimizers | None = None,
    check_batch: Any = None,
) -> Receipt:
    """Add hidden units or attention heads to the block at ``site``, leaving the function as it is.

    The branch reads the block's input through a copy of the block's norm. The units of a sequential transformer block,
    old and new, read the stream plus the outputs of all heads, new ones too.

    Args:
        model: The network.
        site: Path of a :class:`Block` in it, base or inserted.
        units: How many units, or the branch itself (a block with a zero projection).
        heads: How many attention heads, of the size that the block's heads have; in place of ``units``.
        generator: Of the incoming weights.
        optimizer: If given, adopts the new parameters.
        check_batch: Inputs on which outputs before and after are compared.

    Returns:
        The receipt, also appended to :func:`growth_log`.

    Raises:
        SiteError: If there is no block at the path.
        UserError: As :func:`insert_block`, or if the block cannot have such units or heads.
    """
    model = growable(model)
    host = resolve(model, site)
    if not isinstance(host, Block):
        raise SiteError(f"{site!r} is a {type(host).__name__}, not a block: only blocks have hidden units to add")
    unshared(model, site)
    if (units is None) == (heads is None):
        raise UserError(f"widen the block at {site!r} by units= or by heads=: one of the two")
    if heads is not None:
        branch = new_heads(host, heads=whole_number(heads, what="heads"), generator=generator)
    else:
        branch = (
            units
            if isinstance(units, Block)
            else new_units(host, units=whole_number(units, what="units"), generator=generator)
        )
    return attach_exactly(model, host, "widened", site, branch, optimizer=optimizer, check_batch=check_batch)


@torch.no_grad()
def new_units(host: Block, *, units: int, generator: torch.Generator) -> Block:
    """A branch of ``units`` new hidden units for ``host``: same norm, own weights, zero output.

    It has no output bias: the block has one already, with the same tangent.

    Raises:
        UserError: If the block has no hidden units that read the stream through one norm.
    """
    if isinstance(host, TransformerBlock):
        old = host.config()
        config = {"type": "feed_forward", "bias": False, "hidden": units, "norm_eps": host.mlp_norm.eps}
        config |= {name: old[name] for name in ("width", "norm", "activation", "gated")}
        return _reading_through(host.mlp_norm, config, generator=generator)
    if not isinstance(getattr(host, "norm", None), nn.Module):
        raise UserError(
            f"new hidden units cannot be added to a block of type {host.type_name!r}: its units do not read the "
            "stream through one norm; insert a block instead"
        )
    config = host.config() | {"hidden": units, "bias": False}  # the norm's epsilon too, where it has changed
    return _reading_through(host.get_submodule("norm"), config, generator=generator)


@torch.no_grad()
def new_heads(host: Block, *, heads: int, generator: torch.Generator) -> Block:
    """A branch of new attention heads for ``host``, each as large as its own, with keys and values of their own.

    Raises:
        UserError: If the block has no heads.
    """
    if not isinstance(host, TransformerBlock):
        raise UserError(f"a block of type {host.type_name!r} has no attention heads: add units, or insert a block")
    old = host.config()
    config = {"type": "heads", "heads": heads, "bias": False, "norm_eps": host.attn_norm.eps}
    config |= {name: old[name] for name in ("width", "head_dim", "causal", "norm", "rotary", "rotary_base")}
    return _reading_through(host.attn_norm, config, generator=generator)


def _reading_through(norm: nn.Module, config: dict[str, Any], *, generator: torch.Generator) -> Block:
    """A new branch whose norm is a copy of its host's."""
    branch = block_from_config(config, generator=generator)
    like = next(norm.parameters(), None)
    if like is not None:
        branch.to(like.dtype)
    branch.get_submodule("norm").load_state_dict(whole(dense_state(norm)))
    return branch
