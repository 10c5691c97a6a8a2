"""All that a look at held-out samples needs, fixed before the first of them is seen; and the look itself."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from growth_service.core import certificate as cert
from growth_service.core.decisions import tolerance_nats
from growth_service.core.score import GradientMoments, covariance_diagnostic
from growth_service.errors import UserError
from growth_service.probing.candidates import Batch, Candidate, Loss, Reduction, evaluating, is_projected
from growth_service.probing.certify import Look, certify
from growth_service.probing.collect import rows_over, sum_over
from growth_service.probing.cost import Cost, cost_of, probe_flops
from growth_service.probing.defaults import Inner, default_candidates
from growth_service.probing.frames import Geometry, geometry
from growth_service.probing.overlap import shared_samples
from growth_service.probing.passes import Pass
from growth_service.probing.report import SaturationReport
from growth_service.probing.rows import Rows
from growth_service.probing.samples import Counted, added_up, counted, in_lanes
from growth_service.probing.sums import Sums, check_finite

Mapper = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
"""Applies a function to items and returns results in their order; may spread them over ranks."""
Progress = Callable[[int, int], None]
"""Told how many samples are done, and how many there are."""

R_MAX_RANGE = (0.05, 0.3)
R_MAX_WITHOUT_BLOCKS = 0.1
MAX_CHUNKS = 32
"""Rows of a certificate at most: sums over chunks of held-out samples."""
SIZE_SAMPLES = 256
"""Samples on which the size of an ordinary block's step is measured."""
LANES = 4
"""Parts into which ranks divide a pass; fixed, so that 1, 2 and 4 ranks give equal bits."""


