"""Adding up what candidates see: second moments and cross-gradients of training samples, rows of held-out ones.

Memory does not grow with the samples: a candidate keeps its matrices, the chunk at work, and at most 32 rows
(see :mod:`growth_service.probing.sketch` for their length).

Shape legend: D = rows of a projection, J = features.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from growth_service.blocks import stream_positions
from growth_service.blocks.projections import second_moment
from growth_service.core.score import FloatArray
from growth_service.probing.passes import Pass, Seen, as_measured, square_sum, to_array
from growth_service.probing.rows import Packed, Rows, SiteRows
from growth_service.probing.samples import Numbered
from growth_service.probing.sketch import Sketch
from growth_service.probing.sums import Frame, SiteSums, Sums, Thinning, thinning

COVARIANCE_SAMPLES = 512
MAX_STREAMS = 2048
"""Samples whose streams are kept for a block that has no second moment of its own."""
ROWS_AT_ONCE = 256
"""Rows of features that wait to be multiplied together."""
PRECISE_SAMPLES = 4096
"""Samples whose cross-gradients are added up in the network's own precision before they join a double sum."""


def sum_over(passing: Pass, items: Numbered, *, num_samples: int, exact_moments: bool) -> Sums:
    """Second moments and cross-gradients of every candidate over labelled batches or a pool of inputs.

    Args:
        passing: The pass; without a loss there are no gradients, and cross-gradients are zeros.
        items: Batches with the index of their first sample.
        num_samples: Over all items of all ranks: decides what enters the second moments.
        exact_moments: Whether every sample and position enters the second moments.
    """
    totals: list[SiteTotal] = []
    for first, num, seen in passing.batches(items):
        for site, s in enumerate(seen):
            if site == len(totals):
                totals.append(SiteTotal(s, num_samples=num_samples, exact=exact_moments))
            totals[site].add(s, first=first, num=num)
        del s  # its features would live on through the next forward pass
    if not totals:
        return Sums(num_samples=0, loss_sum=0.0, sites=[])
    return Sums(
        num_samples=passing.num_samples,
        loss_sum=passing.loss_sum,
        sites=[t.sums() for t in totals],
        block_ratio_sq=passing.ratios,
    )


