"""Networks of other libraries: where they may grow, and blocks that are copies of their layers."""

import subprocess
import sys

import pytest
import torch
from architectures import NETWORKS, data, scores_of, throughout_double
from torch import nn
from torch_helpers import VectorNet, generator

from growth_service.blocks import block_from_config
from growth_service.errors import SiteError, UserError
from growth_service.growth import insert_block
from growth_service.models import Site, default_block, default_block_config, resolve, site_of, sites
from growth_service.models.streams import stream_of

F64 = torch.float64
SITES = {
    "resnet18": [("maxpool", 64), ("layer1.0", 64), ("layer1.1", 64), ("layer2.0", 128)],
    "resnet50": [("maxpool", 64), ("layer1.0", 256), ("layer1.1", 256), ("layer2.0", 512)],
    "resnext": [("maxpool", 64), ("layer1.0", 256), ("layer1.1", 256)],
    "vit": [("encoder.dropout", 8), ("encoder.layers.encoder_layer_0", 8), ("encoder.layers.encoder_layer_1", 8)],
    "convnext": [("features.0.1", 6), ("features.1.0", 6), ("features.1.1", 6), ("features.2.1", 8), ("features.3.0", 8)],
    "gpt2": [("transformer.drop", 16), ("transformer.h.0", 16), ("transformer.h.1", 16)],
    "neox": [("gpt_neox.embed_in", 32), ("gpt_neox.layers.0", 32), ("gpt_neox.layers.1", 32)],
    **{
        name: [("model.embed_tokens", 16), ("model.layers.0", 16), ("model.layers.1", 16)]
        for name in ("llama", "mistral", "qwen2")
    },
}  # fmt: skip
COPIED = {
    "resnet18": ["layer1.0", "layer1.1", "layer1.1", None],
    "resnet50": ["layer1.0", "layer1.1", "layer1.1", None],
    "resnext": ["layer1.0", "layer1.1", "layer1.1"],
    "convnext": ["features.1.0", "features.1.1", "features.1.1", "features.3.0", "features.3.0"],
}
"""By site; elsewhere the next layer, behind the last one the last."""


def copied_from(name):
    paths = [path for path, _ in SITES[name]]
    return COPIED.get(name, [*paths[1:], paths[-1]])


# --- places ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_the_sites_of_a_network_are_its_entry_and_its_layers_in_the_order_they_run(name):
    model = NETWORKS[name]()
    found, ran = sites(model), []
    for site in found:
        resolve(model, site.path).register_forward_hook(
            lambda _m, _a, out, path=site.path: ran.append(site_of(stream_of(out, path=path), path=path))
        )
    model(data(name)[0])
    assert [(s.path, s.width) for s in found] == SITES[name]
    assert [(s.path, s.width, s.kind) for s in found] == [(s.path, s.width, s.kind) for s in ran]
    assert all(s.preserving for s in found)


def test_a_residual_network_with_a_last_relu_says_that_its_stream_is_non_negative():
    assert all("ReLU" in s.reason and "non-negative" in s.reason for s in sites(NETWORKS["resnet18"]()))


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_a_network_under_a_wrapper_has_the_same_sites_with_longer_paths(name):
    wrapped = nn.Module()
    wrapped.body = NETWORKS[name]()
    assert [s.path for s in sites(wrapped)] == [f"body.{path}" for path, _ in SITES[name]]


def test_a_bare_trunk_has_the_sites_of_the_network_with_a_head():
    trunk = NETWORKS["gpt2"]().transformer
    assert [s.path for s in sites(trunk)] == ["drop", "h.0", "h.1"]
    assert default_block(trunk, sites(trunk)[0], generator=generator(), copy=True)[1] == "h.0"


def test_growth_adds_no_site():
    model = NETWORKS["convnext"]()
    before = sites(model)
    insert_block(model, site="features.1.0", generator=generator())
    assert sites(model) == before


def test_a_model_of_two_networks_has_no_default_sites():
    pair = nn.ModuleList([NETWORKS["convnext"](), NETWORKS["convnext"]()])
    with pytest.raises(SiteError, match="no default sites are known for ModuleList: pass the paths"):
        sites(pair)


def test_a_model_that_nothing_recognises_has_no_default_sites():
    with pytest.raises(SiteError, match="no default sites are known for VectorNet: pass the paths"):
        sites(VectorNet())


def test_a_place_inside_a_layer_is_no_site_and_gets_the_block_of_any_stream_of_its_shape():
    model = NETWORKS["gpt2"]()
    block, source = default_block(
        model, Site(path="transformer.h.0.mlp", kind="sequence", width=16), generator=generator(), copy=True
    )
    assert (block.config()["type"], source) == ("mlp", None)


