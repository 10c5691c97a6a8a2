"""Image networks of torchvision: ResNet (also wide and ResNeXt), VisionTransformer, ConvNeXt."""

from typing import Any

from torch import Tensor, nn

from growth_service.models.adapters.base import Adapter, Twin, need
from growth_service.models.streams import Site

_AFTER_RELU = (
    "output of a ReLU: adding zero changes nothing; the stream is non-negative here until an inserted block has learnt"
)


def _state(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": value for name, value in module.state_dict().items()}


# --- ResNet: the stream is what its residual layers return, after their last ReLU ---------------------


def _resnet_layers(net: Any) -> list[tuple[str, Any]]:
    stages = [f"layer{i}" for i in range(1, 5)]
    return [(f"{s}.{name}", layer) for s in stages for name, layer in net.get_submodule(s).named_children()]


def _resnet_sites(net: Any) -> list[Site]:
    widths = {"maxpool": net.conv1.out_channels}
    for path, layer in _resnet_layers(net):
        widths[path] = (layer.conv3 if hasattr(layer, "conv3") else layer.conv2).out_channels
    return [Site(path=p, kind="image", width=w, reason=_AFTER_RELU) for p, w in widths.items()]


def _resnet_twin(net: Any, layer: Any, width: int) -> Twin | None:
    """The layer without its last BatchNorm: same features, bit for bit, in training and evaluation."""
    if not hasattr(layer, "conv2"):
        return None
    need(isinstance(layer.bn1, nn.BatchNorm2d), layer=layer, what=f"norm {type(layer.bn1).__name__}")
    bottleneck = hasattr(layer, "conv3")
    inner = layer.conv2 if bottleneck else layer.conv1
    config = {
        "type": "postact",
        "width": width,
        "hidden": inner.out_channels,
        "bottleneck": bottleneck,
        "groups": inner.groups,
        "dilation": inner.dilation[0],
        "norm_eps": layer.bn1.eps,
    }
    if layer.conv1.in_channels != width or layer.stride != 1:
        return Twin(config=config, inner=None)
    if bottleneck:
        parts = {"reduce": layer.conv1, "reduce_norm": layer.bn1, "inner": layer.conv2, "inner_norm": layer.bn2}
    else:
        parts = {"inner": layer.conv1, "inner_norm": layer.bn1}
    return Twin(config=config, inner={k: v for name, part in parts.items() for k, v in _state(name, part).items()})


# --- VisionTransformer ----------------------------------------------------------------------------------


def _vit_sites(net: Any) -> list[Site]:
    paths = ["encoder.dropout"] + [f"encoder.layers.{name}" for name, _ in net.encoder.layers.named_children()]
    return [Site(path=p, kind="sequence", width=net.hidden_dim) for p in paths]


def _vit_twin(net: Any, layer: Any, width: int) -> Twin | None:
    if not hasattr(layer, "self_attention"):
        return None
    attention, first = layer.self_attention, layer.mlp[0]
    for norm in (layer.ln_1, layer.ln_2):
        need(type(norm) is nn.LayerNorm and norm.eps == layer.ln_1.eps, layer=layer, what=f"norm {norm}")
    need(attention.in_proj_bias is not None, layer=layer, what="attention without biases")
    config = {
        "type": "transformer",
        "width": width,
        "heads": attention.num_heads,
        "hidden": first.out_features,
        "causal": False,
        "norm_eps": layer.ln_1.eps,
    }
    weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    inner = _state("attn_norm", layer.ln_1) | _state("mlp_norm", layer.ln_2) | _state("inner", first)
    for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        inner |= {f"{name}.weight": weight.detach(), f"{name}.bias": bias.detach()}
    return Twin(config=config, inner=inner)


# --- ConvNeXt: stem and transitions are containers, whose last child returns the stream ---------------


def _is_convnext_layer(module: nn.Module) -> bool:
    return type(module).__name__ == "CNBlock"


def _convnext_sites(net: Any) -> list[Site]:
    found = []
    for i, part in enumerate(net.features):
        children = [name for name, _ in part.named_children()]
        layers = [name for name in children if _is_convnext_layer(part.get_submodule(name))]
        if layers:
            width = part.get_submodule(layers[0]).layer_scale.shape[0]
        else:
            layers, width = children[-1:], next(m for m in part.modules() if isinstance(m, nn.Conv2d)).out_channels
        found += [Site(path=f"features.{i}.{name}", kind="image", width=width) for name in layers]
    return found


def _convnext_twin(net: Any, layer: Any, width: int) -> Twin | None:
    if not _is_convnext_layer(layer):
        return None
    depthwise, norm, inner = layer.block[0], layer.block[2], layer.block[3]
    need(type(norm) is nn.LayerNorm and norm.eps == 1e-6, layer=layer, what=f"norm {norm}")
    config = {"type": "depthwise", "width": width, "hidden": inner.out_features}
    if depthwise.in_channels != width:
        return Twin(config=config, inner=None)
    parts = _state("depthwise", depthwise) | _state("norm", norm) | _state("inner", inner)
    return Twin(config=config, inner=parts)


ADAPTERS = (
    Adapter(library="torchvision.models.resnet", class_name="ResNet", sites=_resnet_sites, twin=_resnet_twin),
    Adapter(
        library="torchvision.models.vision_transformer",
        class_name="VisionTransformer",
        sites=_vit_sites,
        twin=_vit_twin,
    ),
    Adapter(library="torchvision.models.convnext", class_name="ConvNeXt", sites=_convnext_sites, twin=_convnext_twin),
)
