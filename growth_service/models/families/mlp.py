"""Residual networks of feed-forward blocks, for inputs without structure."""

from typing import Any

import torch
from torch import Tensor, nn

from growth_service.blocks import MLPBlock
from growth_service.models.families.base import Family, Group, same_length


class ResidualMLP(Family):
    """Flattened input, one linear stem, RMSNorm MLP blocks, RMSNorm head."""

    family = "mlp"

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        (width,), (num,), (hidden,) = same_length(spec, expected=1)
        num_inputs = int(torch.Size(spec["input_shape"]).numel())
        self.groups = nn.ModuleList(
            [Group(nn.Linear(num_inputs, width), [MLPBlock(width, hidden) for _ in range(num)])]
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, spec["num_classes"])

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits. ``[B, ...] -> [B, classes]``."""
        logits: Tensor = self.head(self.norm(self.run_groups(inputs.flatten(1))))
        return logits