def test_importing_the_package_loads_neither_library():
    code = (
        "import sys, growth_service.models, growth_service.growth, growth_service.probing\n"
        "print([m for m in ('torchvision', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# --- blocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_the_block_of_a_site_copies_the_layer_that_reads_its_stream_else_the_one_that_wrote_it(name):
    model = NETWORKS[name]()
    found = [default_block(model, s, generator=generator(), copy=True) for s in sites(model)]
    assert [source for _, source in found] == copied_from(name)
    assert all(block.is_zero for block, _ in found)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_random_block_has_the_shape_of_the_copy_and_weights_of_its_seed(name):
    model = NETWORKS[name]()
    for site in sites(model):
        copied, source = default_block(model, site, generator=generator(), copy=True)
        drawn, none = default_block(model, site, generator=generator(3), copy=False)
        again, _ = default_block(model, site, generator=generator(3), copy=False)
        assert none is None
        assert drawn.config() == copied.config()
        assert drawn.is_zero
        assert block_from_config(default_block_config(model, site), generator=generator()).config() == drawn.config()
        assert all(torch.equal(a, b) for a, b in zip(drawn.parameters(), again.parameters(), strict=True))
        if source is not None:
            pairs = zip(drawn.named_parameters(), copied.parameters(), strict=True)
            assert not any(torch.equal(a, b) for (key, a), b in pairs if a.ndim > 1 and not key.startswith("project"))


@pytest.mark.parametrize("name", ["convnext", "gpt2", "llama"])
@pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
def test_a_block_has_the_precision_of_the_network(name, dtype):
    model = NETWORKS[name]().to(dtype)
    for copy in (True, False):
        block, _ = default_block(model, sites(model)[1], generator=generator(), copy=copy)
        assert {p.dtype for p in block.parameters()} == {dtype}


def test_rotation_frequencies_stay_as_precise_as_they_are():
    block, _ = default_block(NETWORKS["llama"](), Site(path="model.layers.0", kind="sequence", width=16),
                             generator=generator(), copy=True)  # fmt: skip
    before = block.inv_freq.clone()
    assert torch.equal(block.to(torch.bfloat16).inv_freq, before)
    assert block.query.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["neox", "llama"])
@pytest.mark.parametrize("copied", [True, False])
def test_any_block_rotates_as_the_network_does(name, copied):
    model = NETWORKS[name]()
    block, _ = default_block(model, sites(model)[1], generator=generator(), copy=copied)
    assert torch.equal(block.inv_freq, next(b for n, b in model.named_buffers() if n.endswith("rotary_emb.inv_freq")))
    drawn = block_from_config(default_block_config(model, sites(model)[1]), generator=generator())
    torch.testing.assert_close(drawn.inv_freq, block.inv_freq)


def test_a_copy_shares_no_memory_with_its_layer():
    model = NETWORKS["neox"]()
    block, _ = default_block(model, sites(model)[0], generator=generator(), copy=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.add_(1.0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_an_activation_that_no_block_has_is_named():
    model = NETWORKS["gpt2"](activation_function="quick_gelu")
    with pytest.raises(
        UserError, match="a layer GPT2Block with activation 'quick_gelu' has no block of the same shape"
    ):
        default_block(model, sites(model)[0], generator=generator(), copy=True)


@pytest.mark.parametrize("name", NETWORKS)
def test_inserting_a_copy_changes_no_bit_of_the_outputs(name):
    model, (inputs, _) = NETWORKS[name](), data(name)
    with torch.no_grad():
        before = scores_of(model(inputs))
        for site in sites(model):
            block, _ = default_block(model, site, generator=generator(), copy=True)
            insert_block(model, site=site.path, block=block, generator=generator())
            assert torch.equal(scores_of(model(inputs)), before)


# --- is a copy a copy? With the layer's own last maps, a block must do what the layer does ---------------


def bias_of(linear):
    return 0.0 if linear.bias is None else linear.bias


def folded(conv, norm):
    """One convolution for a convolution and the BatchNorm behind it: weight and bias."""
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    return scale[:, None, None, None] * conv.weight, norm.bias - norm.running_mean * scale


def biases_inside(layer):
    """Biases that the MLP of a sequential layer reads with the attention's outputs: a block has none there."""
    match type(layer).__name__:
        case "EncoderBlock":
            return [layer.self_attention.out_proj.bias]
        case "GPT2Block":
            return [layer.attn.c_proj.bias]
        case "GPTNeoXLayer":
            return [] if layer.use_parallel_residual else [layer.attention.dense.bias]
        case _:
            return []


def fill(block, layer):
    """Give a block the last maps of a layer."""
    match type(layer).__name__:
        case "BasicBlock":
            weight, bias = folded(layer.conv2, layer.bn2)
        case "Bottleneck":
            weight, bias = folded(layer.conv3, layer.bn3)
        case "CNBlock":
            last, scale = layer.block[5], layer.layer_scale[:, 0, 0]
            weight, bias = (scale[:, None] * last.weight)[..., None, None], scale * last.bias
        case "EncoderBlock":
            weight = torch.cat([layer.self_attention.out_proj.weight, layer.mlp[3].weight], dim=1)
            bias = layer.mlp[3].bias
        case "GPT2Block":
            weight = torch.cat([layer.attn.c_proj.weight.T, layer.mlp.c_proj.weight.T], dim=1)
            bias = layer.mlp.c_proj.bias
        case "GPTNeoXLayer":
            weight = torch.cat([layer.attention.dense.weight, layer.mlp.dense_4h_to_h.weight], dim=1)
            bias = bias_of(layer.attention.dense) + layer.mlp.dense_4h_to_h.bias
        case _:
            weight = torch.cat([layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight], dim=1)
            bias = None if block.project.bias is None else bias_of(layer.mlp.down_proj)
    block.project.weight.copy_(weight)
    if bias is not None:
        block.project.bias.copy_(torch.as_tensor(bias))


VARIANTS = [
    *((name, {}) for name in NETWORKS),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"scale_attn_weights": False, "n_inner": 24, "activation_function": "relu"}),
    ("neox", {"use_parallel_residual": False}),
    ("neox", {"attention_bias": False}),
    ("neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 1.0}}),
    ("llama", {"attention_bias": False, "mlp_bias": True, "num_key_value_heads": 4}),
    ("llama", {"head_dim": 6, "hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
                                   "original_max_position_embeddings": 4}}),
]  # fmt: skip


