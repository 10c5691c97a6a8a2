"""A prepared data set as tensors, and nested training subsets."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from growth_service.training.datasets import SPLIT_SHARES, subset_size

__all__ = ["Split", "Splits", "open_splits", "subset_size"]


class Split(NamedTuple):
    """Inputs ``[N, C, H, W]`` in float32 and classes ``[N]``; or tokens ``[N, T]`` and the token after each."""

    inputs: Tensor
    targets: Tensor


class Splits(NamedTuple):
    """Disjoint parts of a data set; ``train`` is in the order in which subsets grow."""

    train: Split
    probe: Split
    val: Split
    test: Split
    num_classes: int
    digest: str
    """sha256 of all arrays in order."""


def open_splits(target: Path) -> Splits:
    """Read what :func:`prepare` stored: tokens as they are, images scaled to about [-1, 1]."""
    description = json.loads((target / "data.json").read_text(encoding="utf-8"))
    with np.load(target / "data.npz", allow_pickle=False) as arrays:
        parts = {
            part: Split(_inputs(arrays[f"{part}_inputs"], description), _whole(arrays[f"{part}_targets"]))
            for part in SPLIT_SHARES
        }
    return Splits(**parts, num_classes=description["num_classes"], digest=description["digest"])


def _inputs(array: NDArray[Any], description: dict[str, Any]) -> Tensor:
    if description.get("kind") == "tokens":
        return _whole(array)
    values = torch.from_numpy(array).float()
    scale = description["scale"]
    return values if scale is None else values * (2.0 / scale) - 1.0


def _whole(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
