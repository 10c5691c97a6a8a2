"""What a loader returns: arrays as the data set has them, before any split."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Raw(NamedTuple):
    """Labelled samples. Inputs are ``[N, C, H, W]``, or of any shape that a network takes."""

    images: NDArray[Any]
    labels: NDArray[np.int64]
    test_images: NDArray[Any] | None
    test_labels: NDArray[np.int64] | None
    scale: float | None
    """Largest value, which becomes 1 (and zero -1); None: inputs are used as they are."""


class Tokens(NamedTuple):
    """One long text."""

    tokens: NDArray[Any]
    """``[N]``, unsigned; may be mapped from a file."""
    vocab: int
    alphabet: str | None = None
    """Characters in the order of their tokens, where tokens are characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a job says about where its data is and how it is cut."""

    folder: str | None = None
    """Folder or file; ``package.module:factory`` for data from code. None: the usual places."""
    context: int = 64
    """Tokens of a sequence, for texts."""
    image_size: int = 32
    """Height and width to which images of a folder are scaled and cut."""
