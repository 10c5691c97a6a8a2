"""Sums over samples from which scores and certificates follow, in one pass over the batches.

One forward and one data-only backward of the frozen network give the gradients of all streams;
candidates are then applied to the streams. What is kept adds up over batches, so batches may be
spread over ranks and combined in a fixed order, and memory does not grow with the samples. Which
samples enter what is a function of their index alone, so no result depends on how they are batched.

Shape legend: B = samples, D = rows of a projection, J = features (new ones, then existing ones
that are taken off), P = positions.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from growth_service.blocks import Block, stream_positions
from growth_service.blocks.projections import (
    add_cross_gradient,
    patches,
    projection_shape,
    second_moment,
    shares_features,
)
from growth_service.core.score import FloatArray, GradientMoments
from growth_service.errors import NotFiniteError, UserError
from growth_service.models.sites import blocks_of
from growth_service.probing.candidates import (
    Batch,
    Candidate,
    Loss,
    Reduction,
    Taps,
    beside_of,
    evaluating,
    is_projected,
    run_model,
    sum_loss,
    untouched,
)
from growth_service.probing.jacobian import ParameterTangent
from growth_service.probing.sketch import Sketch

Numbered = Iterable[tuple[int, Any]]
"""Batches with the index of their first sample."""
ROWS_PER_FEATURE = 10
"""Positions per feature that enter a second moment: it is only a preconditioner, and its error is measured."""
POSITIONS_PER_SAMPLE = 4
COVARIANCE_SAMPLES = 512
PRECISE_SAMPLES = 4096
"""Samples whose cross-gradients are added up in the network's own precision before they join a double sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Thinning:
    """Which samples and positions enter a second moment, fixed by counts alone before any gradient."""

    every: int = 1
    """Every how many samples one enters."""
    positions: int | None = None
    """Positions taken of such a sample; None: all."""


