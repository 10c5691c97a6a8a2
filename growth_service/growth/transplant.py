"""The optimiser after a grow step: old state untouched, new parameters with a state of their own."""

from collections.abc import Iterable

from torch import nn, optim


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: matrices and kernels decay, norms and biases do not."""
    named = list(named)
    decay = [(n, p) for n, p in named if p.ndim > 1]
    rest = [(n, p) for n, p in named if p.ndim <= 1]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def adopt(optimizer: optim.Optimizer, named_new: dict[str, nn.Parameter]) -> None:
    """Let an optimiser train new parameters without touching what it knows of the old ones.

    New parameters join the group of their kind (matrices: the first group, vectors: the last),
    so they share its learning rate. Their state is made at their first step, with a step count
    of their own: the zero state under which the saturation boundary is proved. (Padding an old
    tensor would inherit its step count and blow up Adam's first updates.)

    Args:
        optimizer: Any torch optimiser; its groups may or may not carry parameter names.
        named_new: New parameters by name, as in a receipt.
    """
    groups = optimizer.param_groups
    for name, parameter in named_new.items():
        group = groups[0] if parameter.ndim > 1 else groups[-1]
        group["params"].append(parameter)
        if "param_names" in group:
            group["param_names"].append(name)
