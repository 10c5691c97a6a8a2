"""Transformer blocks: attention and feed-forward part written through one zero projection.

Both parts end in one matrix ``[W_O | W_2]`` with one bias (the two biases of the usual layout have
identical tangents). At birth the sequential block's feed-forward part reads ``z + 0``, so the
sequential and the parallel form have the same tangent features.
"""

from collections.abc import Callable
from typing import Literal, Self

import torch
from torch import Tensor, nn

from growth_service.blocks.base import Block, check_positive, zero
from growth_service.blocks.mlp import Activation, gated_units
from growth_service.errors import UserError

Normalisation = Literal["layer", "rms"]


class _Attending(Block):
    """Attention of some heads, as part of a block."""

    inv_freq: Tensor

    def _make_heads(
        self,
        width: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        causal: bool,
        rotary: float,
        rotary_base: float,
        bias: bool,
    ) -> None:
        if not 0.0 <= rotary <= 1.0:
            raise UserError(f"rotary of a transformer block is a share in [0, 1], got {rotary}")
        self._head_dim, self._causal = head_dim, causal
        self.query = nn.Linear(width, heads * head_dim, bias=bias)
        self.key = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(width, kv_heads * head_dim, bias=bias)
        rotated = int(rotary * head_dim) // 2 * 2
        self.register_buffer("inv_freq", rotary_base ** (-torch.arange(0, rotated, 2).float() / max(rotated, 1)))
        self.joined = nn.Identity()  # where the outputs of all heads can be listened to

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast everything, but frequencies: at half precision, distant positions turn by a wrong angle."""
        kept = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch
        if not kept.is_meta:
            self.inv_freq = kept.to(self.inv_freq.device)
        return self

    def _attend(self, u: Tensor) -> Tensor:
        """Concatenated head outputs. ``[B, T, heads * head_dim]``."""
        batch, length, _ = u.shape
        heads, kv_heads = self._config["heads"], self._config.get("kv_heads", self._config["heads"])
        q = self.query(u).view(batch, length, heads, self._head_dim).transpose(1, 2)
        k = self.key(u).view(batch, length, kv_heads, self._head_dim).transpose(1, 2)
        v = self.value(u).view(batch, length, kv_heads, self._head_dim).transpose(1, 2)
        if self.inv_freq.numel():
            q, k = self._rotate(q), self._rotate(k)
        if kv_heads != heads:
            repeats = heads // kv_heads
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


class TransformerBlock(_Attending):
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
    stream_norms = ("attn_norm", "mlp_norm")
    unit_writers: tuple[str, ...] = ("inner",)
    project: nn.Linear

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
        self._parallel, self._activation = parallel, activation
        self.attn_norm, self.mlp_norm = (_norm(norm, width, eps=norm_eps) for _ in range(2))
        self._make_heads(
            width,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            causal=causal,
            rotary=rotary,
            rotary_base=rotary_base,
            bias=bias,
        )
        self.inner = nn.Linear(width, hidden, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if gated else None
        if gated:
            self.unit_writers = ("gate", "inner")
        self.stream_readers = ("query", "key", "value", *self.unit_writers)
        self.units_read = None if parallel else "mlp_norm"
        self.project = nn.Linear(heads * head_dim + hidden, width, bias=bias)
        zero(self.project)

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
        """The branch: zero at birth. Same shape as ``z``.

        A sequential block applies what it was widened by itself: all units read the stream and the outputs of all
        heads, as those of a block that was built as wide do.
        """
        if self._parallel:
            return super().forward(z)
        split = self.query.out_features
        weight = self.project.weight
        heads = self._attend(self.attn_norm(z))
        attention = nn.functional.linear(heads, weight[:, :split])
        wider = list(getattr(self, "widened", {}).values())
        new_heads = [branch(z) for branch in wider if isinstance(branch, HeadsBlock)]
        for delta in new_heads:
            attention = attention + delta
        attended = z + attention
        units = self._units(self.mlp_norm(attended))
        if self.project._forward_pre_hooks or self.project._forward_hooks:  # who listens must hear all that it writes
            out: Tensor = self.project(torch.cat([heads, units], dim=-1))
            for delta in new_heads:
                out = out + delta
        else:
            out = attention + nn.functional.linear(units, weight[:, split:], self.project.bias)
        for branch in wider:
            if not isinstance(branch, HeadsBlock):
                out = out + branch(attended)
        return out

    @property
    def hidden(self) -> int:
        """Units of the feed-forward part."""
        return self.inner.out_features

    def _units(self, u: Tensor) -> Tensor:
        """Activated units of the feed-forward part. ``[B, T, hidden]``."""
        return gated_units(u, self.inner, self.gate, self._activation)


class HeadsBlock(_Attending):
    """Pre-norm attention heads alone: what a transformer block gets when it is widened by heads.

    Args:
        width: Channels of the stream.
        heads: Heads, each with a query, a key and a value.
        head_dim: Channels of a head.
        causal: Whether a token sees only itself and those before it.
        norm: ``layer`` or ``rms``.
        norm_eps: Of the norm.
        rotary: Share of each head's channels that are rotated by position.
        rotary_base: Base of the rotation frequencies.
        bias: Whether the projection has one.
    """

    type_name = "heads"
    stream_norms = ("norm",)
    stream_readers = ("query", "key", "value")

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        *,
        causal: bool = True,
        norm: Normalisation = "layer",
        norm_eps: float = 1e-5,
        rotary: float = 0.0,
        rotary_base: float = 10000.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_positive(width=width, heads=heads, head_dim=head_dim)
        self._config = {
            "type": self.type_name,
            "width": width,
            "heads": heads,
            "head_dim": head_dim,
            "causal": causal,
            "norm": norm,
            "norm_eps": norm_eps,
            "rotary": rotary,
            "rotary_base": rotary_base,
            "bias": bias,
        }
        self.norm = _norm(norm, width, eps=norm_eps)
        self._make_heads(
            width,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            causal=causal,
            rotary=rotary,
            rotary_base=rotary_base,
            bias=True,
        )
        self.project = nn.Linear(heads * head_dim, width, bias=bias)
        zero(self.project)

    def features(self, z: Tensor) -> Tensor:
        """Head outputs. ``[B, T, heads * head_dim]``."""
        return self._attend(self.norm(z))

    @property
    def hidden(self) -> int:
        """Channels of all heads."""
        return self.query.out_features


def _norm(kind: Normalisation, width: int, *, eps: float) -> nn.LayerNorm | nn.RMSNorm:
    return nn.LayerNorm(width, eps=eps) if kind == "layer" else nn.RMSNorm(width, eps=eps)
