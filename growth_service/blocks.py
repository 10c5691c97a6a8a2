"""Candidate blocks: ``features``, then a projection that is zero at birth.

A block computes the branch of a residual update, ``z + block(z)``; at birth its output
projection is exactly zero, so adding it changes no output, while the gradient of the
projection is the cross-gradient that the saturation score is made of. Source: zero-initialised
last layer of a residual branch, Goyal et al. 2017 (arXiv:1706.02677), sec. 5.1.

Shape legend: B = batch, D = width of the stream, F = features, P = positions.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from growth_service.errors import UserError


class Block(nn.Module):
    """A residual branch: ``forward(z) = project(features(z))``, without the skip.

    Subclasses are final and set ``project`` to an ``nn.Linear`` or a stride-1 ``nn.Conv2d``.
    """

    type_name: ClassVar[str]
    project: nn.Linear | nn.Conv2d

    @abstractmethod
    def features(self, z: Tensor) -> Tensor:
        """Features phi of the stream, in the layout that ``project`` takes."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """JSON from which :func:`block_from_config` builds a block of this shape."""

    @property
    @abstractmethod
    def hidden(self) -> int:
        """Hidden units: the width that ``widen`` grows."""

    def forward(self, z: Tensor) -> Tensor:
        """The branch: zero at birth. Same shape as ``z``."""
        delta: Tensor = self.project(self.features(z))
        return delta

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw inner weights from ``generator``; zero the projection."""
        for name, parameter in self.named_parameters():
            if name.startswith("project."):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu", generator=generator)
            elif name.endswith("weight"):
                nn.init.ones_(parameter)
            else:
                nn.init.zeros_(parameter)

    @property
    def is_zero(self) -> bool:
        """True while the projection is literally zero, so that the branch adds nothing."""
        return not any(bool(p.any()) for p in self.project.parameters())


class MLPBlock(Block):
    """RMSNorm, linear, GELU, linear, for streams ``[B, D]`` and ``[B, T, D]``."""

    type_name = "mlp"

    def __init__(self, width: int, hidden: int, *, bias: bool = True) -> None:
        super().__init__()
        _check_positive(width=width, hidden=hidden)
        self._config = {"type": self.type_name, "width": width, "hidden": hidden, "bias": bias}
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.inner = nn.Linear(width, hidden)
        self.project = nn.Linear(hidden, width, bias=bias)
        _zero(self.project)

    def features(self, z: Tensor) -> Tensor:
        """``gelu(W1 norm(z) + b1)``. ``[B, ..., hidden]``."""
        return nn.functional.gelu(self.inner(self.norm(z)))

    def config(self) -> dict[str, Any]:
        """Type, width, hidden, bias."""
        return dict(self._config)

    @property
    def hidden(self) -> int:
        """Hidden units."""
        return self.inner.out_features


class ConvBlock(Block):
    """Pre-activation: GroupNorm, ReLU, 3x3, GroupNorm, ReLU, 3x3, for streams ``[B, D, H, W]``.

    GroupNorm groups have ``group_size`` channels each, so that adding channels leaves the groups
    of the old ones alone.
    """

    type_name = "conv"

    def __init__(self, width: int, hidden: int, *, group_size: int = 4, bias: bool = True) -> None:
        super().__init__()
        _check_positive(width=width, hidden=hidden, group_size=group_size)
        for name, channels in (("width", width), ("hidden", hidden)):
            if channels % group_size:
                raise UserError(
                    f"{name} {channels} of a convolution block must be a multiple of its group size {group_size}"
                )
        self._config = {
            "type": self.type_name,
            "width": width,
            "hidden": hidden,
            "group_size": group_size,
            "bias": bias,
        }
        self.norm = nn.GroupNorm(width // group_size, width)
        self.inner = nn.Conv2d(width, hidden, 3, padding=1, bias=False)
        self.inner_norm = nn.GroupNorm(hidden // group_size, hidden)
        self.project = nn.Conv2d(hidden, width, 3, padding=1, bias=bias)
        _zero(self.project)

    def features(self, z: Tensor) -> Tensor:
        """Activated inner channels. ``[B, hidden, H, W]``."""
        u = self.inner(nn.functional.relu(self.norm(z)))
        return nn.functional.relu(self.inner_norm(u))

    def config(self) -> dict[str, Any]:
        """Type, width, hidden, group size, bias."""
        return dict(self._config)

    @property
    def hidden(self) -> int:
        """Inner channels."""
        return self.inner.out_channels


_TYPES: dict[str, type[Block]] = {cls.type_name: cls for cls in (MLPBlock, ConvBlock)}


def block_from_config(config: dict[str, Any], *, generator: torch.Generator) -> Block:
    """Build a block from its configuration, drawing inner weights from ``generator`` alone.

    Raises:
        UserError: If the type is unknown.
    """
    fields = dict(config)
    type_name = fields.pop("type", None)
    if type_name not in _TYPES:
        raise UserError(f"unknown block type {type_name!r}: use one of {', '.join(_TYPES)}")
    with torch.random.fork_rng(devices=[]):  # constructors draw from the global stream
        block = _TYPES[type_name](**fields)
    block.reset(generator)
    return block


def tangent_features(block: Block, z: Tensor) -> Tensor:
    """Features per position, such that ``delta_p = [W, b] phi_p``: unfolded, with the constant.

    Returns:
        ``[B, K, P]``; K = hidden * kernel area (+ 1 with a bias), the columns of
        :func:`flatten_projection`.
    """
    phi = block.features(z)
    project = block.project
    if isinstance(project, nn.Conv2d):
        padding = project.padding
        assert not isinstance(padding, str)
        flat = nn.functional.unfold(phi, project.kernel_size, project.dilation, padding, project.stride)
    else:
        flat = stream_positions(phi)
    if project.bias is None:
        return flat
    return torch.cat([flat, flat.new_ones(flat.shape[0], 1, flat.shape[2])], dim=1)


def stream_positions(z: Tensor) -> Tensor:
    """A stream tensor as ``[B, D, P]``: vectors have one position, images H*W, sequences T.

    Raises:
        UserError: If the tensor has no batch and channel axes.
    """
    match z.ndim:
        case 2:
            return z.unsqueeze(2)
        case 3:
            return z.transpose(1, 2)
        case 4:
            return z.flatten(2)
        case _:
            raise UserError(f"a residual stream is [B, d], [B, T, d] or [B, C, H, W], got shape {tuple(z.shape)}")


def flatten_projection(project: nn.Linear | nn.Conv2d) -> Tensor:
    """Weight and bias of a projection as one matrix. ``[D, K]``."""
    weight = project.weight.flatten(1)
    return weight if project.bias is None else torch.cat([weight, project.bias[:, None]], dim=1)


@torch.no_grad()
def set_projection(project: nn.Linear | nn.Conv2d, matrix_DK: Tensor) -> None:
    """Inverse of :func:`flatten_projection`: write a matrix into weight and bias."""
    matrix_DK = matrix_DK.to(project.weight)
    if project.bias is not None:
        project.bias.copy_(matrix_DK[:, -1])
        matrix_DK = matrix_DK[:, :-1]
    project.weight.copy_(matrix_DK.reshape(project.weight.shape))


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name} of a block must be at least 1, got {size}")


@torch.no_grad()
def _zero(project: nn.Linear | nn.Conv2d) -> None:
    for parameter in project.parameters():
        nn.init.zeros_(parameter)
