"""The optimiser after a grow step: old state untouched, new parameters with a state of their own."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn, optim

from growth_service.errors import UserError

Optimizers = optim.Optimizer | Sequence[optim.Optimizer]


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: matrices and kernels decay, norms and biases do not."""
    named = list(named)
    decay = [(n, p) for n, p in named if p.ndim > 1]
    rest = [(n, p) for n, p in named if p.ndim <= 1]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def adopt(optimizer: Optimizers, named_new: dict[str, nn.Parameter], *, model: nn.Module | None = None) -> None:
    """Let an optimiser train new parameters without touching what it knows of the old ones.

    A new parameter joins the group of its nearest relative: of the trained parameters of its kind (matrices, or
    vectors), the one with the longest common path. So it shares that one's learning rate, decay and, where several
    optimisers divide the network between them, its optimiser. Without a relative of its kind it joins the group of
    any. Schedulers go on, since no group is added. The new state is made at the parameter's first step, with a step
    count of its own: the zero state under which the saturation boundary is proved. (Padding an old tensor would
    inherit its step count and blow up Adam's first updates.)

    Args:
        optimizer: Any torch optimiser, or several; groups may or may not carry parameter names.
        named_new: New parameters by name, as in a receipt.
        model: The network, for the names of its parameters; None: names in the groups, if any.

    Raises:
        UserError: If there is no optimiser that could train one of them; none is adopted then.
    """
    names = {p: n for n, p in model.named_parameters()} if model is not None else {}
    groups = [g for o in _all(optimizer) for g in o.param_groups]
    for group in groups:
        names |= dict(zip(group["params"], group.get("param_names", ()), strict=False))
    known = [(names.get(p, ""), p, group) for group in groups for p in group["params"]]
    taken = {p for _, p, _ in known}
    new = {name: p for name, p in named_new.items() if p not in taken}
    chosen = {name: _group_of_nearest(name, p, known, optimizer) for name, p in new.items()}  # all of them, or none
    for name, parameter in new.items():
        parameter.requires_grad_(True)
        group = chosen[name]
        group["params"].append(parameter)
        if "param_names" in group:
            group["param_names"].append(name)


def check_optimizer(optimizer: Optimizers | None) -> None:
    """Refuse what is no optimiser, before anything changes.

    Raises:
        UserError: Naming its type.
    """
    if optimizer is not None:
        _all(optimizer)


def forget(optimizer: Optimizers, gone: Iterable[nn.Parameter]) -> None:
    """Take parameters and their state out of an optimiser."""
    gone = set(gone)
    for one in _all(optimizer):
        for group in one.param_groups:
            kept = [i for i, p in enumerate(group["params"]) if p not in gone]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][i] for i in kept]
            group["params"] = [group["params"][i] for i in kept]
        for parameter in gone:
            one.state.pop(parameter, None)


def replace_cut(optimizer: Optimizers, old: nn.Parameter, new: nn.Parameter, *, axis: int, keep: Tensor) -> None:
    """Let a parameter that lost entries along an axis take the place of the old one, with what is left of its state.

    Factored states (Adafactor) lose entries where they have that axis.
    """
    size = old.shape[axis]
    for one in _all(optimizer):
        for group in one.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        if old not in one.state:
            continue
        state: dict[str, Any] = one.state.pop(old)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim > axis and value.shape[axis] == size:
                state[key] = value.index_select(axis, keep.to(value.device))
        one.state[new] = state


def _all(optimizer: Optimizers) -> list[optim.Optimizer]:
    found = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if not all(isinstance(one, optim.Optimizer) for one in found):
        raise UserError(f"optimizer is a {type(optimizer).__name__}: pass a torch optimiser, or a list of them")
    return found


def _only_matrices(group: dict[str, Any], optimizers: list[optim.Optimizer]) -> bool:
    """Whether a group is one of Muon's, which takes nothing but matrices."""
    return any(type(o).__name__ == "Muon" and any(g is group for g in o.param_groups) for o in optimizers)


def _group_of_nearest(
    name: str,
    parameter: nn.Parameter,
    known: list[tuple[str, nn.Parameter, dict[str, Any]]],
    optimizer: Optimizers,
) -> dict[str, Any]:
    """Group of the parameter of the same kind whose path has most in common with ``name``; the first of equals."""
    optimizers = _all(optimizer)
    fitting = [k for k in known if parameter.ndim == 2 or not _only_matrices(k[2], optimizers)]
    if not fitting:
        why = "it trains no parameter yet" if not known else "Muon takes matrices only: pass a second optimiser as well"
        raise UserError(f"the optimiser cannot adopt {name!r} of shape {tuple(parameter.shape)}: {why}")
    alike = [k for k in fitting if (k[1].ndim > 1) == (parameter.ndim > 1)] or fitting

    def common(other: tuple[str, nn.Parameter, dict[str, Any]]) -> int:
        pairs = zip(name.split("."), other[0].split("."), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(name.count("."), other[0].count(".")) + 1)

    return max(alike, key=common)[2]
