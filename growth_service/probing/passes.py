"""One pass over batches: the frozen network, its taps, and what each candidate sees of every batch.

One forward and one data-only backward of the frozen network give the gradients of all streams;
candidates are then applied to the streams.

Shape legend: B = samples, D = rows of a projection, J = features, P = positions.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from growth_service.blocks import Block, stream_positions
from growth_service.blocks.projections import add_cross_gradient, patches, projection_shape, shares_features
from growth_service.core.score import FloatArray
from growth_service.errors import NotFiniteError
from growth_service.models.sites import blocks_of
from growth_service.probing.candidates import (
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
from growth_service.probing.jacobian import ParameterTangent, check_residual
from growth_service.probing.samples import Numbered

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
        copying: Whether the network is known to write into its streams; where it does, it is found out.
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
        copying: bool = False,
    ) -> None:
        self.model, self.candidates, self._loss, self._reduction = model, candidates, loss, reduction
        self._paths = list(dict.fromkeys(c.path for c in candidates))
        self._beside = [list(zip(c.beside, beside_of(model, c), strict=True)) for c in candidates]
        besides = [path for c in candidates for path in c.beside]
        shared = [f"{c.shared}.{c.block.tap}" for c in candidates if c.shared is not None]
        reads = [c.reads for c in candidates if c.reads is not None]
        self._listened = tuple(dict.fromkeys([*besides, *shared, *reads]))
        self._progress, self._sizes_every, self._first = progress, sizes_every, 0
        self._between_sites = bool(sizes_every) and not blocks_of(model)
        self._reading = frozenset(c.path for c in candidates if self._between_sites or c.kind != "depth")
        self.copying = copying
        self.ratios: dict[str, tuple[float, float]] = {}
        self.loss_sum = 0.0
        self.num_samples = 0

    def batches(self, items: Numbered) -> Iterator[tuple[int, int, Iterator["Seen"]]]:
        """(index of the first sample, samples, what each candidate sees) of each batch.

        What candidates see is made one by one, as it is asked for: only one candidate's features live at a time.
        """
        taps = Taps(
            self.model,
            self._paths,
            with_gradient=self._loss is not None,
            beside=self._listened,
            reading=self._reading,
            copying=self.copying,
        )
        blocks = [c.block for c in self.candidates]
        looking = untouched(self.model, with_gradient=self._loss is not None)
        with looking, evaluating(blocks), taps, self._sizes_of_own_blocks():
            for first, batch in items:
                taps.clear()
                self._first = first
                num, gradients = self._forward_backward(batch, taps)
                with torch.no_grad():
                    self._note_steps(taps)
                    yield first, num, (self._see(i, taps, gradients) for i in range(len(self.candidates)))
                gradients.clear()
                self.num_samples += num
                if self._progress is not None:
                    self._progress(num)

    def _forward_backward(self, batch: Any, taps: Taps) -> tuple[int, dict[str, Tensor]]:
        if self._loss is None:
            self._run(batch, taps)
            return taps.stream[self._paths[0]].shape[0], {}
        inputs, targets = batch
        outputs = self._run(inputs, taps)
        total = sum_loss(self._loss, outputs, targets, reduction=self._reduction)
        value = float(total.detach().double())
        if not math.isfinite(value):
            raise NotFiniteError(
                f"the loss of a probe batch is {value}: the network diverged, or its inputs are not finite"
            )
        self.loss_sum += value
        return len(targets), stream_gradients(total, taps, self._paths)

    def _run(self, inputs: Any, taps: Taps) -> Any:
        """Outputs of a forward pass; a network that writes into its streams runs again, on copies of them."""
        ratios = dict(self.ratios)
        outputs = run_model(self.model, inputs)
        taps.check()
        if not taps.overwritten:
            return outputs
        taps.copying = self.copying = True
        self.ratios = ratios
        taps.clear()
        return run_model(self.model, inputs)

    def _see(self, index: int, taps: Taps, gradients: dict[str, Tensor]) -> "Seen":
        candidate = self.candidates[index]
        block, z = candidate.block, taps.stream[candidate.path].detach()
        work = next(block.parameters()).dtype
        source = (z if candidate.kind == "depth" else taps.read[candidate.reads or candidate.path]).to(work)
        g = gradients.get(candidate.path)
        g = None if g is None else g.to(work)
        if not is_projected(block):
            check_residual(block, source)
            return Seen(parts=[], g=g, z=z, source=source, tangent=ParameterTangent(block))
        own = (
            block.features(source) if not candidate.shared else block.features_given(source, self._own(candidate, taps))
        )
        parts: list[tuple[Any, Tensor]] = [(block.project, own.to(work))]
        parts += [(project, taps.read[path].to(work)) for path, project in self._beside[index]]
        return Seen(parts=parts, g=g, z=z, source=source)

    def _own(self, candidate: Candidate, taps: Taps) -> Tensor:
        """What the existing block with the candidate's inner weights has computed on the same stream."""
        return taps.read[f"{candidate.shared}.{candidate.block.tap}"].to(next(candidate.block.parameters()).dtype)

    @contextmanager
    def _sizes_of_own_blocks(self) -> Iterator[None]:
        """Measure ||h(z)|| / ||z|| of the network's own blocks."""
        own = blocks_of(self.model) if self._sizes_every else {}
        handles = [m.register_forward_hook(self._ratio_hook(path)) for path, m in own.items()]
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
        """Without blocks of our own: what each tapped module adds to what it reads, where shapes agree."""
        if not self._between_sites:
            return
        for path in self._paths:
            z, moved = taps.read[path], taps.stream[path].detach()
            if z.shape == moved.shape and z.is_floating_point():
                self._add_ratio(path, moved - z, z)

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

    def feature_rows(self, kept: slice, index: Tensor, positions: int | None) -> Tensor:
        """Features of the samples ``kept`` at some positions of each, one row a position. ``[N, J]``."""
        where_BQ = None
        if positions is not None:
            where_BQ = _some_positions(index, num=positions, total=self.num_positions).to(self.z.device)
        found = [patches(project, phi[kept], positions_BQ=where_BQ) for project, phi in self.parts]
        rows_BPJ = found[0] if len(found) == 1 else torch.cat(found, dim=2)
        return rows_BPJ.reshape(-1, rows_BPJ.shape[2])


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


def as_measured(tensor: Tensor) -> FloatArray:
    """On the host: single and double precision as they are (no copy), half precision as double."""
    if tensor.dtype not in (torch.float32, torch.float64):
        return to_array(tensor)
    array: FloatArray = tensor.detach().cpu().numpy()
    return array


def to_array(tensor: Tensor) -> FloatArray:
    """As float64 on the host."""
    array: FloatArray = tensor.detach().to("cpu", torch.float64).numpy()
    return array


def _some_positions(index_B: Tensor, *, num: int, total: int) -> Tensor:
    """Evenly spread positions of each sample, from a start that hashes its index. ``[B, num]``."""
    start_B = (index_B * 2654435761 >> 7) % total  # Knuth's multiplicative hash
    steps_Q = torch.arange(num) * total // num
    return (start_B[:, None] + steps_Q[None, :]) % total
