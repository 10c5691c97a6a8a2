"""What a grow step is checked against: outputs before and after, and what may be grown at all."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from growth_service.errors import SiteError, UserError
from growth_service.models.streams import stream_of


def outputs(model: nn.Module, batch: Any) -> Tensor:
    """Outputs in eval mode (of several, the logits or the first), with the training mode put back."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            out = model(**batch) if isinstance(batch, Mapping) else model(batch)
        for name in ("logits", "last_hidden_state"):
            out = getattr(out, name, out)
        found: Tensor = stream_of(out, path="") if isinstance(out, tuple | list) else out
        return found
    finally:
        for module, training in modes:
            module.training = training


def largest_change(before: Tensor, after: Tensor) -> float:
    """Largest absolute difference; exactly 0.0 for equal bits."""
    return 0.0 if torch.equal(before, after) else float((after - before).abs().max())


def unshared(model: nn.Module, path: str) -> None:
    """Refuse a module that stands at several places: what is added to it would run at each of them.

    Raises:
        SiteError: Naming the places.
    """
    module = model.get_submodule(path)
    places = [name for name, other in model.named_modules(remove_duplicate=False) if other is module]
    if len(places) > 1:
        raise SiteError(
            f"{path!r} is one module at {len(places)} places ({', '.join(places)}): a block there would run at each; "
            "choose a module that runs once"
        )


def growable(model: nn.Module) -> None:
    """Refuse networks whose forward pass no longer is that of their modules.

    Raises:
        UserError: If the network is compiled or scripted.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError("a scripted network cannot be grown: grow the module it was made from, and script it again")
    if hasattr(model, "_orig_mod"):
        raise UserError(
            "a compiled network cannot be grown: grow the module inside (model._orig_mod) and compile it again, since "
            "the compiled graph does not know the new block"
        )