def thinning(*, num_samples: int, num_positions: int, num_features: int) -> Thinning:
    """Enough positions for a second moment: 10 a feature, at least 4 of a sample where it has them."""
    wanted = ROWS_PER_FEATURE * num_features
    taken = max(min(POSITIONS_PER_SAMPLE, num_positions), -(-wanted // num_samples))
    return Thinning(
        every=max(1, round(num_samples * min(taken, num_positions) / wanted)),
        positions=taken if taken < num_positions else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteSums:
    """Sums of one candidate over samples."""

    half_a: FloatArray
    """Sum of phi phi^T over ``kept_a`` samples, the other half: over those in between. ``[J, J]`` or ``[D, J, J]``."""
    half_b: FloatArray
    kept_a: int
    kept_b: int
    cross_DJ: FloatArray
    """Sum of the cross-gradients G_i (zeros where no labels were used)."""
    stream_sq: float
    """Sum of ||z_i||^2 of the stream written to, over the same samples as the halves."""
    streams: tuple[Tensor, ...] = ()
    """Streams of the kept samples, for a block whose second moment is only ever applied."""

    @property
    def sigma(self) -> FloatArray:
        """Second moment of the features, summed over positions, averaged over samples."""
        return (self.half_a + self.half_b) / max(self.kept_a + self.kept_b, 1)

    @property
    def stream_norm(self) -> float:
        """Root mean square over samples of ||z||."""
        return math.sqrt(self.stream_sq / max(self.kept_a + self.kept_b, 1))

    def plus(self, other: "SiteSums") -> "SiteSums":
        """Sums over both."""
        return SiteSums(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Sums over samples for all candidates at once, and of the network's own blocks."""

    num_samples: int
    loss_sum: float
    sites: list[SiteSums]
    block_ratio_sq: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Per existing block: sums of ||h(z)||^2 and ||z||^2, for the size of an ordinary step."""

    def plus(self, other: "Sums") -> "Sums":
        """Sums over both."""
        ratios = dict(self.block_ratio_sq)
        for path, (moved, stream) in other.block_ratio_sq.items():
            before = ratios.get(path, (0.0, 0.0))
            ratios[path] = (before[0] + moved, before[1] + stream)
        return Sums(
            num_samples=self.num_samples + other.num_samples,
            loss_sum=self.loss_sum + other.loss_sum,
            sites=[a.plus(b) for a, b in zip(self.sites, other.sites, strict=True)],
            block_ratio_sq=ratios,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteRows:
    """One row a chunk of held-out samples, for one candidate."""

    rows_NM: FloatArray
    """Sums of whitened cross-gradients over each chunk, sketched where they are long."""
    along_N: FloatArray
    """Sums of their inner products with the whitened training cross-gradient (exact, never sketched)."""
    cross_DJ: FloatArray
    """Sum of all cross-gradients, exact."""
    covariance: GradientMoments
    """Of the activation gradients (summed over positions) of about 512 samples."""
    gradient_sq: float
    """Sum of ||g_i||^2."""
    gradient_max: float
    """Largest ||g_i||: AG_max."""

    def plus(self, other: "SiteRows") -> "SiteRows":
        """Sums over both parts of the samples; the largest of the largest."""
        return SiteRows(
            rows_NM=self.rows_NM + other.rows_NM,
            along_N=self.along_N + other.along_N,
            cross_DJ=self.cross_DJ + other.cross_DJ,
            covariance=self.covariance.plus(other.covariance),
            gradient_sq=self.gradient_sq + other.gradient_sq,
            gradient_max=max(self.gradient_max, other.gradient_max),
        )

    def then(self, other: "SiteRows") -> "SiteRows":
        """These rows, then those of further samples."""
        both = replace(self, rows_NM=np.zeros_like(other.rows_NM), along_N=np.zeros_like(other.along_N)).plus(other)
        return replace(
            both,
            rows_NM=np.concatenate([self.rows_NM, other.rows_NM]),
            along_N=np.concatenate([self.along_N, other.along_N]),
        )

    def merged(self) -> "SiteRows":
        """Neighbouring rows added up: half as many, each over twice the samples."""
        starts = np.arange(0, len(self.along_N), 2)
        return replace(
            self,
            rows_NM=np.add.reduceat(self.rows_NM, starts, axis=0),
            along_N=np.add.reduceat(self.along_N, starts),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of all candidates for the same chunks."""

    num_samples: int
    loss_sum: float
    sites: list[SiteRows]

    def plus(self, other: "Rows") -> "Rows":
        """Sums over both parts of the samples."""
        return Rows(
            num_samples=self.num_samples + other.num_samples,
            loss_sum=self.loss_sum + other.loss_sum,
            sites=[a.plus(b) for a, b in zip(self.sites, other.sites, strict=True)],
        )

    def then(self, other: "Rows") -> "Rows":
        """These rows, then those of further samples."""
        return Rows(
            num_samples=self.num_samples + other.num_samples,
            loss_sum=self.loss_sum + other.loss_sum,
            sites=[a.then(b) for a, b in zip(self.sites, other.sites, strict=True)],
        )

    def merged(self) -> "Rows":
        """Neighbouring rows of each candidate added up."""
        return replace(self, sites=[s.merged() for s in self.sites])


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """How cross-gradients of one candidate are whitened, and the training direction in that frame."""

    root: FloatArray | None
    """``[J, R]`` or ``[D, J, R]``; None: rows are left as they are, and whitened when they meet."""
    along_DJ: FloatArray
    """A with <A, G> = <G_train Q, G Q>."""


Progress = Callable[[int], None]
"""Told how many samples were just done."""


class Pass:
    """One pass over batches: the frozen network, its taps, and the candidates on its streams.

    Args:
        model: The network.
        candidates: On its streams.
        loss: Of outputs and targets; None: inputs alone, no gradient.
        reduction: What the loss does over samples.
        progress: Told after each batch.
        sizes_every: Measure ||h(z)|| / ||z|| of the network's own blocks on every so many samples. None: not.
    """

    def __init__(
        self,
        model: nn.Module,
        candidates: list[Candidate],
        *,
        loss: Loss | None,
        reduction: Reduction = "sum",
        progress: Progress | None = None,
        sizes_every: int | None = None,
    ) -> None:
        self.model, self.candidates, self._loss, self._reduction = model, candidates, loss, reduction
        self._paths = list(dict.fromkeys(c.path for c in candidates))
        self._beside = {c.beside: beside_of(model, c) for c in candidates if c.beside is not None}
        self._listened = tuple(
            dict.fromkeys([*self._beside, *(f"{c.shared}.project" for c in candidates if c.shared is not None)])
        )
        self._progress, self._sizes_every, self._first = progress, sizes_every, 0
        self.ratios: dict[str, tuple[float, float]] = {}
        self.loss_sum = 0.0
        self.num_samples = 0

    def batches(self, items: Numbered) -> Iterator[tuple[int, int, list["Seen"]]]:
        """(index of the first sample, samples, what each candidate sees) of each batch."""
        taps = Taps(self.model, self._paths, with_gradient=self._loss is not None, beside=self._listened)
        blocks = [c.block for c in self.candidates]
        looking = untouched(self.model, with_gradient=self._loss is not None)
        with looking, evaluating(blocks), taps, self._sizes_of_own_blocks():
            for first, batch in items:
                taps.clear()
                self._first = first
                num, gradients = self._forward_backward(batch, taps)
                with torch.no_grad():
                    self._note_steps(taps)
                    yield first, num, [self._see(c, taps, gradients) for c in self.candidates]
                self.num_samples += num
                if self._progress is not None:
                    self._progress(num)

    def _forward_backward(self, batch: Any, taps: Taps) -> tuple[int, dict[str, Tensor]]:
        if self._loss is None:
            run_model(self.model, batch)
            taps.check()
            return taps.stream[self._paths[0]].shape[0], {}
        inputs, targets = batch
        outputs = run_model(self.model, inputs)
        taps.check()
        total = sum_loss(self._loss, outputs, targets, reduction=self._reduction)
        value = float(total.detach().double())
        if not math.isfinite(value):
            raise NotFiniteError(
                f"the loss of a probe batch is {value}: the network diverged, or its inputs are not finite"
            )
        self.loss_sum += value
        return len(targets), stream_gradients(total, taps, self._paths)

    def _see(self, candidate: Candidate, taps: Taps, gradients: dict[str, Tensor]) -> "Seen":
        block, z = candidate.block, taps.stream[candidate.path].detach()
        work = next(block.parameters()).dtype
        source = (z if candidate.kind == "depth" else taps.read[candidate.path]).to(work)
        g = gradients.get(candidate.path)
        g = None if g is None else g.to(work)
        if not is_projected(block):
            return Seen(parts=[], g=g, z=z, source=source, tangent=ParameterTangent(block))
        own = taps.read[f"{candidate.shared}.project"] if candidate.shared else block.features(source)
        parts: list[tuple[Any, Tensor]] = [(block.project, own.to(work))]
        if candidate.beside is not None:
            parts.append((self._beside[candidate.beside], taps.read[candidate.beside].to(work)))
        return Seen(parts=parts, g=g, z=z, source=source)

    @contextmanager
    def _sizes_of_own_blocks(self) -> Iterator[None]:
        """Measure ||h(z)|| / ||z|| of the network's own blocks."""
        own = blocks_of(self.model) if self._sizes_every else {}
        handles = [m.register_forward_hook(self._ratio_hook(path)) for path, m in own.items()]
        self._between_sites = bool(self._sizes_every) and not handles
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _ratio_hook(self, path: str) -> Callable[[Block, tuple[Tensor, ...], Tensor], None]:
        def hook(_module: Block, args: tuple[Tensor, ...], delta: Tensor) -> None:
            self._add_ratio(path, delta.detach(), args[0].detach())

        return hook

    def _note_steps(self, taps: Taps) -> None:
        """Without blocks of our own: what lies between neighbouring sites of equal shape moved the stream."""
        if not self._between_sites:
            return
        for before, after in zip(self._paths, self._paths[1:], strict=False):
            z, moved = taps.stream[before].detach(), taps.stream[after].detach()
            if z.shape == moved.shape:
                self._add_ratio(after, moved - z, z)

    def _add_ratio(self, path: str, moved: Tensor, z: Tensor) -> None:
        assert self._sizes_every is not None
        kept = slice(-self._first % self._sizes_every, None, self._sizes_every)
        if kept.start < len(z):
            before = self.ratios.get(path, (0.0, 0.0))
            self.ratios[path] = (before[0] + square_sum(moved[kept]), before[1] + square_sum(z[kept]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What one candidate sees of one batch."""

    parts: list[tuple[Any, Tensor]]
    """(projection, features) of the candidate, then of the existing map that is taken off."""
    g: Tensor | None
    """Gradient of the loss with respect to the stream; None without labels."""
    z: Tensor
    """The stream written to."""
    source: Tensor
    """What the candidate reads: the stream, or what an existing block reads."""
    tangent: ParameterTangent | None = None
    """Of a block that is no zero projection of features; it has one row, and no parts."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows D and joint features J."""
        if self.tangent is not None:
            return 1, self.tangent.size
        shapes = [projection_shape(project) for project, _ in self.parts]
        return shapes[0][0], sum(k for _, k in shapes)

    @property
    def shares_features(self) -> bool:
        """Whether there is one second moment for all rows."""
        return self.tangent is None and shares_features(self.parts[0][0])

    @property
    def num_positions(self) -> int:
        """Positions of the stream."""
        return stream_positions(self.z).shape[2]

    def add_cross(self, start: int, stop: int, *, to: Tensor) -> None:
        """Add the cross-gradients of some samples to ``to`` ``[D, J]``."""
        assert self.g is not None
        g = self.g[start:stop]
        if self.tangent is not None:
            to.add_(self.tangent.pull_back(self.source[start:stop], g)[None, :])
            return
        column = 0
        for project, phi in self.parts:
            size = projection_shape(project)[1]
            add_cross_gradient(project, g, phi[start:stop], to=to[:, column : column + size])
            column += size

    def add_moment(self, kept: slice, index: Tensor, positions: int | None, *, to: Tensor) -> None:
        """Add phi phi^T over the samples ``kept``, at some positions of each, to ``to`` ``[J, J]`` or ``[D, J, J]``."""
        project, phi = self.parts[0]
        if not shares_features(project):
            to.add_(second_moment(project, phi[kept]))
            return
        found = [patches(project, phi[kept]) for project, phi in self.parts]
        rows_BPJ = found[0] if len(found) == 1 else torch.cat(found, dim=2)
        total = rows_BPJ.shape[1]
        if positions is not None:
            where_BQ = _some_positions(index, num=positions, total=total).to(rows_BPJ.device)
            rows_BPJ = rows_BPJ.gather(1, where_BQ[:, :, None].expand(-1, -1, rows_BPJ.shape[2]))
        flat_NJ = rows_BPJ.reshape(-1, rows_BPJ.shape[2])
        to.addmm_(flat_NJ.T, flat_NJ, alpha=total / rows_BPJ.shape[1])


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
        if not totals:
            totals = [SiteTotal(s, num_samples=num_samples, exact=exact_moments) for s in seen]
        for total, s in zip(totals, seen, strict=True):
            total.add(s, first=first, num=num)
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
        shape = (0, 0) if seen.tangent else (j, j) if seen.shares_features else (d, j, j)
        like = seen.source
        self._halves = [_DoubleSum(shape, like), _DoubleSum(shape, like)]
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
            else:
                seen.add_moment(kept, index, self._thin.positions, to=self._halves[parity].working(len(index)))
        if -first % every < num:
            self._stream_sq += square_sum(seen.z[-first % every :: every])
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
        """The whole sum."""
        self._settle()
        assert self._double is not None
        return self._double


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
        if not totals:
            totals = [
                _SiteChunks(s, frame, num_chunks=num_chunks, chunk_size=chunk_size, every=every, seed=seed)
                for s, frame in zip(seen, frames, strict=True)
            ]
        for total, s in zip(totals, seen, strict=True):
            total.add(s, first=first, num=num)
    return Rows(num_samples=passing.num_samples, loss_sum=passing.loss_sum, sites=[t.finish() for t in totals])


class _SiteChunks:
    """Rows of one candidate: the chunk at work is summed in full, then whitened and sketched once."""

    def __init__(self, seen: Seen, frame: Frame, *, num_chunks: int, chunk_size: int, every: int, seed: int) -> None:
        assert seen.g is not None
        d, j = seen.shape
        self._sketch = Sketch(frame.root, shape=(d, j), seed=seed, like=seen.g)
        self._along = torch.from_numpy(np.ascontiguousarray(frame.along_DJ)).to(seen.g).flatten()
        self._rows = torch.zeros(num_chunks, self._sketch.numbers, dtype=seen.g.dtype, device=seen.g.device)
        self._along_N = torch.zeros(num_chunks, dtype=torch.float64, device=seen.g.device)
        self._total = torch.zeros(d, j, dtype=torch.float64, device=seen.g.device)
        self._chunk_size, self._every = chunk_size, every
        self._work = torch.zeros(d, j, dtype=seen.g.dtype, device=seen.g.device)
        self._open: int | None = None
        self._covariance: GradientMoments | None = None
        self._sizes = GradientSizes()

    def add(self, seen: Seen, *, first: int, num: int) -> None:
        """One batch, cut where a chunk ends."""
        assert seen.g is not None
        start = 0
        while start < num:
            chunk = (first + start) // self._chunk_size
            stop = min(num, (chunk + 1) * self._chunk_size - first)
            if self._open != chunk:
                self._close()
                self._open = chunk
            seen.add_cross(start, stop, to=self._work)
            start = stop
        self._sizes.add(seen.g)
        kept = -first % self._every
        if kept < num:
            g_ND = stream_positions(seen.g[kept :: self._every]).sum(dim=2)
            moments = GradientMoments.of(to_array(g_ND))
            self._covariance = moments if self._covariance is None else self._covariance.plus(moments)

    def _close(self) -> None:
        if self._open is None:
            return
        self._rows[self._open] += self._sketch(self._work)
        self._along_N[self._open] += torch.dot(self._along, self._work.flatten()).double()
        self._total += self._work
        self._work.zero_()
        self._open = None

    def finish(self) -> SiteRows:
        """What was added up."""
        self._close()
        return SiteRows(
            rows_NM=to_array(self._rows),
            along_N=to_array(self._along_N),
            cross_DJ=to_array(self._total),
            covariance=self._covariance or GradientMoments.of(np.zeros((0, self._total.shape[0]))),
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


def stream_gradients(total: Tensor, taps: Taps, paths: list[str]) -> dict[str, Tensor]:
    """Gradients of a summed loss with respect to the tapped streams; zeros where it does not depend on one."""
    if not total.requires_grad:
        return {p: torch.zeros_like(taps.stream[p]) for p in paths}
    grads = torch.autograd.grad(total, [taps.stream[p] for p in paths], allow_unused=True)
    return {p: torch.zeros_like(taps.stream[p]) if g is None else g for p, g in zip(paths, grads, strict=True)}


def square_sum(values: Tensor) -> float:
    """Sum of squares."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    return float(torch.linalg.vector_norm(values, dtype=dtype).double().square())


def to_array(tensor: Tensor) -> FloatArray:
    """As float64 on the host."""
    array: FloatArray = tensor.detach().to("cpu", torch.float64).numpy()
    return array


def _some_positions(index_B: Tensor, *, num: int, total: int) -> Tensor:
    """Evenly spread positions of each sample, from a start that hashes its index. ``[B, num]``."""
    start_B = (index_B * 2654435761 >> 7) % total  # Knuth's multiplicative hash
    steps_Q = torch.arange(num) * total // num
    return (start_B[:, None] + steps_Q[None, :]) % total


def check_finite(name: str, values: FloatArray) -> None:
    """Refuse sums that are not finite.

    Raises:
        UserError: Naming the place.
    """
    if not np.isfinite(values).all():
        raise UserError(
            f"features at {name!r} are not finite on these samples: inputs hold NaN or infinity, or the "
            "network diverged"
        )


__all__ = ["Batch", "Frame", "Pass", "Rows", "SiteRows", "SiteSums", "Sums", "rows_over", "sum_over"]
