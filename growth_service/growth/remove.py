"""Take blocks, hidden units and attention heads out of a live network again.

Removing what adds nothing changes nothing; else the receipt says by how much outputs changed. Removing what was
just inserted restores network and optimiser bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from growth_service.blocks import Block, TransformerBlock
from growth_service.core.receipts import Receipt
from growth_service.errors import SiteError, UserError
from growth_service.growth import log
from growth_service.growth.attach import detach, owner
from growth_service.growth.check import growable, largest_change, outputs, renew_graphs, unshared, untied, whole_number
from growth_service.growth.sharding import begin_again, check_unsharded
from growth_service.growth.transplant import Optimizers, check_optimizer, forget, replace_cut
from growth_service.models.families import Residual
from growth_service.models.streams import resolve


@torch.no_grad()
def remove_block(
    model: nn.Module, *, block: str, optimizer: Optimizers | None = None, check_batch: Any = None
) -> Receipt:
    """Remove a block, or a branch of units or heads.

    Args:
        model: The network.
        block: Its path, as in the receipt of its insertion; or that of a branch of one of this project's families
            (``groups.0.blocks.1.branch``).
        optimizer: If given, forgets its parameters.
        check_batch: Inputs on which outputs before and after are compared, for the receipt.

    Returns:
        The receipt, also appended to :func:`growth_log`.

    Raises:
        SiteError: If there is no block at the path that can be removed.
    """
    model = growable(model)
    found = resolve(model, block)
    if not isinstance(found, Block) or not _is_removable(model, block):
        raise SiteError(
            f"{block!r} is a {type(found).__name__} that cannot be removed: name an inserted block or branch of units "
            "by the path in its receipt, or a branch of one of this project's families"
        )
    unshared(model, block)
    check_optimizer(optimizer)
    before = None if check_batch is None else outputs(model, check_batch)
    named = {f"{block}.{name}": p for name, p in found.named_parameters()}
    take_out(model, block)
    if optimizer is not None:
        forget(optimizer, list(named.values()))
    receipt = Receipt(
        kind="remove",
        path=block,
        block=found.config(),
        parameters=tuple(named),
        parameters_added=-sum(p.numel() for p in named.values()),
        output_change=None if before is None else largest_change(before, outputs(model, check_batch)),
    )
    log.append(model, receipt)
    return receipt


def take_out(model: nn.Module, path: str) -> None:
    """Remove the block at a path without telling anybody."""
    place = owner(path)
    if place is not None:
        detach(model.get_submodule(place[0]), place[1], place[2])
    else:
        parent = model.get_submodule(path.rpartition(".")[0])
        assert isinstance(parent, Residual)
        parent.branch = None
    begin_again(model)
    renew_graphs()


def _is_removable(model: nn.Module, path: str) -> bool:
    head, _, last = path.rpartition(".")
    return owner(path) is not None or (last == "branch" and isinstance(model.get_submodule(head), Residual))


@torch.no_grad()
def remove_units(
    model: nn.Module,
    *,
    site: str,
    units: Sequence[int] = (),
    heads: Sequence[int] = (),
    optimizer: Optimizers | None = None,
    check_batch: Any = None,
) -> Receipt:
    """Remove some hidden units or attention heads of a block: its matrices and their optimiser state lose them.

    Args:
        model: The network.
        site: Path of the block.
        units: Indices of hidden units (of channels of a convolution block: whole groups where it has GroupNorm).
        heads: Indices of attention heads.
        optimizer: If given, keeps the state of what is left.
        check_batch: Inputs on which outputs before and after are compared, for the receipt.

    Returns:
        The receipt, also appended to :func:`growth_log`.

    Raises:
        SiteError: If there is no block at the path.
        UserError: If an index does not exist, nothing would be left, or the block cannot lose units.
    """
    model = growable(model)
    check_unsharded(model, what="removing single units")
    host = resolve(model, site)
    if not isinstance(host, Block):
        raise SiteError(f"{site!r} is a {type(host).__name__}, not a block: only blocks have units to remove")
    units, heads = (_indices(given, what=what) for given, what in ((units, "units"), (heads, "heads")))
    check_units(host, site, units=units, heads=heads)
    unshared(model, site)
    check_optimizer(optimizer)
    untied(model, [f"{site}.{name}" for name in _cut_layers(host, heads=bool(heads))])
    before = None if check_batch is None else outputs(model, check_batch)
    num = sum(p.numel() for p in host.parameters())
    changed = shrink(host, units=units, heads=heads, optimizer=optimizer)
    receipt = Receipt(
        kind="shrink",
        path=site,
        block={"units": units, "heads": heads},
        parameters=tuple(f"{site}.{name}" for name, p in host.named_parameters() if p in changed),
        parameters_added=sum(p.numel() for p in host.parameters()) - num,
        output_change=None if before is None else largest_change(before, outputs(model, check_batch)),
    )
    log.append(model, receipt)
    return receipt


def shrink(
    host: Block, *, units: Sequence[int], heads: Sequence[int], optimizer: Optimizers | None = None
) -> set[nn.Parameter]:
    """Cut units and heads out of a block's matrices; returns the parameters that got smaller."""
    changed: set[nn.Parameter] = set()
    columns: list[int] = []
    offset = 0
    if isinstance(host, TransformerBlock):
        size, num = host.config()["head_dim"], host.config()["heads"]
        rows = [i * size + k for i in heads for k in range(size)]
        offset = num * size
        if heads:
            for name in ("query", "key", "value"):
                changed |= _cut(host.get_submodule(name), 0, rows, optimizer)
            columns += rows
    if units:
        for name in (*host.unit_writers, *host.unit_norms):
            layer = host.get_submodule(name)
            if not isinstance(layer, nn.Identity):
                changed |= _cut(layer, 0, units, optimizer)
        columns += [offset + i for i in units]
    changed |= _cut(host.project, 1, columns, optimizer)
    host.restate(hidden=-len(units), heads=-len(heads))
    renew_graphs()
    return changed


