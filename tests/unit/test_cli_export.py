"""``growth export``: the network of a run as plain files."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_helpers import prepared_digits, run_to_end, trial_config

from growth_service import load_network
from growth_service.training.checkpoint import newest
from growth_service.training.data import open_splits


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """A finished trial that grew in every direction: its folder, its data."""
    folder = tmp_path_factory.mktemp("trial")
    data = prepared_digits(folder / "data")
    run_to_end(trial_config(folder / "t", data=data))
    return folder / "t", data


def export(*arguments):
    command = [sys.executable, "-m", "growth_service", "export", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_run_is_exported_and_read_back(trial, tmp_path):
    folder, data = trial
    found = export(folder, "-o", tmp_path / "out", "--onnx", "--dense", "--json")
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    assert said["files"] == ["network.onnx", "recipe.json", "weights.safetensors"]
    assert said["grow_steps"] > 3
    inputs = open_splits(Path(data)).val.inputs
    wanted = newest(folder / "stages").model.eval()(inputs).detach()
    assert torch.equal(load_network(tmp_path / "out").eval()(inputs), wanted)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "network.onnx"), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    np.testing.assert_allclose(outputs, wanted.numpy(), rtol=0, atol=2e-5 * float(wanted.abs().max()))


def test_without_json_it_says_in_words_what_it_wrote(trial, tmp_path):
    found = export(trial[0], "-o", tmp_path / "out")
    assert found.returncode == 0
    assert "grow steps" in found.stdout
    assert "load_network" in found.stdout


def test_wrong_input_is_exit_2_without_a_traceback(trial, tmp_path):
    (tmp_path / "file").write_text("x")
    for arguments, text in (
        ((trial[0], "-o", tmp_path / "file"), "is a file"),
        ((tmp_path / "nothing", "-o", tmp_path / "out", "--storage", tmp_path), "run a study first"),
    ):
        found = export(*arguments)
        assert found.returncode == 2, found.stderr
        assert text in found.stderr
        assert "Traceback" not in found.stderr
    assert not (tmp_path / "out").exists()
