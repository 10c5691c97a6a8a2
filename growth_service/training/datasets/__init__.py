"""Data sets on this machine, split once from a recorded seed.

The driver prepares a data set once and writes it into the study's folder; workers read that
one file and import no loader. Nothing is downloaded unless torchvision is asked to. Knows no torch.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from growth_service.errors import UserError
from growth_service.spec import JobSpec
from growth_service.training.datasets.cifar import load_cifar
from growth_service.training.datasets.code import load_from_code
from growth_service.training.datasets.fashion import load_fashion_mnist
from growth_service.training.datasets.images import load_image_folder
from growth_service.training.datasets.raw import Raw, Request, Tokens
from growth_service.training.datasets.splits import SPLIT_SHARES, split_samples, split_tokens
from growth_service.training.datasets.text import load_text

__all__ = [
    "LOADERS",
    "SPLIT_SHARES",
    "Raw",
    "Request",
    "Tokens",
    "load_cifar",
    "load_digits",
    "load_fashion_mnist",
    "load_from_code",
    "load_image_folder",
    "load_text",
    "prepare",
    "prepare_for",
    "subset_size",
]


def load_digits() -> Raw:
    """scikit-learn's 1,797 8x8 digits, installed with the package."""
    from sklearn.datasets import load_digits as load

    found = load()
    return Raw(found.images[:, None].astype(np.uint8), found.target.astype(np.int64), None, None, 16.0)


LOADERS: dict[str, Callable[[Request], Raw | Tokens]] = {
    "digits": lambda request: load_digits(),
    "fashion_mnist": lambda request: load_fashion_mnist(_path(request)),
    "cifar10": lambda request: load_cifar(10, _path(request)),
    "cifar100": lambda request: load_cifar(100, _path(request)),
    "image_folder": lambda request: load_image_folder(_path(request), size=request.image_size),
    "text": lambda request: load_text(_path(request)),
    "python": lambda request: load_from_code(request.folder),
}
"""Loaders by the name that a job gives its data."""


def prepare(
    name: str, *, request: Request | None = None, seed: int, target: Path, limits: dict[str, int] | None = None
) -> dict[str, Any]:
    """Load, split and store a data set in ``target``, once; later calls read what is there.

    Args:
        name: A key of :data:`LOADERS`.
        request: Where it is and how it is cut; None: the usual places.
        seed: Of the splits and of the order in which training subsets grow.
        target: Folder of the study's data; gets ``data.npz`` and ``data.json``.
        limits: Most samples a split may have, by its name.

    Returns:
        The description: name, shapes, number of classes, sizes of the splits, digest.

    Raises:
        DataNotFoundError: If the data set is not on this machine.
        UserError: If the name is unknown, or the data cannot be read or split.
    """
    described = target / "data.json"
    if described.is_file():
        found: dict[str, Any] = json.loads(described.read_text(encoding="utf-8"))
        return found
    if name not in LOADERS:
        raise UserError(f"unknown data set {name!r}: use one of {', '.join(sorted(LOADERS))}")
    request = request or Request()
    raw = LOADERS[name](request)
    if isinstance(raw, Tokens):
        arrays = split_tokens(raw, context=request.context, seed=seed, limits=limits or {})
        facts = {"kind": "tokens", "num_classes": raw.vocab, "scale": None, "alphabet": raw.alphabet}
    else:
        arrays = split_samples(raw, seed=seed, limits=limits or {})
        facts = {"kind": "samples", "num_classes": int(raw.labels.max()) + 1, "scale": raw.scale}
    digest = hashlib.sha256()
    for key in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[key]).tobytes())
    description = {
        "name": name,
        "seed": seed,
        "input_shape": list(arrays["train_inputs"].shape[1:]),
        **facts,
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
    request = Request(folder=job.data.folder, context=job.data.context, image_size=job.data.image_size)
    return prepare(job.data.name, request=request, seed=job.seed, target=target, limits=limits)


def subset_size(num_train: int, share: float) -> int:
    """Samples of the nested training subset of this share; at least one."""
    return max(1, round(num_train * share))


def _path(request: Request) -> Path | None:
    return None if request.folder is None else Path(request.folder).expanduser()
