"""Feed-forward blocks for streams ``[B, D]`` and ``[B, T, D]``."""

from typing import Any

from torch import Tensor, nn

from growth_service.blocks.base import Block, check_positive, zero


class MLPBlock(Block):
    """RMSNorm, linear, GELU, linear."""

    type_name = "mlp"

    def __init__(self, width: int, hidden: int, *, bias: bool = True) -> None:
        super().__init__()
        check_positive(width=width, hidden=hidden)
        self._config = {"type": self.type_name, "width": width, "hidden": hidden, "bias": bias}
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.inner = nn.Linear(width, hidden)
        self.project = nn.Linear(hidden, width, bias=bias)
        zero(self.project)

    def features(self, z: Tensor) -> Tensor:
        """``gelu(W1 norm(z) + b1)``. ``[B, ..., hidden]``."""
        return nn.functional.gelu(self.inner(self.norm(z)))

    def config(self) -> dict[str, Any]:
        """Type, width, hidden, bias."""
        return dict(self._config)

    @property
    def hidden(self) -> int:
        """Hidden units."""
        return self.inner.out_features


class GatedMLPBlock(Block):
    """RMSNorm, ``silu(W_g u) * (W_u u)``, linear: the feed-forward part of Llama-type networks.

    Source: Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202).
    """

    type_name = "gated_mlp"

    def __init__(self, width: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        check_positive(width=width, hidden=hidden)
        self._config = {"type": self.type_name, "width": width, "hidden": hidden, "bias": bias}
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.inner = nn.Linear(width, hidden, bias=False)
        self.project = nn.Linear(hidden, width, bias=bias)
        zero(self.project)

    def features(self, z: Tensor) -> Tensor:
        """``silu(W_g norm(z)) * (W_u norm(z))``. ``[B, ..., hidden]``."""
        u = self.norm(z)
        units: Tensor = nn.functional.silu(self.gate(u)) * self.inner(u)
        return units

    def config(self) -> dict[str, Any]:
        """Type, width, hidden, bias."""
        return dict(self._config)

    @property
    def hidden(self) -> int:
        """Hidden units."""
        return self.inner.out_features
