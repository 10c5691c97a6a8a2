"""Data sets on this machine, split once from a recorded seed.

The driver prepares a data set once and writes it into the study's folder; workers read that
one file and import no loader. Nothing is downloaded unless torchvision is asked to. Knows no torch.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from growth_service.errors import DataNotFoundError, UserError
from growth_service.spec import JobSpec

SPLIT_SHARES = {"train": 837 / 1797, "probe": 360 / 1797, "val": 240 / 1797, "test": 360 / 1797}
"""Shares where a set has no test part of its own: about 46, 20, 14 and 20 %, exact for the digits."""
REST_SHARES = {"train": 0.8, "probe": 0.1, "val": 0.1}
"""Shares of the rest where it has one."""

FASHION_FILES = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""Fashion-MNIST's uncompressed files and their sha256."""
FASHION_FOLDERS = (Path("/usr/share/datasets/fashion-mnist"), Path("~/.cache/torchvision/FashionMNIST/raw"))


class _Raw(NamedTuple):
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    test_images: NDArray[np.uint8] | None
    test_labels: NDArray[np.int64] | None
    scale: float


def load_digits(folder: Path | None) -> _Raw:
    """scikit-learn's 1,797 8x8 digits, installed with the package."""
    from sklearn.datasets import load_digits as load

    found = load()
    return _Raw(found.images[:, None].astype(np.uint8), found.target.astype(np.int64), None, None, 16.0)


def load_fashion_mnist(folder: Path | None) -> _Raw:
    """Fashion-MNIST from a folder of its files; without one: Debian's package, torchvision's cache, a download.

    Raises:
        DataNotFoundError: If none of these has it; names the ways to get it.
    """
    places = [folder] if folder is not None else [p.expanduser() for p in FASHION_FOLDERS]
    for place in places:
        if all(_idx_path(place, name) is not None for name in FASHION_FILES):
            arrays = {name: _read_idx(place, name) for name in FASHION_FILES}
            break
    else:
        if folder is not None:
            names = ", ".join(FASHION_FILES)
            raise DataNotFoundError(
                f"data.folder {folder} does not hold Fashion-MNIST: it needs {names} (plain or .gz)"
            )
        arrays = _download_fashion_mnist(tried=places)
    train, train_labels, test, test_labels = (arrays[name] for name in FASHION_FILES)
    return _Raw(train[:, None], train_labels.astype(np.int64), test[:, None], test_labels.astype(np.int64), 255.0)


LOADERS: dict[str, Callable[[Path | None], _Raw]] = {"digits": load_digits, "fashion_mnist": load_fashion_mnist}


def prepare(
    name: str, *, folder: str | None, seed: int, target: Path, limits: dict[str, int] | None = None
) -> dict[str, Any]:
    """Load, split and store a data set in ``target``, once; later calls read what is there.

    Args:
        name: A key of :data:`LOADERS`.
        folder: Where its files are; None: the usual places.
        seed: Of the splits and of the order in which training subsets grow.
        target: Folder of the study's data; gets ``data.npz`` and ``data.json``.
        limits: Most samples a split may have, by its name.

    Returns:
        The description: name, shapes, number of classes, sizes of the splits, digest.

    Raises:
        DataNotFoundError: If the data set is not on this machine.
        UserError: If the name is unknown.
    """
    described = target / "data.json"
    if described.is_file():
        found: dict[str, Any] = json.loads(described.read_text(encoding="utf-8"))
        return found
    if name not in LOADERS:
        raise UserError(f"unknown data set {name!r}: use one of {', '.join(sorted(LOADERS))}")
    raw = LOADERS[name](Path(folder).expanduser() if folder is not None else None)
    arrays = _split(raw, seed=seed, limits=limits or {})
    digest = hashlib.sha256()
    for key in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[key]).tobytes())
    description = {
        "name": name,
        "seed": seed,
        "input_shape": list(raw.images.shape[1:]),
        "num_classes": int(raw.labels.max()) + 1,
        "scale": raw.scale,
        "sizes": {part: len(arrays[f"{part}_targets"]) for part in SPLIT_SHARES},
        "digest": digest.hexdigest(),
    }
    target.mkdir(parents=True, exist_ok=True)
    np.savez(target / "data.npz", allow_pickle=False, **arrays)
    described.write_text(json.dumps(description, indent=1), encoding="utf-8")
    return description


