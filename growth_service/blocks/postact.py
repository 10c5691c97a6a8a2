"""Post-activation convolution blocks: the layers of the original residual networks, read as branches."""

import torch
from torch import Tensor, nn

from growth_service.blocks.base import Block, check_positive, zero
from growth_service.errors import UserError


class PostActBlock(Block):
    """3x3, BatchNorm, ReLU, then 3x3; or, as a bottleneck, 1x1 and 3x3 each so, then 1x1.

    It reads the stream as it is: where the stream is the output of a ReLU, as in networks of such layers,
    a norm in front would be another architecture. The BatchNorm of the usual layout after the last
    convolution is left out: a zero convolution before one has a gradient larger by 1 / sqrt(eps).

    Args:
        width: Channels of the stream.
        hidden: Inner channels.
        bottleneck: Whether a 1x1 convolution leads to the inner channels and one leads back.
        groups: Of the 3x3 convolution of a bottleneck (ResNeXt).
        dilation: Of the first 3x3 convolution.
        norm_eps: Of BatchNorm.
        bias: Whether the projection has one.

    Sources: He et al. 2015, "Deep Residual Learning" (arXiv:1512.03385); Xie et al. 2017 (arXiv:1611.05431).
    """

    type_name = "postact"

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        bottleneck: bool = False,
        groups: int = 1,
        dilation: int = 1,
        norm_eps: float = 1e-5,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_positive(width=width, hidden=hidden, groups=groups, dilation=dilation)
        if hidden % groups or (groups > 1 and not bottleneck):
            raise UserError(
                f"groups of a post-activation block divide the inner channels of a bottleneck: got {groups} groups, "
                f"{hidden} channels, bottleneck {bottleneck}"
            )
        self._config = {
            "type": self.type_name,
            "width": width,
            "hidden": hidden,
            "bottleneck": bottleneck,
            "groups": groups,
            "dilation": dilation,
            "norm_eps": norm_eps,
            "bias": bias,
        }
        self.norm = nn.Identity()  # what new units would read the stream through
        self.reduce = nn.Conv2d(width, hidden, 1, bias=False) if bottleneck else None
        self.reduce_norm = nn.BatchNorm2d(hidden, eps=norm_eps) if bottleneck else None
        self.inner = nn.Conv2d(
            hidden if bottleneck else width,
            hidden,
            3,
            padding=dilation,
            dilation=dilation,
            groups=groups,
            bias=False,
        )
        self.inner_norm = nn.BatchNorm2d(hidden, eps=norm_eps)
        self.project = nn.Conv2d(hidden, width, 1 if bottleneck else 3, padding=0 if bottleneck else 1, bias=bias)
        zero(self.project)

    def features(self, z: Tensor) -> Tensor:
        """Activated inner channels. ``[B, hidden, H, W]``."""
        if self.reduce is not None and self.reduce_norm is not None:
            z = nn.functional.relu(self.reduce_norm(self.reduce(z)))
        return nn.functional.relu(self.inner_norm(self.inner(z)))

    @property
    def hidden(self) -> int:
        """Inner channels."""
        return self.inner.out_channels

    @torch.no_grad()
    def calibrate(self, z: Tensor) -> None:
        """Set BatchNorm statistics to those of a sample of the stream: a fresh layer has (0, 1)."""
        for norm in (self.reduce_norm, self.inner_norm):
            if norm is None:
                continue
            norm.reset_running_stats()
            norm.momentum, kept = None, norm.momentum
            norm.train()
            self.features(z)
            norm.eval()
            norm.momentum = kept
