"""Residual families of our own: groups of blocks of equal resolution on one stream.

Every family is ``groups.<i>.entry`` (a stem or a transition), then ``groups.<i>.blocks.<j>``,
each a residual update, then a head. Norms are RMSNorm or GroupNorm: BatchNorm would couple
the samples of a shard and the ranks of a trial.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from growth_service.blocks import Block, ConvBlock, MLPBlock
from growth_service.errors import UserError


class Residual(nn.Module):
    """``z + branch(z)``: its output is the stream."""

    def __init__(self, branch: Block) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, z: Tensor) -> Tensor:
        """The stream after this block; same shape."""
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
    """A classifier built from a JSON specification; final subclasses supply the parts."""

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


class ResidualMLP(Family):
    """Flattened input, one linear stem, RMSNorm MLP blocks, RMSNorm head."""

    family = "mlp"

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        (width,), (num,), (hidden,) = _same_length(spec, expected=1)
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


class ResNet(Family):
    """Pre-activation residual convolutions with GroupNorm; each later group halves resolution.

    Source: He et al. 2016, "Identity Mappings in Deep Residual Networks" (arXiv:1603.05027),
    with GroupNorm (Wu and He 2018, arXiv:1803.08494) in place of BatchNorm.
    """

    family = "resnet"

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        widths, blocks, hiddens = _same_length(spec)
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


FAMILIES: dict[str, type[Family]] = {cls.family: cls for cls in (ResidualMLP, ResNet)}


def build(spec: dict[str, Any], *, seed: int) -> Family:
    """Build a network of a family with weights from ``seed`` alone.

    Existing blocks start with small random projections (a trained-from-scratch block is not a
    grown one): their last layer is scaled by 1 / sqrt(number of blocks), so that the stream
    keeps its size with depth. Source: the depth-scaled initialisation of GPT-2 (Radford et al. 2019).

    Args:
        spec: ``family``, ``input_shape``, ``num_classes``, ``widths``, ``blocks``, ``hidden``
            and what the family adds (``stem_stride``, ``group_size``).
        seed: Of the initial weights.

    Raises:
        UserError: If the family is unknown or the sizes do not fit together.
    """
    family = spec.get("family")
    if family not in FAMILIES:
        raise UserError(f"unknown model family {family!r}: use one of {', '.join(sorted(FAMILIES))}")
    with torch.random.fork_rng(devices=[]):  # constructors draw from the global stream
        model = FAMILIES[family](spec)
    generator = torch.Generator().manual_seed(seed)
    depth = max(1, sum(spec["blocks"]))
    for module in model.modules():
        if isinstance(module, Block):
            module.reset(generator)
            with torch.no_grad():
                nn.init.kaiming_normal_(module.project.weight, nonlinearity="relu", generator=generator)
                module.project.weight.mul_(0.5 / depth**0.5)
        elif isinstance(module, Group):
            _reset_layer(module.entry, generator)
    _reset_layer(model.head, generator)
    return model


@torch.no_grad()
def _reset_layer(layer: Any, generator: torch.Generator) -> None:
    nn.init.kaiming_normal_(layer.weight, nonlinearity="linear", generator=generator)
    nn.init.zeros_(layer.bias)


def _same_length(spec: dict[str, Any], *, expected: int | None = None) -> tuple[list[int], list[int], list[int]]:
    """Widths, blocks and hidden units of each group, checked to have one entry a group."""
    sizes = [list(spec[name]) for name in ("widths", "blocks", "hidden")]
    num = expected or len(sizes[0])
    if any(len(s) != num for s in sizes) or num < 1:
        raise UserError(
            f"family {spec['family']!r} has {num} group(s): widths {sizes[0]}, blocks {sizes[1]} and hidden "
            f"{sizes[2]} must have {num} entries each"
        )
    return sizes[0], sizes[1], sizes[2]
