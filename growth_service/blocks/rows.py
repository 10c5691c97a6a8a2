"""What an existing block would write to channels that its stream does not have yet."""

from typing import Any

import torch
from torch import Tensor, nn

from growth_service.blocks.base import Block, zero


class NewRows(Block):
    """New rows of an existing block's last layer, zero: candidates for a wider stream.

    It is only ever scored, on what the existing layer reads (see ``probing.Candidate.shared``); the rows themselves are
    made by ``widen_stream``.

    Args:
        project: The existing last layer.
        channels: New channels of the stream.
    """

    project: nn.Linear | nn.Conv2d

    def __init__(self, project: nn.Linear | nn.Conv2d, *, channels: int) -> None:
        super().__init__()
        bias = project.bias is not None
        with torch.random.fork_rng(devices=[]):  # constructors draw from the global stream
            if isinstance(project, nn.Conv2d):
                shape: dict[str, Any] = {"padding": project.padding, "dilation": project.dilation, "bias": bias}
                self.project = nn.Conv2d(project.in_channels, channels, project.kernel_size, **shape)  # type: ignore[arg-type]
            else:
                self.project = nn.Linear(project.in_features, channels, bias=bias)
        zero(self.project)
        self.to(next(project.parameters()))
        self._config = {"type": "new_rows", "channels": channels}

    def features(self, z: Tensor) -> Tensor:
        """Not defined: they are those of the existing block, taken from its own forward pass."""
        raise NotImplementedError("features of new rows are those of the block that they belong to")

    @property
    def hidden(self) -> int:
        """No new units."""
        return 0
