"""Residual convolutional networks, for images."""

from typing import Any

from torch import Tensor, nn

from growth_service.blocks import ConvBlock
from growth_service.models.families.base import Family, Group, same_length


class ResNet(Family):
    """Pre-activation residual convolutions with GroupNorm; each later group halves resolution.

    Source: He et al. 2016, "Identity Mappings in Deep Residual Networks" (arXiv:1603.05027),
    with GroupNorm (Wu and He 2018, arXiv:1803.08494) in place of BatchNorm.
    """

    family = "resnet"

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        widths, blocks, hiddens = same_length(spec)
        group_size, channels = spec.get("group_size", 4), spec["input_shape"][0]
        groups = []
        for index, (width, num, hidden) in enumerate(zip(widths, blocks, hiddens, strict=True)):
            stride = spec.get("stem_stride", 1) if index == 0 else 2
            entry = nn.Conv2d(channels, width, 3, stride=stride, padding=1)
            groups.append(Group(entry, [ConvBlock(width, hidden, group_size=group_size) for _ in range(num)]))
            channels = width
        self.groups = nn.ModuleList(groups)
        self.norm = nn.GroupNorm(channels // group_size, channels)
        self.head = nn.Linear(channels, spec["num_classes"])

    def forward(self, images: Tensor) -> Tensor:
        """Logits. ``[B, C, H, W] -> [B, classes]``."""
        z = nn.functional.relu(self.norm(self.run_groups(images)))
        logits: Tensor = self.head(z.mean(dim=(2, 3)))
        return logits
