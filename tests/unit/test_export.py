"""A grown network as plain files, and as ONNX."""

import json

import numpy as np
import pytest
import torch
from test_stream_width import inputs_of, network, train
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel
from torch_helpers import generator

from growth_service.blocks import ConvBlock
from growth_service.cli.export import example_of
from growth_service.errors import CheckpointError
from growth_service.growth import growth_log, insert_block, merge, remove_block, remove_units, widen, widen_stream
from growth_service.training.export import export_onnx, load_network, save_network

NAMES = ["mlp", "resnet", "gpt", "gpt-rotary-rms"]
BRANCH = "groups.0.blocks.0.branch"


def grown(name):
    """Grown in every way, and trained a little."""
    model = network(name)
    insert_block(model, site="groups.0.entry", generator=generator(1))
    widen(model, site=BRANCH, units=4, generator=generator(2))
    widen_stream(model, site="groups.0.entry", channels=4, generator=generator(3))
    path = insert_block(model, site="groups.0.blocks.0", generator=generator(4)).path
    insert_block(model, site="groups.0.blocks.0", generator=generator(5))
    if "gpt" in name:
        widen(model, site=BRANCH, heads=1, generator=generator(6))
    train(model, name, optim.AdamW(model.parameters(), lr=1e-3), 3)
    remove_block(model, block=path)
    remove_units(model, site=BRANCH, units=[0, 1])
    return model


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_network_is_read_back_bit_for_bit_without_pickle(name, tmp_path):
    model, x = grown(name), inputs_of(name)
    save_network(model, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["recipe.json", "weights.safetensors"]
    again = load_network(tmp_path / "out")
    assert torch.equal(again(x), model(x))
    assert growth_log(again) == growth_log(model)
    assert [n for n, _ in again.named_parameters()] == [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize(("name", "dense"), list(zip(NAMES, [False, True, True, False], strict=True)))
def test_onnx_gives_the_same_outputs(name, dense, tmp_path):
    import onnxruntime

    model = grown(name)
    x = inputs_of(name)
    before = model(x).detach()
    if dense:
        merge(model)
    export_onnx(model, example_of(model.spec), tmp_path / "network.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "network.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, before.numpy(), rtol=0, atol=2e-5 * float(before.abs().max()))


def test_without_the_extra_onnx_says_what_to_install(monkeypatch, tmp_path):
    from growth_service.training import export

    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"needs onnx, onnxscript: pip install 'growth-service\[onnx\]'"):
        export_onnx(network("mlp"), torch.zeros(2, 1, 3, 3), tmp_path / "n.onnx")


def _cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def _edit(folder, **changes):
    path = folder / "recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: (f / "recipe.json").unlink(), "no exported network"),
        (lambda f: _cut(f / "recipe.json"), "no exported network"),
        (lambda f: _cut(f / "weights.safetensors"), "sha256 differs"),
        (lambda f: (f / "weights.safetensors").unlink(), "damaged or missing"),
        (lambda f: _edit(f, format_version=9), "export format 9, this version reads 1"),
        (lambda f: _edit(f, growth_log=None), "lacks one of"),
        (lambda f: _edit(f, growth_log=[{"kind": "insert"}]), "growth log .* is damaged"),
        (lambda f: _edit(f, growth_log=[]), "do not fit this base"),
    ],
)
def test_a_damaged_export_is_refused(damage, text, tmp_path):
    model = network("mlp")
    insert_block(model, site="groups.0.entry", generator=generator(1))
    save_network(model, tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=text):
        load_network(tmp_path)


# --- precision, ties, wrappers --------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_network_in_half_precision_comes_back_in_half_precision(name, tmp_path):
    model = grown(name).bfloat16()
    save_network(model, tmp_path)
    again = load_network(tmp_path)
    x = inputs_of(name) if "gpt" in name else inputs_of(name).bfloat16()
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert torch.equal(again(x), model(x))


def test_batch_statistics_are_saved_too(tmp_path):
    model = network("resnet")
    insert_block(model, site="groups.0.entry", block=ConvBlock(4, 4, norm="batch"), generator=generator())
    model.train()(inputs_of("resnet"))
    save_network(model, tmp_path)
    assert torch.equal(load_network(tmp_path).eval()(inputs_of("resnet")), model.eval()(inputs_of("resnet")))


class Tied(nn.Module):
    """A square map, its transpose, and itself again; a view of it as a buffer."""

    def __init__(self, *, tied=True):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.register_buffer("part", torch.zeros(2, 4))
        if tied:
            self.b.weight = nn.Parameter(self.a.weight.data.t())
            self.c.weight = self.a.weight
            self.part = self.a.weight.data[:2]

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))) + self.part.sum()


def test_tied_transposed_and_overlapping_weights_come_back_as_they_were(tmp_path):
    model, x = Tied(), torch.ones(3, 4)
    save_network(model, tmp_path)
    again = load_network(tmp_path, base=Tied())
    assert torch.equal(again(x), model(x))
    assert again.c.weight is again.a.weight
    apart = load_network(tmp_path, base=Tied(tied=False))
    assert torch.equal(apart(x), model(x))
    assert torch.equal(apart.b.weight, model.a.weight.t())


@pytest.mark.parametrize("wrap", [AveragedModel, lambda m: torch.compile(m, backend="eager")])
def test_wrapped_networks_are_not_saved(wrap, tmp_path):
    save_network(network("mlp"), tmp_path)
    with pytest.raises(CheckpointError, match="cannot be saved"):
        save_network(wrap(network("mlp")), tmp_path)
    load_network(tmp_path)  # what was there is still there


def test_a_log_that_is_no_json_leaves_the_network_that_was_there(tmp_path):
    save_network(network("mlp"), tmp_path)
    odd = network("mlp")
    odd.spec["hidden"] = object()
    with pytest.raises(CheckpointError, match="no plain JSON"):
        save_network(odd, tmp_path)
    load_network(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tied": {"x": "nothing"}}, "damaged"),
        ({"base": {}}, "damaged"),
        ({"base": [1]}, "damaged"),
        ({"base": {"spec": {"family": "mlp"}}}, "damaged"),
    ],
)
def test_a_recipe_with_parts_that_make_no_sense_is_refused(change, text, tmp_path):
    save_network(network("mlp"), tmp_path)
    _edit(tmp_path, **change)
    with pytest.raises(CheckpointError, match=text):
        load_network(tmp_path)
