"""Are there held-out samples that the network was trained on?"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NUMBERS = 64


def shared_samples(train: Iterable[Any], held_out: Iterable[Any]) -> int:
    """Held-out samples whose inputs are, number for number, among the training samples.

    Samples are told apart by one random combination of up to 64 of their numbers, spread evenly.
    """
    seen, looked = _keys(train), _keys(held_out)
    return 0 if seen is None or looked is None else int(np.isin(looked, seen).sum())


def _keys(batches: Iterable[Any]) -> Any:
    """One number a sample; None where inputs are no tensors."""
    found: list[Any] = []
    weights: Tensor | None = None
    for inputs, _ in batches:
        first = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs
        if not isinstance(first, Tensor):
            return None
        flat = first.detach().reshape(len(first), -1)
        flat = flat[:, :: -(-flat.shape[1] // _NUMBERS)].double()
        if weights is None or len(weights) != flat.shape[1]:
            drawn = np.random.default_rng(0).standard_normal(flat.shape[1])
            weights = torch.from_numpy(drawn).to(flat.device)
        # a product and a sum, not a matrix product, whose rounding changes with the size of the batch
        found.append((flat * weights).sum(dim=1).cpu().numpy())
    return np.concatenate(found)
