"""Insert blocks into, and widen blocks of, a live network without changing its function.

Invariant of both: outputs before and after are equal bit for bit, since the new branch ends
in an all-zero projection and ``x + 0.0 == x`` for finite x. New modules are children of the
module they attach to (``<site>.grown.<id>``, ``<block>.widened.<id>``) and run from a forward
hook of it, so no old parameter changes its name and any ``nn.Module`` can be grown.

Sources: Wei et al. 2016, "Network Morphism" (arXiv:1603.01670); Chen et al. 2016, "Net2Net"
(arXiv:1511.05641); here with zero output projections in place of identities and copies.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn, optim

from growth_service.blocks import Block, block_from_config
from growth_service.core.receipts import Receipt
from growth_service.errors import SiteError, UserError
from growth_service.growth.transplant import adopt
from growth_service.models.sites import Site, default_block_config, resolve, site_of, sites, stream_of, with_stream

Attachment = Literal["grown", "widened"]
_LOG = "_growth_log"


class Attached(nn.ModuleDict):
    """Blocks attached to a module, by id, applied in the order of their insertion."""


def growth_log(model: nn.Module) -> list[Receipt]:
    """Every change made to ``model`` by this package, in order."""
    return list(getattr(model, _LOG, ()))


@torch.no_grad()
def insert_block(
    model: nn.Module,
    *,
    site: str,
    block: Block | None = None,
    generator: torch.Generator,
    optimizer: optim.Optimizer | None = None,
    check_batch: Any = None,
) -> Receipt:
    """Insert one residual block after the module at ``site``, leaving the function as it is.

    Later insertions at the same site run last. The block's projection gets a gradient at once,
    its inner weights from the second step on.

    Args:
        model: Any module whose submodule at ``site`` returns the residual stream.
        site: Path of that submodule.
        block: The block, with a zero projection; None: the default for the stream, with inner
            weights from ``generator``.
        generator: Of the inner weights of a default block; unused when ``block`` is given.
        optimizer: If given, adopts the new parameters (see :func:`adopt`).
        check_batch: Inputs (a tensor, or keyword arguments) on which outputs before and after are compared.

    Returns:
        The receipt, also appended to :func:`growth_log`.

    Raises:
        SiteError: If the path is no site.
        UserError: If the block's projection is not zero, or outputs changed on ``check_batch``
            (the network is left as it was).
    """
    module = resolve(model, site)
    if block is None:
        place = _describe(model, site, check_batch)
        block = block_from_config(default_block_config(model, place), generator=generator)
    return _attach(model, module, "grown", site, block, optimizer=optimizer, check_batch=check_batch)


@torch.no_grad()
def widen(
    model: nn.Module,
    *,
    site: str,
    units: int | Block,
    generator: torch.Generator,
    optimizer: optim.Optimizer | None = None,
    check_batch: Any = None,
) -> Receipt:
    """Add hidden units to the block at ``site``, leaving the function as it is.

    The new units are a branch of their own with its own matrix product, added last:
    concatenated columns would change the rounding of the old ones. The branch reads the block's
    input through a copy of the block's norm.

    Args:
        model: The network.
        site: Path of a :class:`Block` in it, base or inserted.
        units: How many units, or the branch itself (a block with a zero projection).
        generator: Of the incoming weights.
        optimizer: If given, adopts the new parameters.
        check_batch: Inputs on which outputs before and after are compared.

    Returns:
        The receipt, also appended to :func:`growth_log`.

    Raises:
        SiteError: If there is no block at the path.
        UserError: As :func:`insert_block`, or if ``units`` does not fit the block's norm groups.
    """
    host = resolve(model, site)
    if not isinstance(host, Block):
        raise SiteError(f"{site!r} is a {type(host).__name__}, not a block: only blocks have hidden units to add")
    branch = units if isinstance(units, Block) else new_units(host, units=units, generator=generator)
    return _attach(model, host, "widened", site, branch, optimizer=optimizer, check_batch=check_batch)


@torch.no_grad()
def new_units(host: Block, *, units: int, generator: torch.Generator) -> Block:
    """A branch of ``units`` new hidden units for ``host``: same norm, own weights, zero output.

    It has no output bias: the block has one already, with the same tangent.
    """
    if not isinstance(getattr(host, "norm", None), nn.Module):
        raise UserError(
            f"new hidden units cannot be added to a block of type {host.type_name!r} yet: its units do not read the "
            "stream through one norm; insert a block instead"
        )
    config = host.config() | {"hidden": units, "bias": False}
    branch = block_from_config(config, generator=generator).to(next(host.parameters()).dtype)
    norm, host_norm = branch.get_submodule("norm"), host.get_submodule("norm")
    norm.load_state_dict(host_norm.state_dict())
    return branch


def rebuild(base: nn.Module, log: list[Receipt]) -> nn.Module:
    """Replay a growth log on a fresh base network: same modules, names and order.

    Weights of new blocks are drawn anew; load a checkpoint's weights afterwards.

    Args:
        base: The base network, without growth; changed in place.
        log: Receipts in order.

    Returns:
        ``base``.

    Raises:
        UserError: If the base has grown already, or the log does not fit it.
    """
    if growth_log(base):
        raise UserError(f"the base network already has {len(growth_log(base))} grow steps: rebuild from a fresh one")
    generator = torch.Generator().manual_seed(0)
    for receipt in log:
        if receipt.kind == "jumpboard":
            _append(base, receipt)
            continue
        attachment: Attachment = "grown" if receipt.kind == "insert" else "widened"
        site, _, _ = receipt.path.rpartition(f".{attachment}.")
        block = block_from_config(receipt.block, generator=generator)
        made = _attach(base, resolve(base, site), attachment, site, block, optimizer=None, check_batch=None, log=False)
        if made.path != receipt.path:
            raise UserError(f"growth log says {receipt.path!r}, replaying it gives {made.path!r}: wrong base or order")
        _append(base, receipt)
    return base


def record_jumpboard(model: nn.Module, *, path: str, output_change: float) -> Receipt:
    """Log that the block at ``path`` was moved one line-searched step (outputs changed on purpose)."""
    block = resolve(model, path)
    assert isinstance(block, Block)
    names = tuple(f"{path}.project.{name}" for name, _ in block.project.named_parameters())
    receipt = Receipt(
        kind="jumpboard",
        path=path,
        block=block.config(),
        parameters=names,
        parameters_added=0,
        output_change=output_change,
    )
    _append(model, receipt)
    return receipt


def _attach(
    model: nn.Module,
    module: nn.Module,
    attachment: Attachment,
    site: str,
    block: Block,
    *,
    optimizer: optim.Optimizer | None,
    check_batch: Any,
    log: bool = True,
) -> Receipt:
    """Make ``block`` a child of ``module`` that its forward hook applies; undo it if outputs move."""
    if not block.is_zero:
        raise UserError(
            f"the projection of the block for {site!r} is not zero: inserting it would change the outputs; "
            "call block.reset(generator) first"
        )
    before = None if check_batch is None else _outputs(model, check_batch)
    first = next(iter(module.parameters()), None)
    if first is None:  # a dropout or pooling layer: the network's own
        first = next(iter(model.parameters()), None)
    if first is not None:
        block.to(device=first.device, dtype=first.dtype)
    block.train(module.training)
    undo, identifier = _add_child(module, attachment, block)
    try:
        change = None if before is None else _largest_change(before, _outputs(model, check_batch))
    except Exception:
        undo()
        raise
    if change:
        undo()
        raise UserError(f"a block at {site!r} changes outputs by {change:.3g}: this place cannot preserve the function")
    path = f"{site}.{attachment}.{identifier}"
    named = {f"{path}.{name}": p for name, p in block.named_parameters()}
    receipt = Receipt(
        kind="insert" if attachment == "grown" else "widen",
        path=path,
        block=block.config(),
        parameters=tuple(named),
        parameters_added=sum(p.numel() for p in named.values()),
        output_change=change,
    )
    if optimizer is not None:
        adopt(optimizer, named)
    if log:
        _append(model, receipt)
    return receipt


def _add_child(module: nn.Module, attachment: Attachment, block: Block) -> tuple[Callable[[], None], str]:
    """Attach ``block``; returns how to take it off again without a trace, and its id."""
    children = getattr(module, attachment, None)
    hook = None
    if children is None:
        children = Attached()
        children.train(module.training)
        module.add_module(attachment, children)
        hook = module.register_forward_hook(_apply_grown if attachment == "grown" else _apply_widened)
    identifier = str(len(children))
    children[identifier] = block

    def undo() -> None:
        del children[identifier]
        if hook is not None:
            hook.remove()
            delattr(module, attachment)

    return undo, identifier


def _apply_grown(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook: run the blocks inserted after ``module`` on its output."""
    z = stream_of(output, path="grown")
    for block in module.grown.values():
        z = z + block(z)
    return with_stream(output, z)