class SiteTotal:
    """Running sums of one candidate."""

    def __init__(self, seen: Seen, *, num_samples: int, exact: bool) -> None:
        d, j = seen.shape
        self._thin = (
            Thinning() if exact else thinning(num_samples=num_samples, num_positions=seen.num_positions, num_features=j)
        )
        if seen.tangent is not None and num_samples // self._thin.every > MAX_STREAMS:
            self._thin = replace(self._thin, every=-(-num_samples // MAX_STREAMS))
        shape = (0, 0) if seen.tangent else (j, j) if seen.shares_features else (d, j, j)
        like = seen.source
        scale = seen.num_positions / (self._thin.positions or seen.num_positions)
        self._halves = [_MomentSum(shape, like, scale=scale), _MomentSum(shape, like, scale=scale)]
        self._cross = _DoubleSum((d, j), like)
        self._kept = [0, 0]
        self._streams: list[Tensor] = []
        self._stream_sq = 0.0

    def add(self, seen: Seen, *, first: int, num: int) -> None:
        """One batch."""
        every = self._thin.every
        for parity in (0, 1):  # sample i enters half i // every % 2, where i is a multiple of every
            start = (parity * every - first) % (2 * every)
            kept = slice(start, None, 2 * every)
            if start >= num:
                continue
            index = torch.arange(first + start, first + num, 2 * every)
            self._kept[parity] += len(index)
            if seen.tangent is not None:
                self._streams.append(seen.source[kept].clone())
            elif seen.shares_features:
                self._halves[parity].add_rows(seen.feature_rows(kept, index, self._thin.positions))
            else:
                project, phi = seen.parts[0]
                self._halves[parity].working(len(index)).add_(second_moment(project, phi[kept]))
        if -first % every < num:
            self._stream_sq += square_sum(seen.source[-first % every :: every])
        if seen.g is not None:
            seen.add_cross(0, num, to=self._cross.working(num))

    def sums(self) -> SiteSums:
        """What was added up."""
        return SiteSums(
            half_a=self._halves[0].total(),
            half_b=self._halves[1].total(),
            kept_a=self._kept[0],
            kept_b=self._kept[1],
            cross_DJ=self._cross.total(),
            stream_sq=self._stream_sq,
            streams=tuple(self._streams),
        )


class _DoubleSum:
    """A sum of many terms: a few thousand samples in the network's own precision, those sums in double."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        self._work = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self._double: FloatArray | None = None
        self._pending = 0

    def working(self, num: int) -> Tensor:
        """The tensor to which the terms of ``num`` samples are added now."""
        if self._pending + num > PRECISE_SAMPLES and self._pending and self._work.dtype != torch.float64:
            self._settle()
        self._pending += num
        return self._work

    def _settle(self) -> None:
        found = to_array(self._work)
        self._double = found.copy() if self._double is None else self._double + found
        self._work.zero_()
        self._pending = 0

    def total(self) -> FloatArray:
        """The whole sum; nothing can be added any more."""
        if self._double is None:  # all of it is in the network's own precision: no second copy
            return as_measured(self._work)
        self._settle()
        self._work = self._work.new_zeros(0)
        return self._double


class _MomentSum(_DoubleSum):
    """A second moment: rows wait until there are enough for a matrix product that is worth its call."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, *, scale: float) -> None:
        super().__init__(shape, like)
        self._scale = scale
        self._waiting: list[Tensor] = []

    def add_rows(self, rows_NJ: Tensor) -> None:
        """Add the products of some rows, each counting for as many positions as it stands for."""
        self._waiting.append(rows_NJ)
        if sum(map(len, self._waiting)) >= ROWS_AT_ONCE:
            self._multiply()

    def _multiply(self) -> None:
        rows_NJ = torch.cat(self._waiting)
        self._waiting.clear()
        self.working(len(rows_NJ)).addmm_(rows_NJ.T, rows_NJ, alpha=self._scale)

    def total(self) -> FloatArray:
        """The whole sum."""
        if self._waiting:
            self._multiply()
        return super().total()


def rows_over(
    passing: Pass, items: Numbered, *, frames: list[Frame], num_samples: int, chunk_size: int, seed: int
) -> Rows:
    """Whitened cross-gradients of chunks of held-out samples, for every candidate.

    Args:
        passing: The pass.
        items: Batches with the index of their first sample.
        frames: Of each candidate.
        num_samples: Over all items of all ranks.
        chunk_size: Consecutive samples whose sum is one row.
        seed: Of sketches.
    """
    num_chunks = -(-num_samples // chunk_size)
    every = max(1, num_samples // COVARIANCE_SAMPLES)
    totals: list[_SiteChunks] = []
    for first, num, seen in passing.batches(items):
        for site, s in enumerate(seen):
            if site == len(totals):
                totals.append(
                    _SiteChunks(s, frames[site], num_chunks=num_chunks, chunk_size=chunk_size, every=every, seed=seed)
                )
            totals[site].add(s, first=first, num=num)
        del s  # its features would live on through the next forward pass
    return Rows(num_samples=passing.num_samples, loss_sum=passing.loss_sum, sites=[t.finish() for t in totals])


class _SiteChunks:
    """Rows of one candidate: the chunk at work is summed in full, then whitened and sketched once."""

    def __init__(self, seen: Seen, frame: Frame, *, num_chunks: int, chunk_size: int, every: int, seed: int) -> None:
        assert seen.g is not None
        d, j = seen.shape
        g = seen.g
        self._sketch = Sketch(frame.root, shape=(d, j), seed=seed, like=g)
        self._along = torch.from_numpy(np.ascontiguousarray(frame.along_DJ)).to(g).flatten()
        half = self._sketch.is_lossy and g.dtype != torch.float64
        wide = torch.promote_types(g.dtype, torch.float32)
        self._rows = torch.zeros(
            num_chunks, self._sketch.numbers, dtype=torch.float16 if half else wide, device=g.device
        )
        self._scale_N = torch.zeros(num_chunks, dtype=torch.float64, device=g.device) if half else None
        self._along_N = torch.zeros(num_chunks, dtype=torch.float64, device=g.device)
        self._total = torch.zeros(d, j, dtype=wide, device=g.device)
        self._like = g.new_zeros(0)
        self._work: Tensor | None = None
        self._open = 0
        self._chunk_size, self._every = chunk_size, every
        self._gradients: list[Tensor] = []
        self._sizes = GradientSizes()

    def add(self, seen: Seen, *, first: int, num: int) -> None:
        """One batch, cut where a chunk ends; samples come in rising order."""
        assert seen.g is not None
        start = 0
        while start < num:
            chunk = (first + start) // self._chunk_size
            end = (chunk + 1) * self._chunk_size - first
            if chunk != self._open:
                self._close()
            self._open = chunk
            if self._work is None:
                self._work = self._like.new_zeros(self._total.shape)
            seen.add_cross(start, min(num, end), to=self._work)
            if end <= num:
                self._close()
            start = min(num, end)
        self._sizes.add(seen.g)
        kept = -first % self._every
        if kept < num:
            self._gradients.append(stream_positions(seen.g[kept :: self._every]).sum(dim=2))

    def _close(self) -> None:
        """Turn the chunk at work into a row, and drop it: between batches no site holds one that is complete."""
        if self._work is None:
            return
        row_M = self._sketch(self._work)
        if self._scale_N is not None:
            scale = torch.linalg.vector_norm(row_M) / math.sqrt(len(row_M))
            self._scale_N[self._open] = scale
            row_M = row_M / torch.where(scale > 0, scale, 1.0)
        self._rows[self._open] = row_M
        self._along_N[self._open] = torch.dot(self._along, self._work.flatten()).double()
        self._total += self._work
        self._work = None

    def finish(self) -> SiteRows:
        """What was added up."""
        self._close()
        scale_N = None if self._scale_N is None else to_array(self._scale_N)
        return SiteRows(
            rows=Packed(numbers_NM=self._rows.cpu().numpy(), scale_N=scale_N),
            along_N=to_array(self._along_N),
            cross_DJ=as_measured(self._total),
            gradients_BD=as_measured(torch.cat(self._gradients or [self._total.new_zeros(0, len(self._total))])),
            gradient_sq=self._sizes.total,
            gradient_max=self._sizes.largest,
        )


class GradientSizes:
    """Sum of squares and largest norm of the gradients of samples."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._largest: Tensor | None = None

    def add(self, g: Tensor) -> None:
        """One batch; nothing waits for the device."""
        squares_B = torch.linalg.vector_norm(g.flatten(1), dim=1).double().square()
        self._total = squares_B.sum() if self._total is None else self._total + squares_B.sum()
        largest = squares_B.max()
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    @property
    def total(self) -> float:
        """Sum over samples of ||g_i||^2."""
        return 0.0 if self._total is None else float(self._total)

    @property
    def largest(self) -> float:
        """Largest ||g_i||."""
        return 0.0 if self._largest is None else math.sqrt(float(self._largest))
