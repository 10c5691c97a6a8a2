"""Candidate blocks: ``features``, then a projection that is zero at birth.

A block computes the branch of a residual update, ``z + block(z)``; at birth its output
projection is exactly zero, so adding it changes no output, while the gradient of the
projection is the cross-gradient that the saturation score is made of. Source: zero-initialised
last layer of a residual branch, Goyal et al. 2017 (arXiv:1706.02677), sec. 5.1.

``base`` says what a block is, ``projections`` what its zero output can express, the other
modules are the kinds: ``mlp``, ``conv``, ``postact``, ``transformer``, and ``gates`` (a learned scale in
place of a projection).
"""

from growth_service.blocks.base import Block, Calibrated, block_from_config, copy_of
from growth_service.blocks.conv import ConvBlock, DepthwiseBlock
from growth_service.blocks.gates import GatedBranch
from growth_service.blocks.mlp import FeedForwardBlock, GatedMLPBlock, MLPBlock
from growth_service.blocks.postact import PostActBlock
from growth_service.blocks.projections import (
    AffineGate,
    ChannelGate,
    ScalarGate,
    flatten_projection,
    set_projection,
    stream_positions,
    tangent_features,
)
from growth_service.blocks.transformer import HeadsBlock, TransformerBlock

__all__ = [
    "AffineGate",
    "Block",
    "Calibrated",
    "ChannelGate",
    "ConvBlock",
    "DepthwiseBlock",
    "FeedForwardBlock",
    "GatedBranch",
    "GatedMLPBlock",
    "HeadsBlock",
    "MLPBlock",
    "PostActBlock",
    "ScalarGate",
    "TransformerBlock",
    "block_from_config",
    "copy_of",
    "flatten_projection",
    "set_projection",
    "stream_positions",
    "tangent_features",
]