def does(block, layer, z):
    """What the layer would return, with the features of the block."""
    if getattr(layer, "downsample", None) is not None:  # it changes the width, so only its inner part can be copied
        return (layer.bn3(layer.conv3(block.features(z))) + layer.downsample(z)).relu()
    fill(block, layer)
    out = z + block(z)
    return out.relu() if hasattr(layer, "bn1") else out


# float64: rounding of a few hundred terms; float32 the same, grown by large logits of drawn weights
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("name", "changes"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain"
)
def test_a_copy_with_the_last_maps_of_its_layer_does_what_the_layer_does(name, changes, dtype, tolerance):
    model, (inputs, _) = NETWORKS[name](**changes).to(dtype), data(name, dtype=dtype)
    made = [default_block(model, s, generator=generator(), copy=True) for s in sites(model)]
    if dtype == F64:
        throughout_double(model)
    for block, source in made:
        if source is None:
            continue
        layer, seen = resolve(model, source), {}
        with torch.no_grad():
            for bias in biases_inside(layer):
                bias.zero_()
            handle = layer.register_forward_hook(lambda _m, args, out, seen=seen: seen.update(z=args[0], out=out))
            model(inputs)
            handle.remove()
            found = does(block.eval(), layer, seen["z"])
        error = float((found - seen["out"]).abs().max() / seen["out"].abs().max())
        assert error < tolerance


# --- post-activation blocks -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext"])
def test_a_copy_has_the_features_of_its_layer_in_training_too(name):
    """BatchNorm of a batch: nothing in front of the first convolution may change what it sees."""
    model = NETWORKS[name]().train()
    block, source = default_block(model, sites(model)[0], generator=generator(), copy=True)
    layer, z = resolve(model, source), data(name)[0].mean(dim=1, keepdim=True).expand(-1, 64, -1, -1).relu()
    with torch.no_grad():
        wanted = layer.bn1(layer.conv1(z)).relu()
        if hasattr(layer, "conv3"):
            wanted = layer.bn2(layer.conv2(wanted)).relu()
        assert torch.equal(block.train().features(z), wanted)


def test_a_calibrated_block_has_features_of_ordinary_size():
    """Whatever the size of the stream: BatchNorm then knows its mean and variance."""
    block = block_from_config({"type": "postact", "width": 4, "hidden": 6, "bottleneck": True}, generator=generator())
    z = 30.0 + 5.0 * torch.randn(40, 4, 5, 5, generator=generator(1))
    block.calibrate(z)
    with torch.no_grad():
        u = block.inner_norm(block.inner(block.reduce_norm(block.reduce(z)).relu()))
    assert not block.inner_norm.training
    torch.testing.assert_close(u.mean(dim=(0, 2, 3)), torch.zeros(6), rtol=0, atol=1e-3)
    torch.testing.assert_close(u.var(dim=(0, 2, 3)), torch.ones(6), rtol=0.01, atol=0)


@pytest.mark.parametrize("changes", [{"groups": 3, "bottleneck": True}, {"groups": 2}])
def test_groups_that_do_not_divide_a_bottleneck_are_refused(changes):
    with pytest.raises(UserError, match="groups of a post-activation block divide the inner channels of a bottleneck"):
        block_from_config({"type": "postact", "width": 4, "hidden": 4} | changes, generator=generator())
