"""Feed-forward blocks for streams ``[B, D]`` and ``[B, T, D]``."""

from typing import Literal

from torch import Tensor, nn

from growth_service.blocks.base import Block, check_positive, zero
from growth_service.errors import UserError

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
RMS_EPS = 1e-6


class MLPBlock(Block):
    """RMSNorm, linear, GELU, linear."""

    type_name = "mlp"
    stream_norms, stream_readers, unit_writers = ("norm",), ("inner",), ("inner",)

    def __init__(self, width: int, hidden: int, *, bias: bool = True, norm_eps: float = RMS_EPS) -> None:
        super().__init__()
        check_positive(width=width, hidden=hidden)
        self._config = {"type": self.type_name, "width": width, "hidden": hidden, "bias": bias}
        if norm_eps != RMS_EPS:
            self._config["norm_eps"] = norm_eps
        self.norm = nn.RMSNorm(width, eps=norm_eps)
        self.inner = nn.Linear(width, hidden)
        self.project = nn.Linear(hidden, width, bias=bias)
        zero(self.project)

    def features(self, z: Tensor) -> Tensor:
        """``gelu(W1 norm(z) + b1)``. ``[B, ..., hidden]``."""
        return nn.functional.gelu(self.inner(self.norm(z)))

    @property
    def hidden(self) -> int:
        """Hidden units."""
        return self.inner.out_features


class GatedMLPBlock(Block):
    """RMSNorm, ``silu(W_g u) * (W_u u)``, linear: the feed-forward part of Llama-type networks.

    Source: Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202).
    """

    type_name = "gated_mlp"
    stream_norms, stream_readers, unit_writers = ("norm",), ("gate", "inner"), ("gate", "inner")

    def __init__(self, width: int, hidden: int, *, bias: bool = False, norm_eps: float = RMS_EPS) -> None:
        super().__init__()
        check_positive(width=width, hidden=hidden)
        self._config = {"type": self.type_name, "width": width, "hidden": hidden, "bias": bias}
        if norm_eps != RMS_EPS:
            self._config["norm_eps"] = norm_eps
        self.norm = nn.RMSNorm(width, eps=norm_eps)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.inner = nn.Linear(width, hidden, bias=False)
        self.project = nn.Linear(hidden, width, bias=bias)
        zero(self.project)

    def features(self, z: Tensor) -> Tensor:
        """``silu(W_g norm(z)) * (W_u norm(z))``. ``[B, ..., hidden]``."""
        u = self.norm(z)
        units: Tensor = nn.functional.silu(self.gate(u)) * self.inner(u)
        return units

    @property
    def hidden(self) -> int:
        """Hidden units."""
        return self.inner.out_features


class FeedForwardBlock(Block):
    """Norm, linear, activation (gated or not), linear: the units of a transformer block, alone.

    Args:
        width: Channels of the stream.
        hidden: Units.
        norm: ``layer`` or ``rms``.
        norm_eps: Of the norm.
        activation: Of the units.
        gated: Whether they are multiplied by a second linear map.
        bias: Whether the projection has one.
    """

    type_name = "feed_forward"
    stream_norms = ("norm",)

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        norm: Literal["layer", "rms"] = "layer",
        norm_eps: float = 1e-5,
        activation: Activation = "gelu",
        gated: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_positive(width=width, hidden=hidden)
        self._config = {
            "type": self.type_name,
            "width": width,
            "hidden": hidden,
            "norm": norm,
            "norm_eps": norm_eps,
            "activation": activation,
            "gated": gated,
            "bias": bias,
        }
        self._activation = activation
        self.norm = nn.LayerNorm(width, eps=norm_eps) if norm == "layer" else nn.RMSNorm(width, eps=norm_eps)
        self.gate = nn.Linear(width, hidden) if gated else None
        self.inner = nn.Linear(width, hidden)
        self.stream_readers = self.unit_writers = ("gate", "inner") if gated else ("inner",)
        self.project = nn.Linear(hidden, width, bias=bias)
        zero(self.project)

    def features(self, z: Tensor) -> Tensor:
        """Activated units. ``[B, ..., hidden]``."""
        return gated_units(self.norm(z), self.inner, self.gate, self._activation)

    @property
    def hidden(self) -> int:
        """Hidden units."""
        return self.inner.out_features


def gated_units(u: Tensor, inner: nn.Module, gate: nn.Module | None, activation: Activation) -> Tensor:
    """Activated units, multiplied by a second linear map where there is one."""
    units: Tensor = inner(u)
    return _activate(units, activation) if gate is None else _activate(gate(u), activation) * units


def _activate(values: Tensor, kind: Activation) -> Tensor:
    match kind:
        case "gelu":
            return nn.functional.gelu(values)
        case "gelu_tanh":
            return nn.functional.gelu(values, approximate="tanh")
        case "relu":
            return nn.functional.relu(values)
        case "silu":
            return nn.functional.silu(values)
        case _:
            raise UserError(f"unknown activation {kind!r}: use gelu, gelu_tanh, relu or silu")
