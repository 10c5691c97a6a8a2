"""CIFAR-10 and CIFAR-100, through torchvision or from a folder of re-encoded images."""

import io
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from growth_service.errors import DataNotFoundError
from growth_service.training.datasets.raw import Raw

JPEG_COPY = "cifar10_jpeg.npz"
"""All images of CIFAR-10 re-encoded: ``{train,test}_jpeg`` (bytes, one image after the other), ``_offset``, ``_label``.

Results on it are comparable with each other only, never with published ones.
"""


def load_cifar(classes: Literal[10, 100], folder: Path | None) -> Raw:
    """50,000 + 10,000 images of 32x32 pixels.

    Args:
        classes: 10 or 100.
        folder: With torchvision's files, or with ``cifar10_jpeg.npz``; None: torchvision's cache, a download.

    Raises:
        DataNotFoundError: If they are nowhere; names the ways to get them.
    """
    if folder is not None and (folder / JPEG_COPY).is_file():
        if classes != 10:
            raise DataNotFoundError(
                f"{folder / JPEG_COPY} holds CIFAR-10: use data.name cifar10, or torchvision's files"
            )
        return _from_jpeg(folder / JPEG_COPY)
    import torchvision.datasets

    kind = torchvision.datasets.CIFAR10 if classes == 10 else torchvision.datasets.CIFAR100
    root = folder or Path("~/.cache/torchvision").expanduser()
    try:
        train, test = (_part(kind, root, train=part, download=folder is None) for part in (True, False))
    except (OSError, RuntimeError) as error:
        copy = f"; or a folder with {JPEG_COPY}" if classes == 10 else ""
        raise DataNotFoundError(
            f"CIFAR-{classes} is not in {root} ({error}): name a folder with {kind.base_folder} as data.folder, or "
            f"run once with network access and no data.folder, so that torchvision can download it{copy}"
        ) from error
    return Raw(*train, *test, 255.0)


def _part(kind: Any, root: Path, *, train: bool, download: bool) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    found = kind(str(root), train=train, download=download)
    images = np.ascontiguousarray(np.asarray(found.data, dtype=np.uint8).transpose(0, 3, 1, 2))
    return images, np.asarray(found.targets, dtype=np.int64)


def _from_jpeg(path: Path) -> Raw:
    try:
        return _decoded(path)
    except (KeyError, ValueError, OSError, IndexError) as error:
        raise DataNotFoundError(f"{path} is not the re-encoded CIFAR-10: {error}") from error


def _decoded(path: Path) -> Raw:
    from PIL import Image

    parts: list[Any] = []
    with np.load(path, allow_pickle=False) as arrays:
        for part in ("train", "test"):
            stream, offsets = arrays[f"{part}_jpeg"].tobytes(), arrays[f"{part}_offset"].astype(int)
            labels = arrays[f"{part}_label"].astype(np.int64)
            ends = [*offsets[1:], len(stream)]
            images = np.empty((len(labels), 3, 32, 32), dtype=np.uint8)
            for i in range(len(labels)):
                decoded = Image.open(io.BytesIO(stream[offsets[i] : ends[i]])).convert("RGB")
                images[i] = np.asarray(decoded).transpose(2, 0, 1)
            parts += [images, labels]
    train, labels, test, test_labels = parts
    return Raw(train, labels, test, test_labels, 255.0)
