"""Pre-norm causal transformers, for tokens or characters."""

from typing import Any

import torch
from torch import Tensor, nn

from growth_service.blocks import block_from_config
from growth_service.errors import UserError
from growth_service.models.families.base import Family, Group, same_length

_EMBEDDING_SD = 0.02
"""Standard deviation of embeddings at birth (Radford et al. 2019, GPT-2)."""


class TokenEmbedding(nn.Module):
    """Tokens to vectors, with a learned vector for each position added where there is a context.

    Args:
        vocab: Number of different tokens.
        width: Channels of the stream.
        context: Most tokens of a sequence; None: positions are left to the blocks, at any length.
    """

    def __init__(self, vocab: int, width: int, *, context: int | None) -> None:
        super().__init__()
        self.embedding_dim = width
        self.tokens = nn.Embedding(vocab, width)
        self.positions = None if context is None else nn.Embedding(context, width)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw all vectors."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=_EMBEDDING_SD, generator=generator)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """The stream. ``[B, T] -> [B, T, width]``.

        Raises:
            UserError: If the sequence is longer than the context.
        """
        z: Tensor = self.tokens(tokens_BT)
        if self.positions is None:
            return z
        length, context = tokens_BT.shape[1], self.positions.num_embeddings
        if length > context:
            raise UserError(
                f"a sequence of {length} tokens is longer than the context of this network ({context}): cut it, or "
                "build the network with positions 'rotary'"
            )
        return z + self.positions.weight[:length]


class GPT(Family):
    """Token embedding, pre-norm transformer blocks, a norm, and a head of its own weights.

    Sources: Radford et al. 2019 (GPT-2), without tying the head to the embedding; rotary positions, Su
    et al. 2021 (arXiv:2104.09864).
    """

    family = "gpt"

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        (width,), (num,), (hidden,) = same_length(spec, expected=1)
        positions, norm, heads = spec.get("positions", "learned"), spec.get("norm", "layer"), spec["heads"]
        if positions not in ("learned", "rotary") or norm not in ("layer", "rms"):
            raise UserError(
                f"family 'gpt' has positions 'learned' or 'rotary' and norm 'layer' or 'rms', got {positions!r} and "
                f"{norm!r}"
            )
        if positions == "rotary" and width % (2 * heads):
            raise UserError(
                f"rotary positions turn pairs of channels: width {width} of family 'gpt' must be a multiple of twice "
                f"its {heads} heads"
            )
        entry = TokenEmbedding(spec["vocab"], width, context=spec["context"] if positions == "learned" else None)
        self.branch = {
            "type": "transformer",
            "width": width,
            "heads": heads,
            "hidden": hidden,
            "parallel": spec.get("parallel", False),
            "norm": norm,
            "rotary": 1.0 if positions == "rotary" else 0.0,
        }
        """Configuration of its blocks, which a network without any still has."""
        seed = torch.Generator().manual_seed(0)
        self.groups = nn.ModuleList(
            [Group(entry, [block_from_config(self.branch, generator=seed) for _ in range(num)])]
        )
        self.norm = nn.LayerNorm(width) if norm == "layer" else nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, spec["vocab"], bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of the next token at each position. ``[B, T] -> [B, T, vocab]``."""
        logits: Tensor = self.head(self.norm(self.run_groups(tokens_BT)))
        return logits
