"""A learned scale at the end of a branch, in place of a zero projection."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from growth_service.blocks.base import Block, block_from_config, zero
from growth_service.blocks.projections import AffineGate, ChannelGate, ScalarGate
from growth_service.errors import UserError

Gate = Literal["scalar", "channel", "affine"]


class GatedBranch(Block):
    """``gate * F(z)``, where F is a whole block with a drawn projection and the gate is zero at birth.

    The protocol decides the verdict: a gate spans far fewer directions than a projection does, so
    almost every place looks saturated through a scalar gate. Prefer zero projections.

    Args:
        gate: ``scalar``, ``channel`` (a scale a channel) or ``affine`` (scale and shift).
        inner: Configuration of the block F.
    """

    type_name = "gate"

    def __init__(self, gate: Gate, inner: dict[str, Any]) -> None:
        super().__init__()
        self._gate = gate
        self.inner = block_from_config(inner, generator=torch.Generator().manual_seed(0))
        width = int(self.inner.config()["width"])
        match gate:
            case "scalar":
                self.project = ScalarGate()
            case "channel":
                self.project = ChannelGate(width)
            case "affine":
                self.project = AffineGate(width)
            case _:
                raise UserError(f"unknown gate {gate!r}: use scalar, channel or affine")
        zero(self.project)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw all weights of F from ``generator``; zero the gate."""
        self.inner.reset(generator)
        for parameter in self.inner.project.parameters():
            if parameter.ndim > 1:
                nn.init.kaiming_normal_(parameter, nonlinearity="linear", generator=generator)
        zero(self.project)

    def features(self, z: Tensor) -> Tensor:
        """F(z), in the shape of the stream."""
        out: Tensor = self.inner(z)
        return out

    def config(self) -> dict[str, Any]:
        """Type, gate and the configuration of F."""
        return {"type": self.type_name, "gate": self._gate, "inner": self.inner.config()}

    @property
    def hidden(self) -> int:
        """Hidden units of F."""
        return self.inner.hidden
