"""What the families share: residual updates, groups of them, a specification."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from growth_service.blocks import Block
from growth_service.errors import UserError


class Residual(nn.Module):
    """``z + branch(z)``: its output is the stream."""

    def __init__(self, branch: Block) -> None:
        super().__init__()
        self.branch: Block | None = branch
        """None once it was removed: the stream passes."""

    def forward(self, z: Tensor) -> Tensor:
        """The stream after this block; same shape."""
        if self.branch is None:
            return z
        delta: Tensor = self.branch(z)
        return z + delta


class Group(nn.Module):
    """An entry that sets resolution and width, then residual blocks."""

    def __init__(self, entry: nn.Module, branches: list[Block]) -> None:
        super().__init__()
        self.entry = entry
        self.blocks = nn.ModuleList(Residual(b) for b in branches)

    def forward(self, z: Tensor) -> Tensor:
        """The stream at the end of the group."""
        z = self.entry(z)
        for block in self.blocks:
            z = block(z)
        return z


class Family(nn.Module):
    """A network built from a JSON specification; final subclasses supply the parts."""

    family: ClassVar[str]
    groups: nn.ModuleList

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.spec = dict(spec)

    def run_groups(self, z: Tensor) -> Tensor:
        """The stream after the last group."""
        for group in self.groups:
            z = group(z)
        return z


def same_length(spec: dict[str, Any], *, expected: int | None = None) -> tuple[list[int], list[int], list[int]]:
    """Widths, blocks and hidden units of each group, checked to have one entry a group.

    Raises:
        UserError: If they do not.
    """
    sizes = [list(spec[name]) for name in ("widths", "blocks", "hidden")]
    num = expected or len(sizes[0])
    if any(len(s) != num for s in sizes) or num < 1:
        raise UserError(
            f"family {spec['family']!r} has {num} group(s): widths {sizes[0]}, blocks {sizes[1]} and hidden "
            f"{sizes[2]} must have {num} entries each"
        )
    return sizes[0], sizes[1], sizes[2]


@torch.no_grad()
def reset_layer(layer: Any, generator: torch.Generator) -> None:
    """Draw the weights of an entry or a head; zero its bias."""
    nn.init.kaiming_normal_(layer.weight, nonlinearity="linear", generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