def prepare_for(job: JobSpec, target: Path) -> dict[str, Any]:
    """Prepare the data set of a job, as :func:`prepare`."""
    limits = {str(part): limit for part, limit in job.data.limits.items()}
    return prepare(job.data.name, folder=job.data.folder, seed=job.seed, target=target, limits=limits)


def subset_size(num_train: int, share: float) -> int:
    """Samples of the nested training subset of this share; at least one."""
    return max(1, round(num_train * share))


def _split(raw: _Raw, *, seed: int, limits: dict[str, int]) -> dict[str, NDArray[Any]]:
    """Stratified, disjoint splits; every prefix of train is close to stratified too."""
    order = _stratified_order(raw.labels, seed=seed)
    images, labels = raw.images[order], raw.labels[order]
    shares = SPLIT_SHARES if raw.test_images is None else REST_SHARES
    bounds = np.cumsum([0, *(round(share * len(labels)) for share in shares.values())])
    bounds[-1] = len(labels)
    parts = {part: (images[a:b], labels[a:b]) for part, a, b in zip(shares, bounds[:-1], bounds[1:], strict=True)}
    if raw.test_images is not None and raw.test_labels is not None:
        parts["test"] = (raw.test_images, raw.test_labels)
    arrays: dict[str, NDArray[Any]] = {}
    for part, (inputs, targets) in parts.items():
        limit = limits.get(part, len(targets))
        arrays[f"{part}_inputs"], arrays[f"{part}_targets"] = inputs[:limit], targets[:limit]
    return arrays


def _stratified_order(labels: NDArray[np.int64], *, seed: int) -> NDArray[np.int64]:
    """A permutation in which every stretch holds the classes in about their overall shares."""
    rng = np.random.default_rng(seed)
    rank = np.empty(len(labels))
    for value in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == value))
        rank[members] = (np.arange(len(members)) + rng.random()) / len(members)
    return np.argsort(rank, kind="stable")


def _idx_path(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _read_idx(folder: Path, name: str) -> NDArray[np.uint8]:
    """One IDX file, plain or gzipped, checked against its sha256."""
    path = _idx_path(folder, name)
    assert path is not None
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataNotFoundError(f"{path} cannot be read ({error}): remove it or name another folder") from error
    if hashlib.sha256(content).hexdigest() != FASHION_FILES[name]:
        raise DataNotFoundError(
            f"{path} is not Fashion-MNIST's {name} (its sha256 differs): remove it or name another folder"
        )
    num_axes = content[3]
    shape = np.frombuffer(content, dtype=">u4", count=num_axes, offset=4).astype(int)
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * num_axes).reshape(shape).copy()


def _download_fashion_mnist(*, tried: list[Path]) -> dict[str, NDArray[np.uint8]]:
    """Let torchvision download into its cache, or say how else to get the files."""
    from torchvision.datasets import FashionMNIST

    cache = Path("~/.cache/torchvision").expanduser()
    try:
        FashionMNIST(str(cache), download=True)
        return {name: _read_idx(cache / "FashionMNIST" / "raw", name) for name in FASHION_FILES}
    except (OSError, RuntimeError) as error:
        looked = ", ".join(map(str, tried))
        raise DataNotFoundError(
            f"Fashion-MNIST is not in {looked}, and cannot be downloaded ({error}). Get it in one of three ways: "
            "apt-get install dataset-fashion-mnist; put its four IDX files into a folder and name it as data.folder; "
            "or run once with network access so that torchvision can download it"
        ) from error
