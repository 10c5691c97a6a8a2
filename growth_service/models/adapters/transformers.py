"""Language networks of transformers: GPT-2, GPT-NeoX (Pythia), and Llama with its like (Mistral, Qwen2).

Their layers become sequential or parallel transformer blocks. Not copied, since a block does not have
it: dropout, a sliding window (the same up to that length), frequencies that change with the length of
the input, padding masks, cross-attention, and cached keys.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from growth_service.models.adapters.base import Adapter, Twin, need
from growth_service.models.streams import Site

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def _sites(paths: list[str], *, width: int) -> list[Site]:
    return [Site(path=p, kind="sequence", width=width) for p in paths]


def _activation(name: str, *, layer: nn.Module) -> str:
    need(name in _ACTIVATIONS, layer=layer, what=f"activation {name!r}")
    return _ACTIVATIONS[name]


def _with_biases(weights: dict[str, Tensor], biases: dict[str, Tensor | None], *, bias: bool) -> dict[str, Tensor]:
    """State of linear maps: a block has biases everywhere or nowhere, so missing ones are zero."""
    state = {f"{name}.weight": w.detach() for name, w in weights.items()}
    if bias:
        for name, w in weights.items():
            own = biases.get(name)
            state[f"{name}.bias"] = w.new_zeros(w.shape[0]) if own is None else own.detach()
    return state


def _norms(first: Any, second: Any) -> dict[str, Tensor]:
    pairs = (("attn_norm", first), ("mlp_norm", second))
    return {f"{name}.{k}": v for name, norm in pairs for k, v in norm.state_dict().items()}


def _scaled(
    state: dict[str, Tensor], *, scaling: float, head_dim: int, rotary: Any = None, rotated: int = 0
) -> dict[str, Tensor]:
    """Fold what a block does not have into query and key: another softmax scale, a factor on rotated channels.

    Args:
        state: Of the block.
        scaling: Factor on query-key products; a block has 1 / sqrt(head_dim).
        head_dim: Channels of a head.
        rotary: The network's rotary embedding, with its ``attention_scaling``.
        rotated: Channels of a head that are rotated, from the first on.
    """
    ones = torch.ones(head_dim, dtype=torch.float64)
    factors = {"query": ones * scaling * math.sqrt(head_dim), "key": ones.clone()}
    for per_channel in factors.values():
        per_channel[:rotated] *= getattr(rotary, "attention_scaling", 1.0)
    for name, per_channel in factors.items():
        if torch.allclose(per_channel, ones, rtol=0, atol=1e-12):
            continue  # exact bits where there is nothing to fold
        for key in (k for k in state if k.startswith(f"{name}.")):
            rows = state[key].unflatten(0, (-1, head_dim))
            factor = per_channel.to(rows).reshape(-1, *[1] * (rows.ndim - 2))
            state[key] = (rows * factor).flatten(0, 1)
    return state


def _rotary_share(rotated: int, head_dim: int) -> float:
    """A share of a head's channels that rounds down to this many."""
    share = rotated / head_dim
    return share if int(share * head_dim) == rotated else math.nextafter(share, 1.0)


# --- GPT-2 ----------------------------------------------------------------------------------------------


def _gpt2_sites(net: Any) -> list[Site]:
    return _sites(["drop"] + [f"h.{i}" for i in range(len(net.h))], width=net.embed_dim)


def _gpt2_twin(net: Any, layer: Any, width: int) -> Twin | None:
    if not hasattr(layer, "attn"):
        return None
    attention, first = layer.attn, layer.mlp.c_fc
    config = {
        "type": "transformer",
        "width": width,
        "heads": attention.num_heads,
        "hidden": first.weight.shape[1],
        "norm_eps": layer.ln_1.eps,
        "activation": _activation(net.config.activation_function, layer=layer),
    }
    names = ("query", "key", "value")  # weights of this library's Conv1D are [in, out]
    weights = dict(zip(names, attention.c_attn.weight.T.chunk(3), strict=True)) | {"inner": first.weight.T}
    biases = dict(zip(names, attention.c_attn.bias.chunk(3), strict=True)) | {"inner": first.bias}
    state = _norms(layer.ln_1, layer.ln_2) | _with_biases(weights, biases, bias=True)
    return Twin(config=config, inner=_scaled(state, scaling=attention.scaling, head_dim=attention.head_dim))


# --- GPT-NeoX -------------------------------------------------------------------------------------------


def _neox_sites(net: Any) -> list[Site]:
    return _sites(["embed_in"] + [f"layers.{i}" for i in range(len(net.layers))], width=net.config.hidden_size)


