"""A grown network as plain files, and as ONNX."""

import json

import numpy as np
import pytest
import torch
from test_stream_width import inputs_of, network, train
from torch import optim
from torch_helpers import generator

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
