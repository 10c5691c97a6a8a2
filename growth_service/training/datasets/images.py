"""Images of one's own: a folder with a folder for each class."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from growth_service.errors import DataNotFoundError, UserError
from growth_service.training.datasets.raw import Raw


def load_image_folder(folder: Path | None, *, size: int) -> Raw:
    """``train/CLASS/*`` and, if there is one, ``test/CLASS/*``; or ``CLASS/*`` alone.

    Each image is scaled so that its shorter side has ``size`` pixels, and its middle is taken.

    Raises:
        DataNotFoundError: If there is no such folder, or no image in it.
        UserError: If training and test have different classes.
    """
    if folder is None or not folder.is_dir():
        raise DataNotFoundError(
            f"data.folder {folder} is no folder: name one with train/CLASS/*.png (and test/CLASS/*)"
        )
    parts = [folder / "train", folder / "test"] if (folder / "train").is_dir() else [folder]
    found: list[Any] = []
    classes: list[str] | None = None
    for part in parts:
        if not part.is_dir():
            continue
        images, labels, names = _read(part, size)
        if classes is not None and names != classes:
            raise UserError(
                f"{part} has the classes {', '.join(names)}, train/ has {', '.join(classes)}: make them equal"
            )
        classes = names
        found += [images, labels]
    images, labels, test_images, test_labels = [*found, None, None][:4]
    return Raw(images, labels, test_images, test_labels, 255.0)


def _read(folder: Path, size: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[str]]:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import CenterCrop, Compose, Resize

    try:
        listed = ImageFolder(str(folder), transform=Compose([Resize(size), CenterCrop(size)]))
    except (FileNotFoundError, RuntimeError) as error:
        raise DataNotFoundError(f"{folder} holds no images in class folders: {error}") from error
    images = np.empty((len(listed), 3, size, size), dtype=np.uint8)
    for i in range(len(listed)):
        try:
            images[i] = np.asarray(listed[i][0].convert("RGB")).transpose(2, 0, 1)
        except OSError as error:
            raise UserError(f"{listed.samples[i][0]} cannot be read as an image: {error}") from error
    return images, np.asarray(listed.targets, dtype=np.int64), list(listed.classes)
