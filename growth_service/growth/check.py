"""What a grow step is checked against: outputs before and after, and what may be grown at all."""

import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

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


def untied(model: nn.Module, paths: Iterable[str]) -> None:
    """Refuse layers whose parameters are used elsewhere too: resizing one would tear them apart.

    Raises:
        UserError: Naming the parameter and its places.
    """
    places: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    for path in paths:
        for parameter in model.get_submodule(path).parameters():
            if len(places[parameter]) > 1:
                raise UserError(
                    f"{places[parameter][0]!r} is one parameter at {len(places[parameter])} places "
                    f"({', '.join(places[parameter])}): it cannot be resized at one of them; untie it first"
                )


def whole_number(value: Any, *, what: str) -> int:
    """A count or an index as a plain int.

    Raises:
        UserError: If it is none.
    """
    try:
        return operator.index(value)
    except TypeError as error:
        raise UserError(f"{what} must be a whole number, got {value!r} ({type(value).__name__})") from error


@contextmanager
def runs_once(module: nn.Module, *, site: str) -> Iterator[None]:
    """Inside, one forward pass must call ``module`` exactly once, since what is attached to it runs when it is called.

    Raises:
        SiteError: If it does not.
    """
    calls: list[None] = []
    handle = module.register_forward_hook(lambda *_: calls.append(None))
    try:
        yield
    finally:
        handle.remove()
    if len(calls) != 1:
        raise SiteError(
            f"{site!r} is called {len(calls)} times in a forward pass, and a block there would run as often: choose a "
            "module that is called once"
        )


def growable(model: nn.Module) -> nn.Module:
    """The network to grow: the model itself, or what ``torch.compile`` was given.

    Raises:
        UserError: If the network, or a part of it, is scripted, or it is wrapped.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel | AveragedModel):
        raise UserError(
            f"a {type(model).__name__} cannot be grown: grow the network inside (model.module), and wrap it again (or "
            "let an average follow it), so that the wrapper knows the new parameters"
        )
    for path, module in model.named_modules():
        where = f"at {path!r} " if path else ""
        if isinstance(module, torch.jit.ScriptModule):
            raise UserError(
                f"a scripted network {where}cannot be grown: grow the module it was made from, and script it again"
            )
        if hasattr(module, "_orig_mod"):
            raise UserError(
                f"the part {where}was compiled by itself, and its paths are those of a wrapper: put the module it was "
                "made from (._orig_mod) back, grow, and compile it again; or use module.compile(), which wraps nothing"
            )
    return model


def renew_graphs() -> None:
    """Let compiled networks be traced anew at their next call: graphs do not look whether modules have new children.

    Does nothing where nothing was compiled in this process.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