def _neox_twin(net: Any, layer: Any, width: int) -> Twin | None:
    if not hasattr(layer, "attention"):
        return None
    attention, first = layer.attention, layer.mlp.dense_h_to_4h
    heads, head_dim, inv_freq = net.config.num_attention_heads, attention.head_size, net.rotary_emb.inv_freq
    rotated = 2 * inv_freq.numel()
    config = {
        "type": "transformer",
        "width": width,
        "heads": heads,
        "hidden": first.out_features,
        "parallel": layer.use_parallel_residual,
        "norm_eps": layer.input_layernorm.eps,
        "activation": _activation(net.config.hidden_act, layer=layer),
        "rotary": _rotary_share(rotated, head_dim),
        "rotary_base": net.config.rope_parameters["rope_theta"],
    }
    fused = attention.query_key_value  # each head's query, key and value lie together
    by_head = fused.weight.unflatten(0, (heads, 3, head_dim))
    weights = {name: by_head[:, i].flatten(0, 1) for i, name in enumerate(("query", "key", "value"))}
    biases: dict[str, Tensor | None] = {"inner": first.bias}
    if fused.bias is not None:
        bias_by_head = fused.bias.unflatten(0, (heads, 3, head_dim))
        biases |= {name: bias_by_head[:, i].flatten() for i, name in enumerate(("query", "key", "value"))}
    state = _norms(layer.input_layernorm, layer.post_attention_layernorm)
    state |= _with_biases(weights | {"inner": first.weight}, biases, bias=True)
    folded = _scaled(state, scaling=attention.scaling, head_dim=head_dim, rotary=net.rotary_emb, rotated=rotated)
    return Twin(config=config, inner=folded, fixed={"inv_freq": inv_freq})


# --- Llama and its like ---------------------------------------------------------------------------------


def _llama_sites(net: Any) -> list[Site]:
    num = min(len(net.layers), net.config.num_hidden_layers)
    return _sites(["embed_tokens"] + [f"layers.{i}" for i in range(num)], width=net.config.hidden_size)


def _llama_twin(net: Any, layer: Any, width: int) -> Twin | None:
    if not hasattr(layer, "self_attn"):
        return None
    attention, mlp, inv_freq = layer.self_attn, layer.mlp, net.rotary_emb.inv_freq
    head_dim, rotated = attention.head_dim, 2 * inv_freq.numel()
    maps = {
        "query": attention.q_proj,
        "key": attention.k_proj,
        "value": attention.v_proj,
        "inner": mlp.up_proj,
        "gate": mlp.gate_proj,
    }
    written = (attention.o_proj, mlp.down_proj)
    has_bias = any(m.bias is not None for m in (*maps.values(), *written))
    config = {
        "type": "transformer",
        "width": width,
        "heads": attention.q_proj.out_features // head_dim,
        "hidden": mlp.up_proj.out_features,
        "head_dim": head_dim,
        "kv_heads": attention.k_proj.out_features // head_dim,
        "norm": "rms",
        "norm_eps": layer.input_layernorm.variance_epsilon,
        "activation": _activation(net.config.hidden_act, layer=layer),
        "gated": True,
        "rotary": _rotary_share(rotated, head_dim),
        "rotary_base": net.config.rope_parameters["rope_theta"],
        "bias": has_bias,
    }
    weights, biases = {n: m.weight for n, m in maps.items()}, {n: m.bias for n, m in maps.items()}
    state = _norms(layer.input_layernorm, layer.post_attention_layernorm)
    state |= _with_biases(weights, biases, bias=has_bias)
    folded = _scaled(state, scaling=attention.scaling, head_dim=head_dim, rotary=net.rotary_emb, rotated=rotated)
    return Twin(config=config, inner=folded, fixed={"inv_freq": inv_freq})


def _adapter(model: str, class_name: str, sites: Any, twin: Any) -> Adapter:
    return Adapter(
        library=f"transformers.models.{model}.modeling_{model}", class_name=class_name, sites=sites, twin=twin
    )


ADAPTERS = (
    _adapter("gpt2", "GPT2Model", _gpt2_sites, _gpt2_twin),
    _adapter("gpt_neox", "GPTNeoXModel", _neox_sites, _neox_twin),
    _adapter("llama", "LlamaModel", _llama_sites, _llama_twin),
    _adapter("mistral", "MistralModel", _llama_sites, _llama_twin),
    _adapter("qwen2", "Qwen2Model", _llama_sites, _llama_twin),
)
