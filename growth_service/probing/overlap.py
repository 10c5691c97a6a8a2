"""Are there held-out samples that the network was trained on?"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NUMBERS = 64


def shared_samples(train: Iterable[Any], held_out: Iterable[Any]) -> int:
    """Held-out samples whose inputs are, number for number, among the training samples.

    First by 64 numbers a sample; those that agree in them are compared by all of theirs.
    """
    seen, looked = _keys(train, numbers=_NUMBERS), _keys(held_out, numbers=_NUMBERS)
    alike = np.intersect1d(seen, looked)
    if not alike.size:
        return 0
    seen = _keys(train, numbers=None)[np.isin(seen, alike)]
    looked = _keys(held_out, numbers=None)[np.isin(looked, alike)]
    return int(np.isin(looked, seen).sum())


def _keys(batches: Iterable[Any], *, numbers: int | None) -> Any:
    """One random combination of a sample's numbers; NaN, which equals nothing, where inputs are no tensors."""
    found: list[Any] = []
    for inputs, targets in batches:
        tensors = list(_tensors(inputs, num=len(targets)))
        key = torch.full((len(targets),), torch.nan, dtype=torch.float64)
        if tensors:
            key = torch.zeros(len(targets), dtype=torch.float64)
        for position, tensor in enumerate(tensors):
            flat = tensor.detach().reshape(len(tensor), -1)
            if numbers is not None:
                flat = flat[:, :: -(-flat.shape[1] // numbers)]
            weights = np.random.default_rng(position).standard_normal(flat.shape[1])
            # a product and a sum, not a matrix product, whose rounding changes with the size of the batch
            key += (flat.double().cpu() * torch.from_numpy(weights)).sum(dim=1)
        found.append(key.numpy())
    return np.concatenate(found)


def _tensors(inputs: Any, *, num: int) -> Iterator[Tensor]:
    """The tensors of a batch of inputs with one entry a sample."""
    for value in inputs.values() if isinstance(inputs, Mapping) else [inputs]:
        if isinstance(value, Tensor) and value.ndim and len(value) == num:
            yield value
