"""The samples of a probe: counted, numbered, taken piece by piece, spread over ranks."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from torch import Tensor

from growth_service.errors import UserError
from growth_service.probing.candidates import num_inputs, slice_samples

Numbered = Iterable[tuple[int, Any]]
"""Batches with the index of their first sample."""


class Counted(NamedTuple):
    """Batches, and how many samples they hold."""

    batches: Sequence[Any] | Iterable[Any]
    sizes: list[int]
    first: Any

    @property
    def num(self) -> int:
        """Samples over all batches."""
        return sum(self.sizes)

    def items(self) -> Iterator[tuple[int, Any]]:
        """(index of the first sample, batch) of each batch."""
        return zip(itertools.accumulate(self.sizes, initial=0), self.batches, strict=False)


def counted(batches: Iterable[Any], *, what: str, need: str, labelled: bool) -> Counted:
    """Count the samples of re-iterable batches: a loader without a list behind it is run through once.

    Args:
        batches: (inputs, targets) pairs, or inputs alone.
        what: Name of the argument, for messages.
        need: What to pass, for the message where there is no sample.
        labelled: Whether each batch must be a pair.

    Raises:
        UserError: If there is no sample, or a batch has another structure.
    """
    if not isinstance(batches, Iterable):
        raise UserError(f"{what} is a {type(batches).__name__}: pass something that can be iterated")
    listed = list(batches) if isinstance(batches, Iterator) else batches  # an iterator can be used only once
    sizes, first = [], None
    for batch in listed:
        first = batch if first is None else first
        sizes.append(_size(batch, what=what, labelled=labelled))
    if not sum(sizes):
        raise UserError(f"{what} is empty: {need}")
    return Counted(listed, sizes, first)


def _size(batch: Any, *, what: str, labelled: bool) -> int:
    if labelled:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            found = f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
            raise UserError(f"each of {what} must be a pair (inputs, targets), got a {found}")
        batch = batch[1]
    elif not isinstance(batch, Tensor | Mapping):
        raise UserError(f"each of {what} must be inputs alone (a tensor or a mapping), got a {type(batch).__name__}")
    try:
        return num_inputs(batch)
    except TypeError as error:
        raise UserError(f"a batch of {what} has no length: {error}") from error


class Summable(Protocol):
    """Sums over samples that may be added."""

    @property
    def num_samples(self) -> int:
        """Samples in it."""

    def plus(self, other: Self, /) -> Self:
        """Sums over both."""


Total = TypeVar("Total", bound=Summable)


def in_lanes(items: Numbered, lanes: int) -> list[Numbered]:
    """Every ``lanes``-th batch in a lane of its own; one lane keeps streaming."""
    if lanes == 1:
        return [items]
    listed = list(items)
    return [listed[i::lanes] for i in range(lanes)]


def added_up(parts: list[Total], *, num_samples: int) -> Total:
    """The sum of what lanes found, in their order; lanes without a batch have nothing to add.

    Raises:
        UserError: If they found other than ``num_samples`` samples.
    """
    found = [part for part in parts if part.num_samples]
    seen = sum(part.num_samples for part in found)
    if seen != num_samples:
        raise UserError(
            f"batches gave {num_samples} samples when they were counted and {seen} when they were used: pass a "
            "list, or a loader that gives the same number every time"
        )
    total = found[0]
    for part in found[1:]:
        total = total.plus(part)
    return total


class Taker:
    """Takes labelled samples from batches piece by piece, each exactly once: a shuffling loader is read once."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._rest = iter(batches)
        self._left: tuple[Any, Any] | None = None

    def take(self, num: int) -> Iterator[tuple[int, Any]]:
        """The next ``num`` samples in batches, numbered from 0 on."""
        done = 0
        while done < num:
            batch = self._left if self._left is not None else next(self._rest, None)
            if batch is None:  # fewer than were counted: whoever adds them up says so
                return
            (inputs, targets), self._left = batch, None
            size = len(targets)
            if size > num - done:
                cut = num - done
                self._left = slice_samples(inputs, cut, size), targets[cut:]
                inputs, targets, size = slice_samples(inputs, 0, cut), targets[:cut], cut
            yield done, (inputs, targets)
            done += size
