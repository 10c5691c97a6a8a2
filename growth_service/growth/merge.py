"""Fold what growth added into dense matrices, for export and speed. Outputs are equal to rounding.

A merged network is a new base: its log is gone, and what optimisers knew of its parameters is too.
"""

import torch
from torch import Tensor, nn

from growth_service.blocks import Block, FeedForwardBlock, GatedMLPBlock, HeadsBlock, MLPBlock, TransformerBlock
from growth_service.blocks.composed import dense
from growth_service.growth import log
from growth_service.growth.attach import detach
from growth_service.growth.check import renew_graphs

_UNIT_BLOCKS = (MLPBlock, GatedMLPBlock, FeedForwardBlock)


@torch.no_grad()
def merge(model: nn.Module) -> list[str]:
    """Fold pieces of wider streams, and branches of new units and heads where that is possible, in place.

    A branch can be folded where it reads the stream through a norm of its own whose weights can move into the
    matrices behind it: units of feed-forward blocks, units and heads of parallel transformer blocks. Not those of
    convolution blocks (a ReLU is in between) and of sequential transformer blocks (whose old units read the stream plus
    the old heads).

    Returns:
        Paths of the branches that were folded.
    """
    for module in list(model.modules()):
        dense(module)
    renew_graphs()
    folded = []
    for path, host in [(p, m) for p, m in model.named_modules() if isinstance(m, Block)]:
        branches = getattr(host, "widened", None)
        for identifier, branch in list(branches.items()) if isinstance(branches, nn.ModuleDict) else []:
            if _fold(host, branch):
                detach(host, "widened", identifier)
                folded.append(f"{path}.widened.{identifier}")
    log.forget(model)
    return folded


def _fold(host: Block, branch: nn.Module) -> bool:
    """Fold one branch; False where it cannot be."""
    if isinstance(host, _UNIT_BLOCKS) and type(branch) is type(host):
        return _fold_units(host, branch, norms=("norm", "norm"), offset=0)
    if not isinstance(host, TransformerBlock) or not host.config()["parallel"]:
        return False
    if isinstance(branch, FeedForwardBlock):
        return _fold_units(host, branch, norms=("mlp_norm", "norm"), offset=host.query.out_features)
    return isinstance(branch, HeadsBlock) and _fold_heads(host, branch)


def _fold_units(host: Block, branch: Block, *, norms: tuple[str, str], offset: int) -> bool:
    names = host.unit_writers
    if names != branch.unit_writers or not _unite_norms(host, branch, norms=norms, readers=names):
        return False
    _append_rows(host, branch, names)
    _append_columns(host, branch, at=offset + host.hidden - branch.hidden)
    host.restate(hidden=branch.hidden)
    return True


def _fold_heads(host: TransformerBlock, branch: HeadsBlock) -> bool:
    same = host.config()["kv_heads"] == host.config()["heads"]
    names = ("query", "key", "value")
    if not same or not _unite_norms(host, branch, norms=("attn_norm", "norm"), readers=names):
        return False
    at = host.query.out_features
    _append_rows(host, branch, names)
    _append_columns(host, branch, at=at)
    host.restate(heads=branch.config()["heads"])
    return True


def _unite_norms(host: Block, branch: Block, *, norms: tuple[str, str], readers: tuple[str, ...]) -> bool:
    """Move weights and biases of both norms into the matrices that read them, so that both normalise alike."""
    own, other = host.get_submodule(norms[0]), branch.get_submodule(norms[1])
    if type(own) is not type(other) or getattr(own, "eps", None) != getattr(other, "eps", None):
        return False
    layers = [(own, [host.get_submodule(n) for n in readers]), (other, [branch.get_submodule(n) for n in readers])]
    shifted = any(norm._parameters.get("bias") is not None for norm, _ in layers)
    if any(_bias(layer) is None and (shifted or _bias(twin) is not None)
           for layer, twin in zip(layers[0][1], layers[1][1], strict=True)):  # fmt: skip
        return False  # the host's layer could not hold the shift
    for norm, listed in layers:
        weight, bias = norm._parameters["weight"], norm._parameters.get("bias")
        assert weight is not None
        for layer in listed:
            matrix = layer.get_parameter("weight")
            if bias is not None:
                layer.get_parameter("bias").add_(matrix @ bias)
            matrix.mul_(weight)
        weight.fill_(1.0)
        if bias is not None:
            bias.zero_()
    return True


def _bias(layer: nn.Module) -> nn.Parameter | None:
    return layer._parameters.get("bias")


def _append_rows(host: Block, branch: Block, names: tuple[str, ...]) -> None:
    for name in names:
        layer, new = host.get_submodule(name), branch.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        assert isinstance(new, nn.Linear)
        layer.weight = nn.Parameter(torch.cat([layer.weight, new.weight]))
        if layer.bias is not None:
            added = new.bias if new.bias is not None else layer.bias.new_zeros(new.out_features)
            layer.bias = nn.Parameter(torch.cat([layer.bias, added]))
        layer.out_features += new.out_features


def _append_columns(host: Block, branch: Block, *, at: int) -> None:
    """Put the branch's outgoing columns in front of column ``at`` of the host's."""
    project, new = host.project, branch.project
    assert isinstance(project, nn.Linear)
    assert isinstance(new, nn.Linear)
    old: Tensor = project.weight
    project.weight = nn.Parameter(torch.cat([old[:, :at], new.weight, old[:, at:]], dim=1))
    project.in_features += new.in_features
