"""Fashion-MNIST, from its files, torchvision's cache or a download."""

import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from growth_service.errors import DataNotFoundError
from growth_service.training.datasets.raw import Raw

FASHION_FILES = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""Fashion-MNIST's uncompressed files and their sha256."""
FASHION_FOLDERS = (Path("/usr/share/datasets/fashion-mnist"), Path("~/.cache/torchvision/FashionMNIST/raw"))


def load_fashion_mnist(folder: Path | None) -> Raw:
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
    return Raw(train[:, None], train_labels.astype(np.int64), test[:, None], test_labels.astype(np.int64), 255.0)


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
