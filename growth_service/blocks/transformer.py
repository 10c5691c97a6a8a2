"""Transformer blocks: attention and feed-forward part written through one zero projection.

Both parts end in one matrix ``[W_O | W_2]`` with one bias (the two biases of the usual layout have
identical tangents). At birth the sequential block's feed-forward part reads ``z + 0``, so the
sequential and the parallel form have the same tangent features.
"""

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from growth_service.blocks.base import Block, check_positive, zero
from growth_service.errors import UserError

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
Normalisation = Literal["layer", "rms"]


class TransformerBlock(Block):
    """Pre-norm attention and feed-forward part, sequential (GPT-2, Llama, ViT) or parallel (GPT-NeoX).

    Args:
        width: Channels of the stream.
        heads: Query heads.
        hidden: Units of the feed-forward part.
        causal: Whether a token sees only itself and those before it.
        parallel: Whether the feed-forward part reads z, or z + attention.
        head_dim: Channels of a head; None: width / heads.
        kv_heads: Key and value heads (grouped-query attention); None: as many as query heads.
        norm: ``layer`` (LayerNorm) or ``rms`` (RMSNorm).
        norm_eps: Of both norms.
        activation: Of the feed-forward part.
        gated: Whether its hidden units are multiplied by a second linear map (SwiGLU with ``silu``).
        rotary: Share of each head's channels that are rotated by position, in [0, 1]; 0: none.
        rotary_base: Base of the rotation frequencies.
        bias: Whether inner linear maps and the projection have biases.

    Sources: Vaswani et al. 2017 (arXiv:1706.03762); rotary positions, Su et al. 2021
    (arXiv:2104.09864), in the half-rotation layout of GPT-NeoX; parallel form, Wang and Komatsuzaki 2021.
    """

    type_name = "transformer"
    project: nn.Linear
    inv_freq: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        causal: bool = True,
        parallel: bool = False,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        norm: Normalisation = "layer",
        norm_eps: float = 1e-5,
        activation: Activation = "gelu",
        gated: bool = False,
        rotary: float = 0.0,
        rotary_base: float = 10000.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_positive(width=width, heads=heads, hidden=hidden)
        if head_dim is None and width % heads:
            raise UserError(f"width {width} of a transformer block must be a multiple of its {heads} heads")
        head_dim, kv_heads = head_dim or width // heads, kv_heads or heads
        if heads % kv_heads:
            raise UserError(f"{heads} heads of a transformer block must be a multiple of its {kv_heads} key heads")
        if not 0.0 <= rotary <= 1.0:
            raise UserError(f"rotary of a transformer block is a share in [0, 1], got {rotary}")
        self._config = {
            "type": self.type_name,
            "width": width,
            "heads": heads,
            "hidden": hidden,
            "causal": causal,
            "parallel": parallel,
            "head_dim": head_dim,
            "kv_heads": kv_heads,
            "norm": norm,
            "norm_eps": norm_eps,
            "activation": activation,
            "gated": gated,
            "rotary": rotary,
            "rotary_base": rotary_base,
            "bias": bias,
        }
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self._causal, self._parallel, self._activation = causal, parallel, activation
        make = nn.LayerNorm if norm == "layer" else nn.RMSNorm
        self.attn_norm, self.mlp_norm = make(width, eps=norm_eps), make(width, eps=norm_eps)
        self.query = nn.Linear(width, heads * head_dim, bias=bias)
        self.key = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.inner = nn.Linear(width, hidden, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if gated else None
        rotated = int(rotary * head_dim) // 2 * 2
        self.register_buffer("inv_freq", rotary_base ** (-torch.arange(0, rotated, 2).float() / max(rotated, 1)))
        self.joined = nn.Identity()  # where the outputs of all heads can be listened to
        self.project = nn.Linear(heads * head_dim + hidden, width, bias=bias)
        zero(self.project)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast everything, but frequencies: at half precision, distant positions turn by a wrong angle."""
        kept = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch
        if not kept.is_meta:
            self.inv_freq = kept.to(self.inv_freq.device)
        return self

    def features(self, z: Tensor) -> Tensor:
        """Head outputs and feed-forward units, both read from z. ``[B, T, heads * head_dim + hidden]``."""
        return torch.cat([self._attend(self.attn_norm(z)), self._units(self.mlp_norm(z))], dim=-1)

    @property
    def tap(self) -> str:
        """The parallel block's features; of the sequential one, whose units read z + attention, those of the heads."""
        return "project" if self._parallel else "joined"

    def features_given(self, z: Tensor, tapped: Tensor) -> Tensor:
        """Features of a copy: the units of a sequential block are computed anew, on z itself."""
        return tapped if self._parallel else torch.cat([tapped, self._units(self.mlp_norm(z))], dim=-1)

    def forward(self, z: Tensor) -> Tensor:
        """The branch: zero at birth. Same shape as ``z``."""
        if self._parallel:
            return super().forward(z)
        split = self._heads * self._head_dim
        weight = self.project.weight
        attention = nn.functional.linear(self._attend(self.attn_norm(z)), weight[:, :split])
        units = self._units(self.mlp_norm(z + attention))
        return attention + nn.functional.linear(units, weight[:, split:], self.project.bias)

    def config(self) -> dict[str, Any]:
        """All arguments of the constructor, resolved."""
        return dict(self._config)

    @property
    def hidden(self) -> int:
        """Units of the feed-forward part."""
        return self.inner.out_features

    def _attend(self, u: Tensor) -> Tensor:
        """Concatenated head outputs. ``[B, T, heads * head_dim]``."""
        batch, length, _ = u.shape
        q = self.query(u).view(batch, length, self._heads, self._head_dim).transpose(1, 2)
        k = self.key(u).view(batch, length, self._kv_heads, self._head_dim).transpose(1, 2)
        v = self.value(u).view(batch, length, self._kv_heads, self._head_dim).transpose(1, 2)
        if self.inv_freq.numel():
            q, k = self._rotate(q), self._rotate(k)
        if self._kv_heads != self._heads:
            repeats = self._heads // self._kv_heads
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self._causal)
        joined: Tensor = self.joined(out.transpose(1, 2).reshape(batch, length, -1))
        return joined

    def _rotate(self, heads: Tensor) -> Tensor:
        """Rotate the first channels of each head by an angle proportional to the position."""
        half = self.inv_freq.numel()
        precise = torch.promote_types(heads.dtype, torch.float32)
        positions = torch.arange(heads.shape[2], device=heads.device, dtype=precise)
        angle = torch.outer(positions, self.inv_freq.to(precise))
        cos, sin = angle.cos().to(heads), angle.sin().to(heads)
        a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def _units(self, u: Tensor) -> Tensor:
        """Activated units of the feed-forward part. ``[B, T, hidden]``."""
        return (
            _activate(self.inner(u), self._activation)
            if self.gate is None
            else (_activate(self.gate(u), self._activation) * self.inner(u))
        )


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
