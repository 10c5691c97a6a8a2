"""Residual families of our own: groups of blocks of equal resolution on one stream.

Every family is ``groups.<i>.entry`` (a stem, a transition or an embedding), then
``groups.<i>.blocks.<j>``, each a residual update, then a norm and a head. Norms are RMSNorm,
LayerNorm or GroupNorm: BatchNorm would couple the samples of a shard and the ranks of a trial.
"""

from typing import Any

import torch
from torch import nn

from growth_service.blocks import Block
from growth_service.errors import UserError
from growth_service.models.families.base import Family, Group, Residual, reset_layer
from growth_service.models.families.gpt import GPT, TokenEmbedding
from growth_service.models.families.mlp import ResidualMLP
from growth_service.models.families.resnet import ResNet

FAMILIES: dict[str, type[Family]] = {cls.family: cls for cls in (ResidualMLP, ResNet, GPT)}


def build(spec: dict[str, Any], *, seed: int) -> Family:
    """Build a network of a family with weights from ``seed`` alone.

    Existing blocks start with small random projections (a trained-from-scratch block is not a
    grown one): their last layer is scaled by 1 / sqrt(number of blocks), so that the stream
    keeps its size with depth. Source: the depth-scaled initialisation of GPT-2 (Radford et al. 2019).

    Args:
        spec: ``family``, ``widths``, ``blocks``, ``hidden``, and what the family adds: ``input_shape``
            and ``num_classes`` (mlp, resnet), ``stem_stride``, ``group_size`` (resnet), ``vocab``,
            ``context``, ``heads``, ``positions``, ``parallel``, ``norm`` (gpt).
        seed: Of the initial weights.

    Raises:
        UserError: If the family is unknown, a size is missing, or the sizes do not fit together.
    """
    family = spec.get("family")
    if family not in FAMILIES:
        raise UserError(f"unknown model family {family!r}: use one of {', '.join(sorted(FAMILIES))}")
    with torch.random.fork_rng(devices=[]):  # constructors draw from the global stream
        try:
            model = FAMILIES[family](spec)
        except KeyError as error:
            raise UserError(f"the specification of a network of family {family!r} lacks {error}") from error
    generator = torch.Generator().manual_seed(seed)
    depth = max(1, sum(spec["blocks"]))
    for module in model.modules():
        if isinstance(module, Block):
            module.reset(generator)
            with torch.no_grad():
                weight = module.project.get_parameter("weight")
                nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=generator)
                weight.mul_(0.5 / depth**0.5)
        elif isinstance(module, TokenEmbedding):
            module.reset(generator)
        elif isinstance(module, Group) and not isinstance(module.entry, TokenEmbedding):
            reset_layer(module.entry, generator)
    reset_layer(model.head, generator)
    return model


__all__ = [
    "FAMILIES",
    "GPT",
    "Family",
    "Group",
    "ResNet",
    "Residual",
    "ResidualMLP",
    "TokenEmbedding",
    "build",
]
