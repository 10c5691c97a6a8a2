"""Convolution blocks for streams ``[B, D, H, W]``."""

from typing import Literal

import torch
from torch import Tensor, nn

from growth_service.blocks.base import Block, check_positive, zero
from growth_service.errors import UserError

Norm = Literal["group", "batch", "layer", "none"]
_NORMS = ("group", "batch", "layer", "none")


class ConvBlock(Block):
    """Pre-activation: norm, ReLU, 3x3, norm, ReLU, then 3x3 or 1x1.

    ``group`` is GroupNorm with groups of ``group_size`` channels each, so that adding channels
    leaves the groups of the old ones alone; ``layer`` is one group of all channels; ``batch`` is
    BatchNorm, whose statistics are those of the candidate's own calibration (see
    :meth:`calibrate`), for networks that use it themselves.
    """

    type_name = "conv"
    stream_norms, stream_readers = ("norm",), ("inner",)
    unit_writers, unit_norms = ("inner",), ("inner_norm",)

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        group_size: int = 4,
        bias: bool = True,
        norm: Norm = "group",
        kernel_out: Literal[1, 3] = 3,
    ) -> None:
        super().__init__()
        check_positive(width=width, hidden=hidden, group_size=group_size)
        if norm not in _NORMS or kernel_out not in (1, 3):
            raise UserError(
                f"a convolution block has norm {', '.join(_NORMS)} and kernel_out 1 or 3, got {norm!r}, {kernel_out!r}"
            )
        for name, channels in (("width", width), ("hidden", hidden)):
            if norm == "group" and channels % group_size:
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
        if norm != "group":
            self._config["norm"] = norm
        if kernel_out != 3:
            self._config["kernel_out"] = kernel_out
        self.norm = _norm(norm, width, group_size)
        self.inner = nn.Conv2d(width, hidden, 3, padding=1, bias=False)
        self.inner_norm = _norm(norm, hidden, group_size)
        self.project = nn.Conv2d(hidden, width, kernel_out, padding=kernel_out // 2, bias=bias)
        zero(self.project)

    def features(self, z: Tensor) -> Tensor:
        """Activated inner channels. ``[B, hidden, H, W]``."""
        u = self.inner(nn.functional.relu(self.norm(z)))
        return nn.functional.relu(self.inner_norm(u))

    @property
    def hidden(self) -> int:
        """Inner channels."""
        return self.inner.out_channels

    @torch.no_grad()
    def calibrate(self, z: Tensor) -> None:
        """Set BatchNorm statistics to those of a sample of the stream: a fresh layer has (0, 1)."""
        norms = [n for n in (self.norm, self.inner_norm) if isinstance(n, nn.BatchNorm2d)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum, kept = None, norm.momentum
            norm.train()
            self.features(z)
            norm.eval()
            norm.momentum = kept


class DepthwiseBlock(Block):
    """7x7 depthwise, LayerNorm over channels, 1x1, GELU, 1x1: the block of ConvNeXt.

    Source: Liu et al. 2022, "A ConvNet for the 2020s" (arXiv:2201.03545).
    """

    type_name = "depthwise"

    def __init__(self, width: int, hidden: int, *, bias: bool = True) -> None:
        super().__init__()
        check_positive(width=width, hidden=hidden)
        self._config = {"type": self.type_name, "width": width, "hidden": hidden, "bias": bias}
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.inner = nn.Linear(width, hidden)
        self.project = nn.Conv2d(hidden, width, 1, bias=bias)
        zero(self.project)

    def features(self, z: Tensor) -> Tensor:
        """Activated hidden channels. ``[B, hidden, H, W]``."""
        u = self.norm(self.depthwise(z).permute(0, 2, 3, 1))
        return nn.functional.gelu(self.inner(u)).permute(0, 3, 1, 2)

    @property
    def hidden(self) -> int:
        """Hidden channels."""
        return self.inner.out_features


def _norm(kind: Norm, channels: int, group_size: int) -> nn.Module:
    match kind:
        case "group":
            return nn.GroupNorm(channels // group_size, channels)
        case "layer":
            return nn.GroupNorm(1, channels)
        case "batch":
            return nn.BatchNorm2d(channels)
        case "none":
            return nn.Identity()