def _apply_widened(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Forward hook: add the extra units of a block, which read what the block reads."""
    for branch in module.widened.values():
        output = output + branch(args[0])
    return output


def _describe(model: nn.Module, path: str, batch: Any) -> Site:
    """What stream is at ``path``: known for our families, else seen in a forward pass."""
    try:
        return next(s for s in sites(model) if s.path == path)
    except (SiteError, StopIteration):
        if batch is None:
            raise SiteError(
                f"the stream at {path!r} is not known: pass block=, or check_batch= so that it can be seen"
            ) from None
    seen: list[Tensor] = []
    hook = resolve(model, path).register_forward_hook(lambda _m, _a, out: seen.append(stream_of(out, path=path)))
    try:
        _outputs(model, batch)
    finally:
        hook.remove()
    return site_of(seen[0], path=path)


def _outputs(model: nn.Module, batch: Any) -> Tensor:
    """Outputs in eval mode (of several, the logits or the first), with the training mode put back."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        out = model(**batch) if isinstance(batch, Mapping) else model(batch)
        for name in ("logits", "last_hidden_state"):
            out = getattr(out, name, out)
        found: Tensor = stream_of(out, path="") if isinstance(out, tuple | list) else out
        return found
    finally:
        for module, training in modes:
            module.training = training


def _largest_change(before: Tensor, after: Tensor) -> float:
    return 0.0 if torch.equal(before, after) else float((after - before).abs().max())


def _append(model: nn.Module, receipt: Receipt) -> None:
    setattr(model, _LOG, [*growth_log(model), receipt])