def chunk_size(num_samples: int) -> int:
    """Consecutive samples in a row of the certificate: as few as leave no more rows than are worth their cost."""
    return -(-num_samples // MAX_CHUNKS)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that a look at held-out samples needs, fixed before the first of them is seen."""

    model: nn.Module
    candidates: list[Candidate]
    geometries: list[Geometry]
    loss: Loss
    reduction: Reduction
    level: float
    tolerance: float | None
    ridge: float
    seed: int
    r_max: float
    num_train: int
    loss_train: float | None
    num_pool: int
    """Samples of a pool of its own; 0: the training samples served."""
    protocol: str
    cost: Cost
    run: Mapper
    lanes: int
    train: Counted | None
    progress: Callable[[int], None] | None

    def look(self, items: Iterable[tuple[int, Batch]], *, num_samples: int, size: int) -> Rows:
        """Rows of held-out samples, ``size`` consecutive ones each."""
        frames = [g.frame for g in self.geometries]

        def lane(part: Iterable[tuple[int, Batch]]) -> Rows:
            passing = Pass(
                self.model, self.candidates, loss=self.loss, reduction=self.reduction, progress=self.progress
            )
            return rows_over(passing, part, frames=frames, num_samples=num_samples, chunk_size=size, seed=self.seed)

        parts: list[Rows] = self.run(lane, in_lanes(items, self.lanes))
        return added_up(parts, num_samples=num_samples)

    def report(self, rows: Rows, *, level: float) -> SaturationReport:
        """Certificates from rows, at an error level over all candidates.

        Raises:
            UserError: If there are fewer than 4 samples.
        """
        if rows.num_samples < 4:
            raise UserError(
                f"a certificate needs at least 4 held-out samples, got {rows.num_samples}: pass more in batches"
            )
        loss_nats = rows.loss_sum / rows.num_samples
        look = Look(
            loss_nats=loss_nats,
            tolerance=tolerance_nats(self.tolerance, loss_nats=loss_nats),
            level=level,
            r_max=self.r_max,
            num_candidates=len(self.candidates),
            num_samples=rows.num_samples,
            num_train=self.num_train,
            seed=self.seed,
        )
        with evaluating([c.block for c in self.candidates]):
            certified = [
                certify(c, rows.sites[i], geometry=self.geometries[i], added_flops=self.cost.added[i], look=look)
                for i, c in enumerate(self.candidates)
            ]
        reports = [report for report, _ in certified]
        for found, sums in zip(reports, rows.sites, strict=True):
            check_finite(found.site, sums.cross_DJ)
        useful = [r for r in reports if r.verdict == "useful"]
        blocks: dict[tuple[str, str], Any] = {}
        for r, c in sorted(
            zip(reports, self.candidates, strict=True),
            key=lambda rc: (rc[0].verdict != "useful", -rc[0].gain_per_flop),
        ):
            blocks.setdefault((r.kind, r.site), c.block)
        return SaturationReport(
            sites=reports,
            verdict=cert.network_verdict([r.verdict for r in reports]),
            best=max(useful, key=lambda r: r.gain_per_flop) if useful else None,
            covariance={
                c.path: covariance_diagnostic(GradientMoments.of(s.gradients_BD.astype(np.float64)))
                for c, s in zip(self.candidates, rows.sites, strict=True)
            },
            loss_nats=loss_nats,
            loss_train_nats=self.loss_train,
            tolerance_nats=look.tolerance,
            level=level,
            ridge=self.ridge,
            r_max=self.r_max,
            num_samples=rows.num_samples,
            num_train=self.num_train,
            flops=probe_flops(
                self.cost,
                num_train=self.num_train,
                num_pool=self.num_pool,
                num_held_out=rows.num_samples,
                num_chunks=len(rows.sites[0].along_N),
                resamples=[flips for _, flips in certified],
            ),
            protocol=self.protocol,
            blocks=blocks,
        )

    def confirmed(self, report: SaturationReport, fresh: Iterable[Batch], *, level: float) -> SaturationReport:
        """The report with its best candidate certified on samples that did not choose it, at the full level."""
        if report.best is None:
            return report
        need = "pass held-out samples that are in no other argument"
        samples = counted(fresh, what="fresh", need=need, labelled=True)
        index = next(i for i, site in enumerate(report.sites) if site is report.best)
        alone = replace(
            self,
            candidates=[self.candidates[index]],
            geometries=[self.geometries[index]],
            cost=replace(self.cost, added=[self.cost.added[index]], shapes=[self.cost.shapes[index]]),
            num_train=self.num_train,
        )
        rows = alone.look(samples.items(), num_samples=samples.num, size=chunk_size(samples.num))
        again = alone.report(rows, level=level)
        extra = self.cost.labelled * samples.num
        return replace(report, confirmed=again.sites[0], flops=report.flops + extra)

    def notes(self, held_out: Counted) -> tuple[str, ...]:
        """What to know about the samples before relying on the figures."""
        found = shared_samples(self.train.batches, held_out.batches) if self.train is not None else 0
        if not found:
            return ()
        return (
            f"{found} of {held_out.num} held-out samples are among the training samples: the network has fitted them, "
            "so gains and transfer are those of training data and say nothing about new data",
        )


def prepare(
    model: nn.Module,
    *,
    example: Batch,
    num_held_out: int,
    loss: Loss,
    reduction: Reduction,
    train_batches: Iterable[Batch] | None,
    sites: Sequence[str] | None,
    blocks: dict[str, nn.Module | Sequence[nn.Module]] | None,
    pool: Iterable[Any] | None,
    level: float,
    tolerance: float | None,
    ridge: float,
    seed: int,
    inner: Inner | Sequence[Inner],
    candidates: Sequence[Candidate] | None,
    mapper: Mapper | None,
    progress: Progress | None,
) -> Prepared:
    """Choose candidates, pass over training samples and pool, and fix the metric; arguments of :func:`probe`."""
    if train_batches is None and pool is None:
        raise UserError(
            "probe needs train_batches, or pool (inputs disjoint from batches): a second moment from the probe "
            "samples themselves would bias every score"
        )
    if not 0 < level < 0.5:
        raise UserError(f"level {level} must be in (0, 0.5): it is the error over all candidates, for example 0.05")
    if reduction not in ("mean", "sum", "none"):
        raise UserError(f"unknown reduction {reduction!r}: what the loss does over samples is 'mean', 'sum' or 'none'")
    if ridge < 0:
        raise UserError(f"ridge {ridge} must be 0 or more: it is the share of the mean diagonal added to it")
    train = pooled = None
    if train_batches is not None:
        need = "pass at least one batch, or None"
        train = counted(train_batches, what="train_batches", need=need, labelled=True)
    if pool is not None:
        pooled = counted(pool, what="pool", need="pass inputs disjoint from batches", labelled=False)
    chosen = (
        list(candidates)
        if candidates is not None
        else default_candidates(model, sites, blocks, example=example[0], inner=inner, seed=seed)
    )
    if not chosen:
        raise UserError("there is no candidate to probe: the network has no site")
    for candidate in chosen:
        if is_projected(candidate.block) and not candidate.block.is_zero:
            raise UserError(
                f"the projection of the block for {candidate.path!r} is not zero: it already adds to the stream, "
                "and its score would be that of another block; call block.reset(generator) first"
            )
    lanes = 1 if mapper is None else LANES
    run = mapper or (lambda function, items: [function(item) for item in items])
    told = _progress(progress, total=num_held_out + (train.num if train else 0) + (pooled.num if pooled else 0))

    def moments_of(samples: Counted, *, labelled: bool) -> Sums:
        def lane(part: Iterable[tuple[int, Any]]) -> Sums:
            passing = Pass(
                model,
                chosen,
                loss=loss if labelled else None,
                reduction=reduction,
                progress=told,
                sizes_every=max(1, samples.num // SIZE_SAMPLES),
            )
            return sum_over(passing, part, num_samples=samples.num, exact_moments=not labelled)

        parts: list[Sums] = run(lane, in_lanes(samples.items(), lanes))
        return added_up(parts, num_samples=samples.num)

    train_sums = moments_of(train, labelled=True) if train is not None else None
    pool_sums = moments_of(pooled, labelled=False) if pooled is not None else train_sums
    assert pool_sums is not None
    num_train = train.num if train is not None else 0
    with evaluating([c.block for c in chosen]):
        crosses = [s.cross_DJ for s in (train_sums or pool_sums).sites]
        geometries: list[Geometry] = []
        for candidate in reversed(chosen):  # second moments are dropped one by one, as soon as they are inverted
            found = geometry(
                candidate,
                pool_sums.sites.pop(),
                num_pool=pool_sums.num_samples,
                train_cross_DJ=crosses.pop() / max(num_train, 1),
                ridge=ridge,
                seed=seed,
            )
            geometries.insert(0, found)
        cost = cost_of(model, chosen, example, loss=loss, reduction=reduction, with_pool=pooled is not None)
    return Prepared(
        model=model,
        candidates=chosen,
        geometries=geometries,
        loss=loss,
        reduction=reduction,
        level=level,
        tolerance=tolerance,
        ridge=ridge,
        seed=seed,
        r_max=_ordinary_step((train_sums or pool_sums).block_ratio_sq),
        num_train=num_train,
        loss_train=train_sums.loss_sum / num_train if train_sums else None,
        num_pool=pooled.num if pooled is not None else 0,
        protocol=_protocol(chosen, ridge=ridge, tolerance=tolerance, level=level),
        cost=cost,
        run=run,
        lanes=lanes,
        train=train,
        progress=told,
    )


def _progress(told: Progress | None, *, total: int) -> Callable[[int], None] | None:
    if told is None:
        return None
    done = 0

    def step(num: int) -> None:
        nonlocal done
        done += num
        told(min(done, total), total)

    return step


def _ordinary_step(ratios: dict[str, tuple[float, float]]) -> float:
    """r_max: median over the network's blocks of ||h(z)|| / ||z||, clipped; 0.1 without blocks."""
    found = [math.sqrt(h / z) for h, z in ratios.values() if z > 0 and h > 0]
    if not found:
        return R_MAX_WITHOUT_BLOCKS
    return float(np.clip(np.median(found), *R_MAX_RANGE))


def _protocol(candidates: list[Candidate], *, ridge: float, tolerance: float | None, level: float) -> str:
    """Digest of all that is fixed before a gradient is read, inner weights included."""
    digest = hashlib.sha256()
    for c in candidates:
        config = c.block.config() if is_projected(c.block) else type(c.block).__name__
        digest.update(
            json.dumps([c.kind, c.path, c.beside, c.shared, c.name, config, *filter(None, [c.reads])]).encode()
        )
        for parameter in c.block.parameters():
            bits = parameter.detach().cpu().contiguous()
            digest.update((bits.float() if bits.dtype == torch.bfloat16 else bits).numpy().tobytes())
    digest.update(json.dumps([ridge, tolerance, level]).encode())
    return digest.hexdigest()
