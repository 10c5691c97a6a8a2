"""The growth log of a network: every change made to it, in order."""

from torch import nn

from growth_service.core.receipts import Receipt

_LOG = "_growth_log"
_ATTACHES = ("insert", "widen", "duplicate")


def growth_log(model: nn.Module) -> list[Receipt]:
    """Every change made to ``model`` by this package, in order."""
    return list(getattr(model, _LOG, ()))


def append(model: nn.Module, receipt: Receipt) -> None:
    """Write one more change into the log."""
    setattr(model, _LOG, [*growth_log(model), receipt])


def forget(model: nn.Module) -> None:
    """Make the network a base of its own."""
    if hasattr(model, _LOG):
        delattr(model, _LOG)


def next_identifier(model: nn.Module, parent: str) -> str:
    """Id of the next block under ``<site>.grown`` or ``<block>.widened``: how many were ever attached there.

    An id is never given twice, so that a name in the log, in a checkpoint or in a table means one block.
    """
    return str(sum(r.path.rpartition(".")[0] == parent for r in growth_log(model) if r.kind in _ATTACHES))
