"""Insert residual blocks into a live network without changing its function.

Outputs before and after are equal bit for bit, since the new branch ends in an all-zero projection and
``x + 0.0 == x`` for finite x.

Sources: Wei et al. 2016, "Network Morphism" (arXiv:1603.01670); Chen et al. 2016, "Net2Net"
(arXiv:1511.05641); here with zero output projections in place of identities and copies.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from growth_service.blocks import Block, block_from_config
from growth_service.core.receipts import Receipt
from growth_service.errors import SiteError, UserError
from growth_service.growth import log
from growth_service.growth.attach import Attachment, attach
from growth_service.growth.check import growable, largest_change, outputs, renew_graphs, runs_once, unshared
from growth_service.growth.sharding import begin_again, shard_like
from growth_service.growth.transplant import Optimizers, adopt
from growth_service.models import adapters
from growth_service.models.sites import Site, default_block_config, resolve, site_of, sites, stream_of


@torch.no_grad()
def insert_block(
    model: nn.Module,
    *,
    site: str,
    block: Block | None = None,
    generator: torch.Generator,
    optimizer: Optimizers | None = None,
    check_batch: Any = None,
    preserve: bool = True,
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
        optimizer: If given (one, or several that share the parameters), adopts the new ones (see :func:`adopt`).
        check_batch: Inputs (a tensor, or keyword arguments) on which outputs before and after are compared.
        preserve: False: a baseline that may change the function, a block that adds something already; the
            receipt says by how much, so it needs ``check_batch``.

    Returns:
        The receipt, also appended to :func:`growth_log`.

    Raises:
        SiteError: If the path is no site, or a place where adding zero changes the network.
        UserError: If the block's projection is not zero, or outputs changed on ``check_batch``
            (the network is left as it was).
    """
    model = growable(model)
    module = resolve(model, site)
    unshared(model, site)
    if block is None:
        place = _describe(model, site, check_batch)
        block = block_from_config(default_block_config(model, place), generator=generator)
    if not preserve:
        return _insert_inexactly(model, module, site, block, optimizer=optimizer, check_batch=check_batch)
    _check_place(model, site)
    return attach_exactly(model, module, "grown", site, block, optimizer=optimizer, check_batch=check_batch)


def _check_place(model: nn.Module, site: str) -> None:
    """Known architectures know where a zero branch preserves the function.

    Raises:
        SiteError: If it does not here.
    """
    place = next((s for s in adapters.sites(model) or () if s.path == site), None)
    if place is not None and not place.preserving:
        raise SiteError(f"a block at {site!r} would change the network: {place.reason}; choose another site")


def _insert_inexactly(
    model: nn.Module, module: nn.Module, site: str, block: Block, *, optimizer: Optimizers | None, check_batch: Any
) -> Receipt:
    if check_batch is None:
        raise UserError(
            f"an insertion at {site!r} that may change outputs needs check_batch=, so that the receipt can say by how "
            "much"
        )
    before = outputs(model, check_batch)
    return attach_and_judge(
        model, module, "grown", site, block, optimizer=optimizer, before=before, check_batch=check_batch
    )


def attach_exactly(
    model: nn.Module,
    module: nn.Module,
    attachment: Attachment,
    site: str,
    block: Block,
    *,
    optimizer: Optimizers | None,
    check_batch: Any,
) -> Receipt:
    """Attach a block that adds nothing, and undo it if outputs move all the same.

    Raises:
        UserError: If its projection is not zero, or outputs moved.
    """
    if not block.is_zero:
        raise UserError(
            f"the projection of the block for {site!r} is not zero: inserting it would change the outputs; "
            "call block.reset(generator) first"
        )
    before = None if check_batch is None else outputs(model, check_batch)

    def unchanged(change: float | None) -> None:
        if change:
            raise UserError(
                f"a block at {site!r} changes outputs by {change:.3g}: this place cannot preserve the function"
            )

    return attach_and_judge(
        model,
        module,
        attachment,
        site,
        block,
        optimizer=optimizer,
        before=before,
        check_batch=check_batch,
        judge=unchanged,
    )


def attach_and_judge(
    model: nn.Module,
    module: nn.Module,
    attachment: Attachment,
    site: str,
    block: Block,
    *,
    optimizer: Optimizers | None,
    before: Tensor | None,
    check_batch: Any,
    judge: Callable[[float | None], None] = lambda _: None,
    copied: list[int] | None = None,
) -> Receipt:
    """Attach, measure, judge; then, and only then, tell optimiser and log.

    Args:
        model: The network.
        module: That the block is attached to.
        attachment: How.
        site: Path of ``module``.
        block: The block.
        optimizer: That adopts its parameters.
        before: Outputs before; None: nothing is measured.
        check_batch: Inputs.
        judge: Raises where the largest change of an output is too large; all is undone then.
        copied: Of copies of units: which they copy.

    Raises:
        UserError: If the block is in the network already.
    """
    if any(m is block for m in model.modules()):
        raise UserError(f"the block for {site!r} is in the network already: pass a block of its own (a copy of it)")
    parent = f"{site}.{attachment}"
    identifier = log.next_identifier(model, parent)
    path = f"{parent}.{identifier}"
    undo = put(model, module, attachment, block, identifier=identifier)
    try:
        change = None
        if before is not None:
            with runs_once(module, site=site):
                after = outputs(model, check_batch)
            change = largest_change(before, after)
        judge(change)
        named = {f"{path}.{name}": p for name, p in block.named_parameters()}
        if optimizer is not None:
            adopt(optimizer, named, model=model)
    except Exception:
        undo()
        raise
    receipt = Receipt(
        kind="insert" if attachment == "grown" else "widen" if copied is None else "duplicate",
        path=path,
        block=block.config() if copied is None else {"branch": block.config(), "copied": copied},
        parameters=tuple(named),
        parameters_added=sum(p.numel() for p in named.values()),
        output_change=change,
    )
    log.append(model, receipt)
    return receipt


def put(
    model: nn.Module, module: nn.Module, attachment: Attachment, block: Block, *, identifier: str
) -> Callable[[], None]:
    """Attach a block in the precision, on the device and in the mode of its module; returns how to undo it."""
    first = next(iter(module.parameters()), None)
    if first is None:  # a dropout or pooling layer: the network's own
        first = next(iter(model.parameters()), None)
    if first is not None:
        block.to(device=first.device, dtype=first.dtype)
    block.train(module.training)
    shard_like(block, module, model)
    undo = attach(module, attachment, block, identifier=identifier)
    begin_again(model)
    renew_graphs()

    def take_off() -> None:
        undo()
        begin_again(model)
        renew_graphs()

    return take_off


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
    log.append(model, receipt)
    return receipt


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
        outputs(model, batch)
    finally:
        hook.remove()
    return site_of(seen[0], path=path)
