"""``growth probe`` on anybody's network: code, torchvision, local transformers; data from files and code."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch_helpers import generator, normal

from growth_service.cli.probe import probe_command
from growth_service.cli.probe_source import ProbeData, cross_entropy, load_data, load_model
from growth_service.errors import DataNotFoundError, UserError

CODE = """
import torch
from growth_service.models import build

SPEC = {"family": "mlp", "input_shape": [6], "num_classes": 3, "widths": [8], "blocks": [2], "hidden": [8]}

def network():
    return build(SPEC, seed=0)

def data():
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(dim=1)
    return {"batches": [(x[:200], y[:200])], "train_batches": [(x[200:], y[200:])]}

def wrong():
    return 3

def needs_something(what):
    return what
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a module in it."""
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def command(model, **changes):
    arguments = {
        "data": None, "checkpoint": None, "weights": None, "sites": [], "until_decided": False, "batch_size": 64,
        "device": "cpu", "uri": None, "storage": None, "tolerance": None, "samples": None, "level": 0.05, "seed": 0,
        "plot": None, "as_json": True,
    }  # fmt: skip
    probe_command(model, **arguments | changes)


def test_a_network_and_data_from_code_are_probed_with_a_table_and_what_to_do_next(here):
    found = subprocess.run(
        [sys.executable, "-m", "growth_service", "probe", "python:mine:network", "--data", "python:mine:data",
         "--plot", "sites.png"],
        capture_output=True, text=True, check=False, timeout=120, env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, "")
    for word in ("groups.0.entry", "groups.0.blocks.1", "Network: useful", "Next: grow depth", "Would change it:"):
        assert word in found.stdout
    assert (here / "sites.png").stat().st_size > 5000


def test_json_is_one_document_with_certificates_advice_and_unlock(here, capsys):
    command("python:mine:network", data="python:mine:data")
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "useful"
    assert report["advice"]["action"] == "grow_depth"
    assert all(site["unlock"]["words"] for site in report["sites"])
    assert [s["site"] for s in report["sites"]] == ["groups.0.entry", "groups.0.blocks.0", "groups.0.blocks.1"]


def test_looks_are_listed_where_they_are_repeated_until_decided(here, capsys):
    command("python:mine:network", data="python:mine:data", until_decided=True)
    looks = json.loads(capsys.readouterr().out)["looks"]
    assert looks[-1]["verdict"] == "useful"
    assert looks[0]["level"] == pytest.approx(0.05 * 6 / np.pi**2)


def test_chosen_sites_alone_are_probed(here, capsys):
    command("python:mine:network", data="python:mine:data", sites=["groups.0.blocks.1"])
    assert len(json.loads(capsys.readouterr().out)["sites"]) == 1


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_checkpoint_is_loaded(here, capsys, suffix):
    other = load_model("python:mine:network", checkpoint=None, weights=None)
    state = {k: torch.zeros_like(v) for k, v in other.state_dict().items()}
    path = here / f"weights{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    found = load_model("python:mine:network", checkpoint=path, weights=None)
    assert not any(p.any() for p in found.parameters())


def test_a_checkpoint_of_another_network_is_refused(here):
    save_file({"other": torch.zeros(2)}, here / "other.safetensors")
    with pytest.raises(UserError, match=r"other\.safetensors does not fit ResidualMLP"):
        load_model("python:mine:network", checkpoint=here / "other.safetensors", weights=None)


# --- data -----------------------------------------------------------------------------------------


def arrays(folder, **more):
    path = folder / "data.npz"
    np.savez(path, inputs=normal(100, 6).numpy(), targets=np.arange(100) % 3, **more)
    return str(path)


def loaded(name, model=None, **changes):
    return load_data(name, model or torch.nn.Identity(), **{"samples": None, "batch_size": 16, "seed": 0} | changes)


def test_arrays_are_shuffled_and_batched_and_half_is_a_pool_where_nothing_else_is_given(tmp_path):
    found = loaded(arrays(tmp_path))
    targets = torch.cat([y for _, y in found.batches])
    assert len(targets) == 50
    assert targets.tolist() != sorted(targets.tolist())
    assert sum(len(x) for x in found.pool) == 50
    both = torch.cat([*found.pool, *(x for x, _ in found.batches)])
    assert len(torch.unique(both, dim=0)) == 100  # the pool is disjoint


def test_arrays_may_bring_training_samples(tmp_path):
    found = loaded(arrays(tmp_path, train_inputs=np.zeros((40, 6)), train_targets=np.zeros(40, int)), samples=30)
    assert sum(len(y) for _, y in found.batches) == 30
    assert sum(len(y) for _, y in found.train_batches) == 30
    assert found.pool is None


def test_arrays_without_targets_are_refused_with_what_is_there(tmp_path):
    np.savez(tmp_path / "data.npz", inputs=np.zeros((3, 2)))
    with pytest.raises(UserError, match="has no array 'targets': it has inputs"):
        loaded(str(tmp_path / "data.npz"))


def test_a_text_is_cut_into_sequences_with_the_next_token_as_target(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    inputs, targets = loaded(str(path)).batches[0]
    assert inputs.shape == targets.shape == (16, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_short_text_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("too short")
    with pytest.raises(UserError, match=r"9 tokens make 0 sequences of 64; at least 8 are needed"):
        loaded(str(path))


def test_a_folder_of_images_is_resized_and_normalised(tmp_path):
    from torchvision.transforms.functional import to_pil_image

    for part, num in (("val", 3), ("train", 4)):
        for name in ("cat", "dog"):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for i in range(num):
                to_pil_image(torch.rand(3, 20, 30, generator=generator(i))).save(folder / f"{i}.png")
    found = loaded(str(tmp_path), batch_size=4)
    inputs, targets = next(iter(found.batches))
    assert inputs.shape == (4, 3, 224, 224)
    assert set(torch.cat([y for _, y in found.train_batches]).tolist()) == {0, 1}
    assert targets.dtype == torch.int64


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.npz", "no such file or folder"),
        ("python:mine", "write python:package.module:factory"),
        ("python:mine:absent", "has no attribute 'absent'"),
        ("python:nothing_here:data", "No module named 'nothing_here'"),
        ("python:mine:wrong", "returned a int: return a ProbeData"),
        ("python:mine:needs_something", "calling it without arguments failed"),
        ("mine.py", r"cannot read \.py; use \.npz or \.txt"),
        (".", "no folder val/ in it"),
    ],
)
def test_data_that_cannot_be_read_is_refused_with_what_to_do(here, name, message):
    with pytest.raises((UserError, DataNotFoundError), match=message):
        loaded(name)


def test_a_mapping_with_unknown_keys_is_refused(here):
    (here / "other.py").write_text("def data():\n    return {'batch': []}\n")
    with pytest.raises(UserError, match="a mapping that is no ProbeData"):
        loaded("python:other:data")


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("python:mine:wrong", "the factory must return a torch nn.Module"),
        ("torchvision:resnet19", r"torchvision has no model 'resnet19': use one of resnet101"),
        ("hf:nowhere", r"no config\.json there"),
    ],
)
def test_a_model_that_does_not_exist_is_refused(here, name, message):
    with pytest.raises(UserError, match=message):
        load_model(name, checkpoint=None, weights=None)


def test_torchvision_weights_that_are_not_there_are_refused():
    with pytest.raises(UserError, match="the weights 'NONE_SUCH' of resnet18 cannot be loaded"):
        load_model("torchvision:resnet18", checkpoint=None, weights="NONE_SUCH")


def test_a_model_that_is_no_run_needs_data(here):
    with pytest.raises(UserError, match="python:mine:network needs --data"):
        command("python:mine:network")


def test_a_run_brings_its_own_data():
    with pytest.raises(UserError, match="'digits/joint' is a run of a study, which has its own"):
        command("digits/joint", data="x.npz")


def test_a_device_that_is_not_there_is_refused(here):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(UserError, match="--device cuda: torch sees no such device here"):
        command("python:mine:network", data="python:mine:data", device="cuda")


def test_a_local_transformers_folder_is_probed_on_a_text(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=128, n_positions=32)
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    command(f"hf:{tmp_path / 'model'}", data=str(tmp_path / "text.txt"), samples=32)
    report = json.loads(capsys.readouterr().out)
    assert [s["site"] for s in report["sites"]] == ["transformer.drop", "transformer.h.0"]
    assert report["num_samples"] == 32


def test_a_text_of_other_letters_than_the_vocabulary_is_refused(tmp_path):
    class Config:
        vocab_size = 50

    model = torch.nn.Identity()
    model.config = Config()
    (tmp_path / "text.txt").write_text("z" * 1000)
    with pytest.raises(UserError, match="the vocabulary has only 50 entries"):
        loaded(str(tmp_path / "text.txt"), model)


# --- the default loss -----------------------------------------------------------------------------


def test_the_default_loss_is_the_cross_entropy_of_every_token():
    logits, targets = normal(2, 3, 5), torch.randint(0, 5, (2, 3), generator=generator())
    wanted = -logits.log_softmax(dim=-1).gather(2, targets[..., None]).mean()
    torch.testing.assert_close(cross_entropy(logits, targets), wanted)
    torch.testing.assert_close(cross_entropy((logits, "cache"), targets), wanted)

    class Output:
        def __init__(self):
            self.logits = logits

    torch.testing.assert_close(cross_entropy(Output(), targets), wanted)
    with pytest.raises(UserError, match="returns a str without logits"):
        cross_entropy("logits", targets)


def test_a_probe_data_names_what_a_factory_returns():
    assert ProbeData(batches=[]).reduction == "mean"
