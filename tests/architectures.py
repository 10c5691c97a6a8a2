"""Tiny networks of other libraries with random weights, built from their configuration classes: nothing is fetched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_helpers import generator, normal

TOKENS = 13


def _drawn(model: nn.Module, *, seed: int = 1) -> nn.Module:
    """Weights and statistics far from their special values at birth (zeros, ones), in evaluation mode."""
    with torch.no_grad():
        for index, (name, tensor) in enumerate(model.state_dict().items()):
            if not tensor.is_floating_point() or name.endswith("inv_freq"):
                continue
            noise = normal(*tensor.shape, seed=seed + index)
            if name.endswith("running_var"):
                tensor.copy_(0.5 + noise.abs())
            elif "norm" in name or ".bn" in name or ".ln_" in name or name.endswith("bias"):
                tensor.add_(0.3 * noise)
            else:
                tensor.copy_(noise / max(1, tensor[0].numel()) ** 0.5)
    return model.eval()


def _resnet(block: str, layers: tuple[int, ...], **sizes: Any) -> nn.Module:
    """Only as many stages as ``layers`` has: the widths of this library are fixed, and later ones are wide."""
    from torchvision.models import resnet

    kind = getattr(resnet, block)
    net = resnet.ResNet(kind, [*layers, 1, 1, 1][:4], **sizes)
    for stage in range(len(layers) + 1, 5):
        setattr(net, f"layer{stage}", nn.Identity())
    net.fc = nn.Linear(32 * 2 ** len(layers) * kind.expansion, 3)
    return _drawn(net)


def _vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return _drawn(
        VisionTransformer(
            image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=12, num_classes=3
        )
    )


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return _drawn(ConvNeXt([CNBlockConfig(6, 8, 2), CNBlockConfig(8, None, 1)], layer_scale=0.5, num_classes=3))


def _language(kind: str, **changes: Any) -> nn.Module:
    transformers = pytest.importorskip(
        "transformers", reason="networks of transformers are tested where growth-service[transformers] is installed"
    )
    sizes = {"vocab_size": TOKENS, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16}
    match kind:
        case "gpt2":
            config = transformers.GPT2Config(
                vocab_size=TOKENS,
                n_layer=2,
                n_embd=16,
                n_head=4,
                n_positions=16,
                bos_token_id=0,
                eos_token_id=0,
                **changes,
            )
            model = transformers.GPT2LMHeadModel(config)
        case "neox":
            rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
            model = transformers.GPTNeoXForCausalLM(
                transformers.GPTNeoXConfig(
                    **{"hidden_size": 32, "intermediate_size": 20, "rope_parameters": rope} | sizes | changes
                )
            )
        case _:
            name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}[kind]
            sizes |= {"hidden_size": 16, "intermediate_size": 12, "num_key_value_heads": 2}
            config = getattr(transformers, f"{name}Config")(**sizes | changes)
            model = getattr(transformers, f"{name}ForCausalLM")(config)
    return _drawn(model)


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": lambda: _resnet("BasicBlock", (2, 1)),
    "resnet50": lambda: _resnet("Bottleneck", (2, 1)),
    "resnext": lambda: _resnet("Bottleneck", (2,), groups=4, width_per_group=4),
    "vit": _vit,
    "convnext": _convnext,
    "gpt2": lambda **changes: _language("gpt2", **changes),
    "neox": lambda **changes: _language("neox", **changes),
    "llama": lambda **changes: _language("llama", **changes),
    "mistral": lambda **changes: _language("mistral", **changes),
    "qwen2": lambda **changes: _language("qwen2", **changes),
}
IMAGE_NETWORKS = ("resnet18", "resnet50", "resnext", "vit", "convnext")
LANGUAGE_NETWORKS = ("gpt2", "neox", "llama", "mistral", "qwen2")


def data(name: str, *, num: int = 6, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs and targets that fit a network: images and classes, or tokens and the next ones."""
    if name in IMAGE_NETWORKS:
        return normal(num, 3, 16, 16, dtype=dtype), torch.randint(0, 3, (num,), generator=generator(5))
    tokens = torch.randint(0, TOKENS, (num, 8), generator=generator(5))
    return tokens[:, :-1], tokens[:, 1:]


def scores_of(outputs: Any) -> Tensor:
    """The logits in what a network returns, classes last."""
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Mean over samples of the cross-entropy, tokens of a sequence added up."""
    scores = scores_of(outputs)
    return nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum") / len(targets)


class DoubleNorm(nn.Module):
    """RMSNorm in the precision of its input: that of transformers always works in single precision."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class DoubleRotation(nn.Module):
    """Cosines and sines of positions likewise."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.inv_freq, self.scaling = rotary.inv_freq, rotary.attention_scaling

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T, rotated channels]`` each."""
        angles = (position_ids[..., None].to(x) * self.inv_freq.to(x)).repeat(1, 1, 2)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def throughout_double(model: nn.Module) -> nn.Module:
    """The network with such parts in place of its own, so that float64 means float64 throughout."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if hasattr(child, "variance_epsilon"):
                setattr(module, name, DoubleNorm(child))
            elif hasattr(child, "attention_scaling"):
                setattr(module, name, DoubleRotation(child))
    return model
