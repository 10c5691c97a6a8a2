"""A growth log played again: on a fresh base network, and on copies of a network that must follow it."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from growth_service.blocks import Block, block_from_config
from growth_service.core.receipts import Receipt
from growth_service.errors import UserError
from growth_service.growth.attach import owner
from growth_service.growth.duplicate import share_outgoing
from growth_service.growth.insert import put
from growth_service.growth.log import append, growth_log, next_identifier
from growth_service.growth.remove import check_units, shrink, take_out
from growth_service.growth.stream import replay_stream
from growth_service.models.streams import resolve


def rebuild(base: nn.Module, log: Sequence[Receipt]) -> nn.Module:
    """Replay a growth log on a fresh base network: same modules, names and order.

    Weights of new parts are drawn anew; load a checkpoint's weights afterwards.

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
    for receipt in log:
        replay(base, receipt)
    return base


@torch.no_grad()
def follow(copy: nn.Module, model: nn.Module) -> list[Receipt]:
    """Let a copy of a network (an average of its weights, say) take the grow steps that it has not taken yet.

    What is old in the copy stays as it is; what is new gets the values that it has in ``model``.

    Args:
        copy: A deep copy of ``model`` made at any earlier time, or an ``AveragedModel`` of one.
        model: The network that has grown since, or a data-parallel wrapper around it.

    Returns:
        The steps taken.

    Raises:
        UserError: If the copy has grown in another way.
    """
    inner, source = _unwrapped(copy), _unwrapped(model)
    old, new = growth_log(inner), growth_log(source)
    if new[: len(old)] != old:
        raise UserError(
            f"this copy has taken {len(old)} grow steps that are not the first of the network's {len(new)}: make a new "
            "copy of the network"
        )
    taken, made = new[len(old) :], set[str]()
    for receipt in taken:
        known = _tensors(inner)
        replay(inner, receipt)
        if receipt.kind == "duplicate":
            host = resolve(inner, receipt.path.rpartition(".widened.")[0])
            assert isinstance(host, Block)
            share_outgoing(host, receipt.block["copied"])
        made |= set(_tensors(inner)) - set(known)
    values, own = _tensors(source), _tensors(inner)
    for name in made & set(own):  # what a later step removed again has no value
        own[name].copy_(values[name])
    return taken


def _unwrapped(network: nn.Module) -> nn.Module:
    network = getattr(network, "_orig_mod", network)
    return network.module if isinstance(network, DistributedDataParallel | AveragedModel) else network


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def replay(model: nn.Module, receipt: Receipt) -> None:
    """Take one step of a log, with new weights of no meaning.

    Raises:
        UserError: If the network is not the one that took it.
    """
    wrong = (
        f"step {len(growth_log(model))} of the growth log ({receipt.kind} {receipt.path!r}) does not fit this network"
    )
    try:
        made = _replay(model, receipt)
    except (UserError, AttributeError, AssertionError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise UserError(f"{wrong}: {error}; wrong base or order") from error
    if made != receipt.path:
        raise UserError(f"{wrong}: replaying it gives {made!r}; wrong base or order")
    append(model, receipt)


def _replay(model: nn.Module, receipt: Receipt) -> str:
    generator = torch.Generator().manual_seed(0)
    match receipt.kind:
        case "insert" | "widen" | "duplicate":
            place = owner(receipt.path)
            if place is None:
                return "nothing"
            parent, attachment, _ = place
            config = receipt.block["branch"] if receipt.kind == "duplicate" else receipt.block
            block = block_from_config(config, generator=generator)
            identifier = next_identifier(model, f"{parent}.{attachment}")
            put(model, resolve(model, parent), attachment, block, identifier=identifier)
            return f"{parent}.{attachment}.{identifier}"
        case "stream":
            replay_stream(model, receipt.path, channels=receipt.block["channels"], generator=generator)
        case "remove":
            take_out(model, receipt.path)
        case "shrink":
            host = resolve(model, receipt.path)
            assert isinstance(host, Block)
            units, heads = receipt.block["units"], receipt.block["heads"]
            check_units(host, receipt.path, units=units, heads=heads)
            shrink(host, units=units, heads=heads)
        case "jumpboard":
            pass
        case other:
            raise UserError(f"unknown step {other!r}: update growth-service")
    return receipt.path