def _indices(given: Any, *, what: str) -> list[int]:
    """Sorted plain indices, each once.

    Raises:
        UserError: If they are no whole numbers.
    """
    try:
        listed = list(given)
    except TypeError as error:
        raise UserError(f"{what} must be a list of indices, got {given!r}") from error
    return sorted({whole_number(value, what=f"an index of {what}") for value in listed})


def _cut_layers(host: Block, *, heads: bool) -> list[str]:
    """Children that lose rows or columns."""
    return [*host.unit_writers, *host.unit_norms, *(("query", "key", "value") if heads else ()), "project"]


def check_units(host: Block, site: str, *, units: Sequence[int], heads: Sequence[int]) -> None:
    """Refuse what cannot be cut, before anything changes."""
    if not units and not heads:
        raise UserError(f"no unit and no head of {site!r} was named: pass units= or heads=")
    if units and not host.unit_writers:
        raise UserError(f"a block of type {host.type_name!r} cannot lose single units: remove the whole block {site!r}")
    num_heads = host.config()["heads"] if isinstance(host, TransformerBlock) else 0
    for what, wanted, num in (("units", units, host.hidden), ("heads", heads, num_heads)):
        if wanted and (wanted[0] < 0 or wanted[-1] >= num):
            raise UserError(f"{what} {list(wanted)} of {site!r}: it has {num}, numbered from 0")
        if wanted and len(wanted) == num:
            raise UserError(f"all {num} {what} of {site!r} were named: leave one, or remove the whole block")
    if heads and host.config()["kv_heads"] != num_heads:
        raise UserError(f"heads of {site!r} share keys and values (grouped queries): single ones cannot be removed")
    for name in host.unit_norms if units else ():
        norm = host.get_submodule(name)
        if isinstance(norm, nn.GroupNorm):
            size = norm.num_channels // norm.num_groups
            groups = {i // size for i in units}
            if norm.num_groups == 1 or len(groups) * size != len(units):
                raise UserError(
                    f"units {list(units)} of {site!r} are not whole groups of {size} channels of its GroupNorm: the "
                    "others of a group would change"
                )


def _cut(layer: nn.Module, axis: int, gone: Sequence[int], optimizer: Optimizers | None) -> set[nn.Parameter]:
    """Remove some entries along an axis of all tensors of a layer that have them."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    size = weight.shape[axis]
    keep = torch.tensor([i for i in range(size) if i not in set(gone)], device=weight.device)
    changed = set()
    for part in layer.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.ndim <= axis or parameter.shape[axis] != size:
                continue
            left = nn.Parameter(parameter.detach().index_select(axis, keep), requires_grad=parameter.requires_grad)
            if parameter.grad is not None:
                left.grad = parameter.grad.index_select(axis, keep)
            part._parameters[name] = left  # a layer with pieces shows another weight under this name
            changed.add(left)
            if optimizer is not None:
                replace_cut(optimizer, parameter, left, axis=axis, keep=keep)
    for name, buffer in layer.named_buffers(recurse=False):
        if axis == 0 and buffer.ndim == 1 and len(buffer) == size:
            layer.register_buffer(name, buffer.index_select(0, keep))
    _recount(layer, axis, len(keep), size)
    return changed


def _recount(layer: nn.Module, axis: int, num: int, before: int) -> None:
    match layer:
        case nn.GroupNorm():
            layer.num_groups = num // (before // layer.num_groups)
            layer.num_channels = num
        case nn.BatchNorm2d():
            layer.num_features = num
        case nn.Conv2d():
            setattr(layer, "out_channels" if axis == 0 else "in_channels", num)
        case nn.Linear():
            setattr(layer, "out_features" if axis == 0 else "in_features", num)
        case _:
            pass
