"""Data sets: loaders, splits that are disjoint and fixed by a seed, subsets that are nested."""

import gzip
import hashlib
import io
import itertools
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from growth_service.errors import DataNotFoundError, UserError
from growth_service.training import datasets
from growth_service.training.batches import chunks_of
from growth_service.training.data import open_splits, subset_size
from growth_service.training.datasets import Raw, Request, Tokens, prepare
from growth_service.training.datasets import fashion as fashion_module
from growth_service.training.datasets.splits import TEXT_SHARES, split_tokens

# --- data sets ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The prepared digits: their folder and description."""
    target = tmp_path_factory.mktemp("digits")
    return target, prepare("digits", seed=0, target=target)


def numbered_images(num, *, classes=4, test=0):
    """A set in which every image is its own number, so that a test can tell where it went."""

    def images(start, count):
        numbers = np.arange(start, start + count)
        return np.stack([numbers // 256, numbers % 256], axis=1).astype(np.uint8).reshape(-1, 1, 1, 2)

    labels = np.random.default_rng(5).integers(0, classes, num + test)
    rest = (images(num, test), labels[num:]) if test else (None, None)
    return Raw(images(0, num), labels[:num], *rest, 255.0)


def numbers(inputs):
    """The inverse of ``numbered_images``."""
    return (inputs[:, 0, 0, 0].astype(int) * 256 + inputs[:, 0, 0, 1]).tolist()


@pytest.fixture
def split_of(monkeypatch, tmp_path):
    """Prepare a made-up set under the name of the digits; gives its arrays."""

    def prepared(raw, *, seed=0, limits=None):
        monkeypatch.setitem(datasets.LOADERS, "digits", lambda request: raw)
        target = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        description = prepare("digits", seed=seed, target=target, limits=limits)
        with np.load(target / "data.npz") as arrays:
            return dict(arrays), description

    return prepared


def test_the_digits_are_split_46_20_14_20(digits):
    assert digits[1]["sizes"] == {"train": 837, "probe": 360, "val": 240, "test": 360}


def test_splits_are_disjoint_and_miss_nothing(split_of):
    arrays, _ = split_of(numbered_images(500))
    seen = [n for part in ("train", "probe", "val", "test") for n in numbers(arrays[f"{part}_inputs"])]
    assert sorted(seen) == list(range(500))


def test_images_keep_their_labels(split_of):
    raw = numbered_images(300)
    arrays, _ = split_of(raw)
    for part in ("train", "probe", "val", "test"):
        assert raw.labels[numbers(arrays[f"{part}_inputs"])].tolist() == arrays[f"{part}_targets"].tolist()


def test_a_test_part_of_its_own_stays_the_test_split(split_of):
    arrays, description = split_of(numbered_images(500, test=77))
    assert description["sizes"] == {"train": 400, "probe": 50, "val": 50, "test": 77}
    assert numbers(arrays["test_inputs"]) == list(range(500, 577))


def test_limits_shorten_splits_and_mix_none(split_of):
    raw = numbered_images(500)
    full, short = split_of(raw)[0], split_of(raw, limits={"train": 100, "val": 7})[0]
    assert [len(short[f"{p}_targets"]) for p in ("train", "probe", "val", "test")] == [100, 100, 7, 100]
    assert numbers(short["train_inputs"]) == numbers(full["train_inputs"])[:100]


@pytest.mark.parametrize("size", [50, 100, 209, 418, 837])
def test_every_training_subset_holds_the_classes_in_their_shares(digits, size):
    splits = open_splits(digits[0])
    everything = torch.cat([p.targets for p in (splits.train, splits.probe, splits.val, splits.test)])
    shares = torch.bincount(everything, minlength=10) / len(everything)
    counts = torch.bincount(splits.train.targets[:size], minlength=10)
    # each class is spread evenly over the order, so a prefix is off by one and by its share of the others' ones
    assert float((counts - size * shares).abs().max()) <= 2.0


@pytest.mark.parametrize("part", ["probe", "val", "test"])
def test_every_split_holds_the_classes_in_their_shares(digits, part):
    splits = open_splits(digits[0])
    everything = torch.cat([p.targets for p in (splits.train, splits.probe, splits.val, splits.test)])
    targets = getattr(splits, part).targets
    wanted = torch.bincount(everything, minlength=10) / len(everything) * len(targets)
    assert float((torch.bincount(targets, minlength=10) - wanted).abs().max()) <= 4.0  # two ends, each off by two


def test_training_subsets_are_nested(digits):
    train = open_splits(digits[0]).train
    small, large = (torch.cat([x for x, _ in chunks_of(train, size=64, limit=n)]) for n in (100, 333))
    assert torch.equal(large[:100], small)
    assert torch.equal(large, train.inputs[:333])


def test_equal_seeds_give_equal_digests(digits, tmp_path):
    assert prepare("digits", seed=0, target=tmp_path) == digits[1]


def test_another_seed_gives_another_digest(digits, tmp_path):
    assert prepare("digits", seed=1, target=tmp_path)["digest"] != digits[1]["digest"]


def test_the_digest_is_that_of_the_stored_arrays(digits):
    target, description = digits
    with np.load(target / "data.npz") as arrays:
        stored = hashlib.sha256(b"".join(arrays[key].tobytes() for key in sorted(arrays)))
    assert stored.hexdigest() == description["digest"] == open_splits(target).digest


def test_a_data_set_is_prepared_once(digits, monkeypatch):
    target, description = digits
    monkeypatch.setitem(datasets.LOADERS, "digits", None)  # calling it would raise
    assert prepare("digits", seed=0, target=target) == description


def test_inputs_are_scaled_to_plus_and_minus_one(digits):
    inputs = open_splits(digits[0]).train.inputs
    assert (float(inputs.min()), float(inputs.max()), tuple(inputs.shape[1:])) == (-1.0, 1.0, (1, 8, 8))


def test_an_unknown_data_set_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UserError, match="unknown data set 'mnist': use one of cifar10, cifar100, digits"):
        prepare("mnist", seed=0, target=tmp_path)


@pytest.mark.parametrize(("share", "size"), [(1.0, 837), (0.5, 418), (0.25, 209), (0.001, 1)])
def test_a_share_is_a_whole_number_of_samples_and_at_least_one(share, size):
    assert subset_size(837, share) == size


# --- Fashion-MNIST --------------------------------------------------------------------------------


def idx_bytes(array):
    """The IDX format: zeros, type 8 (unsigned byte), number of axes, sizes in big-endian, data."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def fashion(tmp_path, monkeypatch):
    """A folder with a Fashion-MNIST of 60 and 20 tiny images, two files of it gzipped."""
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": rng.integers(0, 256, (60, 4, 3)),
        "train-labels-idx1-ubyte": np.arange(60) % 10,
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (20, 4, 3)),
        "t10k-labels-idx1-ubyte": np.arange(20) % 10,
    }
    for name, array in arrays.items():
        content = idx_bytes(array)
        if name.startswith("train"):
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (tmp_path / name).write_bytes(content)
    hashes = {name: hashlib.sha256(idx_bytes(array)).hexdigest() for name, array in arrays.items()}
    monkeypatch.setattr(fashion_module, "FASHION_FILES", hashes)
    return tmp_path, arrays


def test_fashion_mnist_is_read_from_plain_and_gzipped_files(fashion):
    folder, arrays = fashion
    raw = fashion_module.load_fashion_mnist(folder)
    for found, name in zip((raw.images[:, 0], raw.labels, raw.test_images[:, 0], raw.test_labels), arrays, strict=True):
        assert np.array_equal(found, arrays[name])


def test_fashion_mnist_is_split_80_10_10_beside_its_own_test_part(fashion):
    folder, arrays = fashion
    target = folder / "prepared"
    description = prepare("fashion_mnist", request=Request(folder=str(folder)), seed=0, target=target)
    assert description["sizes"] == {"train": 48, "probe": 6, "val": 6, "test": 20}
    assert (description["input_shape"], description["num_classes"]) == ([1, 4, 3], 10)
    wanted = torch.from_numpy(arrays["t10k-images-idx3-ubyte"] / 255.0 * 2 - 1).float()
    assert torch.allclose(open_splits(target).test.inputs[:, 0], wanted, atol=1e-6)  # float32


def test_a_folder_without_fashion_mnist_is_refused_with_the_names_of_its_files(fashion):
    folder, _ = fashion
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(
        DataNotFoundError, match=r"does not hold Fashion-MNIST: it needs train-images.*\(plain or \.gz\)"
    ):
        fashion_module.load_fashion_mnist(folder)


def test_a_file_of_something_else_is_refused(fashion):
    folder, _ = fashion
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(20)))
    with pytest.raises(DataNotFoundError, match=r"t10k-labels-idx1-ubyte is not Fashion-MNIST's.*sha256 differs"):
        fashion_module.load_fashion_mnist(folder)


def test_a_gzipped_file_that_was_cut_off_is_refused(fashion):
    folder, _ = fashion
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataNotFoundError, match=r"train-images-idx3-ubyte\.gz"):
        fashion_module.load_fashion_mnist(folder)


def test_without_files_and_network_three_ways_to_get_fashion_mnist_are_named(tmp_path, monkeypatch):
    import torchvision.datasets

    def offline(*_args, **_arguments):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(fashion_module, "FASHION_FOLDERS", (tmp_path / "nowhere",))
    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", offline)  # a test never goes on the network
    with pytest.raises(DataNotFoundError, match=r"nowhere.*apt-get install dataset-fashion-mnist; .*data\.folder; or"):
        fashion_module.load_fashion_mnist(None)


DEBIAN = fashion_module.FASHION_FOLDERS[0]


@pytest.mark.skipif(not DEBIAN.is_dir(), reason=f"Debian's dataset-fashion-mnist is not in {DEBIAN}")
def test_debians_fashion_mnist_is_what_it_should_be():
    raw = fashion_module.load_fashion_mnist(DEBIAN)
    assert (raw.images.shape, raw.test_images.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert np.bincount(raw.labels).tolist() == [6000] * 10
    assert np.bincount(raw.test_labels).tolist() == [1000] * 10


# --- CIFAR ----------------------------------------------------------------------------------------


def jpeg_copy(folder, *, num=40, test=10):
    """A folder with a tiny re-encoded CIFAR-10: images of one colour, which JPEG keeps nearly."""
    rng = np.random.default_rng(0)
    arrays, colours = {}, {}
    for part, count in (("train", num), ("test", test)):
        colours[part] = rng.integers(0, 256, (count, 3), dtype=np.uint8)
        stream, offsets = b"", []
        for colour in colours[part]:
            buffer = io.BytesIO()
            Image.new("RGB", (32, 32), tuple(int(c) for c in colour)).save(buffer, "JPEG", quality=95)
            offsets.append(len(stream))
            stream += buffer.getvalue()
        arrays[f"{part}_jpeg"] = np.frombuffer(stream, dtype=np.uint8)
        arrays[f"{part}_offset"] = np.array(offsets)
        arrays[f"{part}_label"] = np.arange(count) % 10
    np.savez(folder / "cifar10_jpeg.npz", **arrays)
    return colours


def test_cifar_is_read_from_a_re_encoded_copy(tmp_path):
    colours = jpeg_copy(tmp_path)
    raw = datasets.load_cifar(10, tmp_path)
    assert (raw.images.shape, raw.test_images.shape) == ((40, 3, 32, 32), (10, 3, 32, 32))
    for images, part in ((raw.images, "train"), (raw.test_images, "test")):
        assert np.abs(images.mean(axis=(2, 3)) - colours[part]).max() < 6
    assert raw.labels.tolist() == [i % 10 for i in range(40)]
    with pytest.raises(DataNotFoundError, match="holds CIFAR-10"):
        datasets.load_cifar(100, tmp_path)


def test_cifar_is_read_from_torchvisions_files(tmp_path, monkeypatch):
    """Files as torchvision keeps them, with a few images in them."""
    import torchvision.datasets

    kind = torchvision.datasets.CIFAR10
    root = tmp_path / kind.base_folder
    root.mkdir()
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
    for name, rows in (("data_batch_1", pixels[:4]), ("test_batch", pixels[4:])):
        content = {"data": rows.reshape(len(rows), -1), "labels": list(range(len(rows)))}
        (root / name).write_bytes(pickle.dumps(content))
    (root / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    monkeypatch.setattr(kind, "_check_integrity", lambda self: True)
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)
    monkeypatch.setattr(kind, "train_list", [["data_batch_1", ""]])
    monkeypatch.setattr(kind, "test_list", [["test_batch", ""]])
    raw = datasets.load_cifar(10, tmp_path)
    assert np.array_equal(raw.images, pixels[:4])
    assert np.array_equal(raw.test_images, pixels[4:])
    assert raw.test_labels.tolist() == [0, 1]


@pytest.mark.parametrize("classes", [10, 100])
def test_without_cifar_the_ways_to_get_it_are_named(classes, tmp_path):
    with pytest.raises(DataNotFoundError, match=rf"CIFAR-{classes} is not in .*data\.folder.*download"):
        datasets.load_cifar(classes, tmp_path)


# --- images of one's own --------------------------------------------------------------------------


def image_folder(folder, *, parts=("train", "test"), classes=("cat", "dog"), num=6):
    for part in parts:
        for value, name in enumerate(classes):
            place = folder / part / name if part else folder / name
            place.mkdir(parents=True)
            for i in range(num):
                Image.new("RGB", (20, 12), (100 * value, 10 * i, 50)).save(place / f"{i}.png")


def test_an_image_folder_is_scaled_cut_and_split(tmp_path):
    image_folder(tmp_path / "pets")
    request = Request(folder=str(tmp_path / "pets"), image_size=8)
    description = prepare("image_folder", request=request, seed=0, target=tmp_path / "out")
    assert (description["input_shape"], description["num_classes"]) == ([3, 8, 8], 2)
    assert description["sizes"] == {"train": 10, "probe": 1, "val": 1, "test": 12}
    splits = open_splits(tmp_path / "out")
    red = (splits.test.inputs[:, 0].mean(dim=(1, 2)) + 1) / 2 * 255
    assert torch.allclose(red, 100.0 * splits.test.targets, atol=1.0)


def test_an_image_folder_without_a_test_part_is_split_four_ways(tmp_path):
    image_folder(tmp_path / "pets", parts=("",), num=20)
    request = Request(folder=str(tmp_path / "pets"), image_size=4)
    description = prepare("image_folder", request=request, seed=0, target=tmp_path / "out")
    assert sum(description["sizes"].values()) == 40


def test_image_folders_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(DataNotFoundError, match="is no folder"):
        datasets.load_image_folder(tmp_path / "nowhere", size=8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataNotFoundError, match="no images in class folders"):
        datasets.load_image_folder(tmp_path / "empty", size=8)
    image_folder(tmp_path / "a", parts=("train",))
    image_folder(tmp_path / "a", parts=("test",), classes=("cat", "fox"))
    with pytest.raises(UserError, match="classes cat, fox, train/ has cat, dog"):
        datasets.load_image_folder(tmp_path / "a", size=8)
    (tmp_path / "a" / "train" / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"0\.png cannot be read as an image"):
        datasets.load_image_folder(tmp_path / "a", size=8)


# --- texts ----------------------------------------------------------------------------------------


def numbered_text(num):
    """A text in which every token is its own place."""
    return Tokens(tokens=np.arange(num, dtype=np.uint32), vocab=num)


@pytest.mark.parametrize(("num", "context"), [(2000, 16), (1003, 7), (5000, 64)])
def test_spans_of_a_text_are_contiguous_disjoint_and_apart(num, context):
    arrays = split_tokens(numbered_text(num), context=context, seed=3, limits={})
    spans = []
    for part in TEXT_SHARES:
        inputs, targets = arrays[f"{part}_inputs"], arrays[f"{part}_targets"]
        assert inputs.shape == targets.shape == (len(inputs), context)
        assert np.array_equal(targets, inputs + 1)  # the token after each
        starts = np.sort(inputs[:, 0])
        assert (np.diff(starts) == context).all()  # contiguous, without overlap
        spans.append((int(inputs.min()), int(targets.max())))
    assert all(later[0] - earlier[1] >= context - 1 for earlier, later in itertools.pairwise(spans))
    sizes = [len(arrays[f"{part}_targets"]) * context / num for part in TEXT_SHARES]
    assert sizes == pytest.approx(list(TEXT_SHARES.values()), abs=2.5 * context / num)


def test_training_sequences_are_in_a_fixed_random_order():
    text = numbered_text(4000)
    one, again, other = (split_tokens(text, context=8, seed=s, limits={})["train_inputs"] for s in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, np.sort(one, axis=0))
    short = split_tokens(text, context=8, seed=1, limits={"train": 50, "val": 3})
    assert np.array_equal(short["train_inputs"], one[:50])
    assert len(short["val_targets"]) == 3


def test_a_text_file_becomes_sequences_of_its_characters(tmp_path):
    text = "how much wood would a woodchuck chuck? " * 60 + "\u20ac"
    (tmp_path / "wood.txt").write_text(text, encoding="utf-8")
    request = Request(folder=str(tmp_path / "wood.txt"), context=12)
    description = prepare("text", request=request, seed=0, target=tmp_path / "out")
    assert (description["kind"], description["input_shape"]) == ("tokens", [12])
    alphabet = description["alphabet"]
    assert alphabet == "".join(sorted(set(text)))
    assert description["num_classes"] == len(alphabet)
    splits = open_splits(tmp_path / "out")
    assert splits.train.inputs.dtype == torch.int64
    for row in splits.val.inputs.tolist():
        assert "".join(alphabet[t] for t in row) in text


def test_tokens_are_mapped_from_a_binary_file(tmp_path):
    tokens = (np.arange(3000) * 7 % 1000).astype("<u2")
    tokens.tofile(tmp_path / "tokens.bin")
    found = datasets.load_text(tmp_path / "tokens.bin")
    assert isinstance(found.tokens, np.memmap)
    assert np.array_equal(found.tokens, tokens)
    assert found.vocab == 1000


@pytest.mark.parametrize(
    ("name", "content", "error", "text"),
    [
        ("a.txt", b"\xff\xfe\xfa", UserError, "no text in UTF-8"),
        ("a.txt", b"", UserError, "is empty"),
        ("a.bin", b"abc", UserError, "has 3 bytes"),
        ("a.bin", b"", UserError, "has 0 bytes"),
        ("a.csv", b"1,2", UserError, r"cannot read \.csv"),
        ("a", b"x", UserError, "a file without an ending"),
        (None, None, DataNotFoundError, "is no file"),
    ],
)
def test_texts_that_cannot_be_read_are_refused(name, content, error, text, tmp_path):
    path = tmp_path / (name or "nothing.txt")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=text):
        datasets.load_text(path)


def test_a_text_too_short_for_its_parts_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("abc" * 50)
    with pytest.raises(UserError, match=r"150 tokens has no sequence of 64 for its probe part: .*data\.context"):
        prepare("text", request=Request(folder=str(tmp_path / "a.txt")), seed=0, target=tmp_path / "out")


# --- data from code -------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module with a function ``make``; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(Path.cwd())])
    made = []

    def write(body):
        name = f"own_data_{len(made)}_{abs(hash(tmp_path))}"
        made.append(name)
        (tmp_path / f"{name}.py").write_text(f"import numpy as np\nimport torch\ndef make():\n    return {body}\n")
        return f"{name}:make"

    yield write
    for name in made:
        sys.modules.pop(name, None)


def test_arrays_and_tensors_from_code_are_used_as_they_are(module, tmp_path):
    name = module("{'inputs': torch.arange(200.0).reshape(50, 4), 'targets': torch.arange(50) % 5}")
    description = prepare("python", request=Request(folder=name), seed=0, target=tmp_path / "out")
    assert (description["input_shape"], description["num_classes"], description["scale"]) == ([4], 5, None)
    splits = open_splits(tmp_path / "out")
    parts = (splits.train, splits.probe, splits.val, splits.test)
    assert sorted(torch.cat([p.inputs[:, 0] for p in parts]).tolist()) == [4.0 * i for i in range(50)]


def test_tokens_from_code_are_a_text(module, tmp_path):
    name = module("{'tokens': np.arange(4000) % 9, 'vocab': 12}")
    request = Request(folder=name, context=10)
    description = prepare("python", request=request, seed=0, target=tmp_path / "out")
    assert (description["kind"], description["num_classes"]) == ("tokens", 12)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("[1, 2]", "returned a list"),
        ("{'inputs': np.zeros((3, 2))}", "as many targets"),
        ("{'inputs': np.zeros((3, 2)), 'targets': np.zeros(4, int)}", "as many targets"),
        ("{'inputs': np.zeros((0, 2)), 'targets': np.zeros(0, int)}", "as many targets"),
        ("{'inputs': np.zeros((3, 2)), 'targets': np.zeros(3, int), 'labels': 1}", "'labels': allowed are inputs"),
        (
            "{'inputs': np.zeros((3, 2)), 'targets': np.zeros(3, int), 'test_inputs': np.zeros((1, 2))}",
            "one of test_inputs and test_targets",
        ),
        (
            "{k: np.zeros((3, 2) if 'in' in k else 3, int) for k in ('inputs', 'targets', 'test_targets')} "
            "| {'test_inputs': np.zeros((3, 5))}",
            "test inputs of",
        ),
        (
            "{k: np.zeros((3, 2) if 'in' in k else 3, int) for k in ('inputs', 'targets', 'test_inputs')} "
            "| {'test_targets': np.array([0, 1, 2])}",
            "test targets up to 2",
        ),
        ("{'inputs': np.zeros((3, 2)), 'targets': np.array([.1, .2, .3])}", "classes from 0 on, got float64"),
        ("{'inputs': np.zeros((3, 2)), 'targets': np.array([0, -100, 1])}", "classes from 0 on, got int64 from -100"),
        ("{'inputs': [[1], [1, 2]], 'targets': np.zeros(2, int)}", "no array"),
        ("{'inputs': np.array(['a', 'b']), 'targets': np.zeros(2, int)}", "as numbers"),
        ("{'inputs': np.zeros((3, 2)), 'targets': np.zeros(3, int), 'scale': 0}", "scale 0"),
        ("{'tokens': np.arange(5), 'vocab': 'x'}", "vocab 'x'"),
        ("{'tokens': np.zeros(5)}", "tokens as whole numbers"),
        ("{'tokens': np.arange(5), 'vocab': 3}", r"from 0 to 4: they must be in \[0, 3\)"),
    ],
)
def test_data_from_code_that_has_another_form_is_refused(module, body, text):
    with pytest.raises(UserError, match=text):
        datasets.load_from_code(module(body))


def test_tensors_with_gradients_and_in_half_precision_are_taken(module):
    name = module("{'inputs': torch.ones(20, 3, requires_grad=True).bfloat16(), 'targets': torch.arange(20) % 2}")
    assert datasets.load_from_code(name).images.dtype == np.float32


def test_too_few_samples_for_every_part_are_refused(module, tmp_path):
    name = module("{'inputs': np.zeros((3, 2)), 'targets': np.zeros(3, int)}")
    with pytest.raises(UserError, match="3 samples leave none for the"):
        prepare("python", request=Request(folder=name), seed=0, target=tmp_path)


@pytest.mark.parametrize("content", [b"junk", None])
def test_a_re_encoded_copy_that_is_none_is_refused(tmp_path, content):
    if content is None:
        np.savez(tmp_path / "cifar10_jpeg.npz", other=np.zeros(3))
    else:
        (tmp_path / "cifar10_jpeg.npz").write_bytes(content)
    with pytest.raises(DataNotFoundError, match="is not the re-encoded CIFAR-10"):
        datasets.load_cifar(10, tmp_path)


@pytest.mark.parametrize(
    "name", [None, "justamodule", "no_such_module_anywhere:make", "json:no_such_function", ":f", "json:__name__"]
)
def test_functions_that_do_not_exist_are_refused(name):
    with pytest.raises(UserError, match=r"names no function|no such function"):
        datasets.load_from_code(name)
