"""What a block is, and how one is built from its JSON configuration."""

from abc import abstractmethod
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from growth_service.blocks.composed import dense_state
from growth_service.blocks.projections import Projection
from growth_service.errors import UserError

_TYPES: dict[str, type["Block"]] = {}


class Block(nn.Module):
    """A residual branch: ``forward(z) = project(features(z))``, without the skip.

    Subclasses are final, name a ``type_name`` and set ``project`` to an ``nn.Linear``, a stride-1
    ``nn.Conv2d`` or a gate of :mod:`growth_service.blocks.projections`.
    """

    type_name: ClassVar[str]
    project: Projection
    stream_norms: ClassVar[tuple[str, ...]] = ()
    """Children that are norms over the channels of the stream."""
    stream_readers: tuple[str, ...] = ()
    """Children that read the (normed) stream; none: the stream under such a block cannot be widened."""
    unit_writers: tuple[str, ...] = ()
    """Children that write its hidden units; none: single units cannot be removed."""
    unit_norms: ClassVar[tuple[str, ...]] = ()
    """Children that are norms over its hidden units."""
    units_read: str | None = None
    """Child whose input new units of a widened block read; None: they read what the block reads."""
    _config: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "type_name" in cls.__dict__:
            _TYPES[cls.type_name] = cls

    @abstractmethod
    def features(self, z: Tensor) -> Tensor:
        """Features phi of the stream, in the layout that ``project`` takes."""

    @property
    def tap(self) -> str:
        """Child whose input a copy of this block shares where it reads the same stream."""
        return "project"

    def features_given(self, z: Tensor, tapped: Tensor) -> Tensor:
        """Features phi of a copy on the same stream, from what the block's tap has seen already."""
        return tapped

    def config(self) -> dict[str, Any]:
        """JSON from which :func:`block_from_config` builds a block of this shape."""
        return dict(self._config)

    def restate(self, *, width: int = 0, hidden: int = 0, heads: int = 0) -> None:
        """Keep the configuration true after channels, units or heads were added to (or taken from) its layers."""
        for name, more in (("width", width), ("hidden", hidden), ("heads", heads), ("kv_heads", heads)):
            if more and name in self._config:
                self._config[name] += more
        for norm in map(self.get_submodule, self.stream_norms if width else ()):
            if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
                self._config["norm_eps"] = norm.eps

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
            elif name.endswith("weight") or name.endswith(".rows"):  # of a norm; rows: of channels added to it
                nn.init.ones_(parameter)
            else:
                nn.init.zeros_(parameter)

    @property
    def is_zero(self) -> bool:
        """True while the projection is literally zero, so that the branch adds nothing."""
        return not any(bool(p.any()) for p in self.project.parameters())


@runtime_checkable
class Calibrated(Protocol):
    """A block whose inner statistics must be those of the stream it reads."""

    def calibrate(self, z: Tensor) -> None:
        """Set the statistics from a sample of the stream."""


def block_from_config(config: dict[str, Any], *, generator: torch.Generator) -> Block:
    """Build a block from its configuration, drawing inner weights from ``generator`` alone.

    Raises:
        UserError: If the type is unknown, or a field is missing or unknown.
    """
    fields = dict(config)
    type_name = fields.pop("type", None)
    if type_name not in _TYPES:
        raise UserError(f"unknown block type {type_name!r}: use one of {', '.join(sorted(_TYPES))}")
    with torch.random.fork_rng(devices=[]):  # constructors draw from the global stream
        try:
            block = _TYPES[type_name](**fields)
        except TypeError as error:
            raise UserError(f"a block of type {type_name!r} cannot be built from {fields}: {error}") from error
    block.reset(generator)
    return block


def copy_of(block: Block, *, generator: torch.Generator) -> Block:
    """A block of the same shape with the same inner weights and buffers, and a zero projection."""
    twin = block_from_config(block.config(), generator=generator)
    twin.to(next(block.parameters()).dtype)
    own = twin.state_dict()
    inner = {k: v for k, v in dense_state(block).items() if k in own and not k.startswith("project.")}
    twin.load_state_dict(own | inner)
    return twin


def check_positive(**sizes: int) -> None:
    """Refuse sizes below one.

    Raises:
        UserError: Naming the size and its value.
    """
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name} of a block must be at least 1, got {size}")


@torch.no_grad()
def zero(project: nn.Module) -> None:
    """Set all parameters of a projection to zero."""
    for parameter in project.parameters():
        nn.init.zeros_(parameter)
