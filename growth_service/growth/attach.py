"""Blocks as children of the modules that they follow, applied by forward hooks.

New modules are children of the module they attach to (``<site>.grown.<id>``, ``<block>.widened.<id>``) and
run from a forward hook of it, so no old parameter changes its name and any ``nn.Module`` can be grown.
"""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from growth_service.blocks import Block
from growth_service.models.streams import stream_of, with_stream

Attachment = Literal["grown", "widened"]


class Attached(nn.ModuleDict):
    """Blocks attached to a module, by id, applied in the order of their insertion."""


def attach(module: nn.Module, attachment: Attachment, block: Block, *, identifier: str) -> Callable[[], None]:
    """Make ``block`` a child of ``module`` that its forward hook applies; returns how to take it off again."""
    children = getattr(module, attachment, None)
    if children is None:
        children = Attached()
        children.train(module.training)
        module.add_module(attachment, children)
        module.register_forward_hook(_APPLY[attachment])
    children[identifier] = block
    return lambda: detach(module, attachment, identifier)


def detach(module: nn.Module, attachment: Attachment, identifier: str) -> None:
    """Take a block off; the last one takes hook and container with it, so that nothing is left."""
    children = module.get_submodule(attachment)
    assert isinstance(children, Attached)
    del children[identifier]
    if not children:
        for key in [k for k, hook in module._forward_hooks.items() if hook is _APPLY[attachment]]:
            del module._forward_hooks[key]
        delattr(module, attachment)


def owner(path: str) -> tuple[str, Attachment, str] | None:
    """Where an attached block hangs: (path of the module, attachment, id); None for any other path."""
    for attachment in ("grown", "widened"):
        head, dot, identifier = path.rpartition(f".{attachment}.")
        if dot and "." not in identifier:
            return head, attachment, identifier
    return None


def _apply_grown(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook: run the blocks inserted after ``module`` on its output."""
    z = stream_of(output, path="grown")
    for block in module.grown.values():
        z = z + block(z)
    return with_stream(output, z)


def _apply_widened(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Forward hook: add the extra units of a block, which read what the block reads; some blocks do so themselves."""
    if module.units_read is not None:
        return output
    for branch in module.widened.values():
        output = output + branch(args[0])
    return output


_APPLY: dict[Attachment, Callable[..., Any]] = {"grown": _apply_grown, "widened": _apply_widened}
