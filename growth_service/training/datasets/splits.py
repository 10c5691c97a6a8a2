"""Disjoint splits from a recorded seed, and the order in which training subsets grow."""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from growth_service.errors import UserError
from growth_service.training.datasets.raw import Raw, Tokens

SPLIT_SHARES = {"train": 837 / 1797, "probe": 360 / 1797, "val": 240 / 1797, "test": 360 / 1797}
"""Shares where a set has no test part of its own: about 46, 20, 14 and 20 %, exact for the digits."""
REST_SHARES = {"train": 0.8, "probe": 0.1, "val": 0.1}
"""Shares of the rest where it has one."""
TEXT_SHARES = {"train": 0.85, "probe": 0.05, "val": 0.05, "test": 0.05}
"""Contiguous spans of each stretch of a text, in this order."""
STRETCHES = 16
"""A text is cut into so many stretches, each with spans for all parts: held-out text is like that of training, where a
text changes from chapter to chapter."""


def split_samples(raw: Raw, *, seed: int, limits: dict[str, int]) -> dict[str, NDArray[Any]]:
    """Stratified, disjoint splits; every prefix of train is close to stratified too."""
    order = _stratified_order(raw.labels, seed=seed)
    images, labels = raw.images[order], raw.labels[order]
    shares = SPLIT_SHARES if raw.test_images is None else REST_SHARES
    bounds = np.cumsum([0, *(round(share * len(labels)) for share in shares.values())])
    bounds[-1] = len(labels)
    parts = {part: (images[a:b], labels[a:b]) for part, a, b in zip(shares, bounds[:-1], bounds[1:], strict=True)}
    if raw.test_images is not None and raw.test_labels is not None:
        parts["test"] = (raw.test_images, raw.test_labels)
    empty = [part for part, (_, targets) in parts.items() if not len(targets)]
    if empty:
        raise UserError(f"{len(labels)} samples leave none for the {empty[0]} part: use more")
    return _limited(parts, limits)


def split_tokens(text: Tokens, *, context: int, seed: int, limits: dict[str, int]) -> dict[str, NDArray[Any]]:
    """Sequences that do not overlap, from contiguous spans over all of the text, one sequence left out between two.

    Inputs are ``[N, context]``, targets the token after each. A neighbouring sequence would give the beginning of
    the next away, so held-out spans keep their distance. Training sequences are in the order in which subsets grow.

    Raises:
        UserError: If the text is too short for a sequence in every part.
    """
    num = (len(text.tokens) - 1) // context
    spans = _spans(num)
    rng = np.random.default_rng(seed)
    parts: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
    kind = np.uint16 if text.vocab <= np.iinfo(np.uint16).max + 1 else np.int32
    for part, first in spans.items():
        if not len(first):
            raise UserError(
                f"a text of {len(text.tokens)} tokens has no sequence of {context} for its {part} part: use a longer "
                "text or a smaller data.context"
            )
        order = rng.permutation(first)[: limits.get(part)]
        rows = order[:, None] * context + np.arange(context)
        parts[part] = (text.tokens[rows].astype(kind), text.tokens[rows + 1].astype(kind))
    return _limited(parts, limits)


def _spans(num: int) -> dict[str, NDArray[np.int64]]:
    """Numbers of the sequences of each part; the first one of every span but the very first is left out."""
    smallest = min(TEXT_SHARES.values())
    stretches = max(1, min(STRETCHES, int(num * smallest / 4)))
    edges = np.linspace(0, num, stretches + 1).astype(int)
    found: dict[str, list[NDArray[np.int64]]] = {part: [] for part in TEXT_SHARES}
    for start, stop in pairwise(edges):
        bounds = start + np.cumsum([0, *(int(share * (stop - start)) for share in TEXT_SHARES.values())])
        bounds[-1] = stop
        for part, a, b in zip(TEXT_SHARES, bounds[:-1], bounds[1:], strict=True):
            found[part].append(np.arange(a + (a > 0), b))
    return {part: np.concatenate(spans) for part, spans in found.items()}


def _limited(parts: dict[str, tuple[NDArray[Any], NDArray[Any]]], limits: dict[str, int]) -> dict[str, NDArray[Any]]:
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
