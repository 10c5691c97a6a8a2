"""``probe``: is this network deep enough, and where not - with a certificate."""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from growth_service.blocks import Block, block_from_config
from growth_service.core import certificate as cert
from growth_service.core.decisions import tolerance_nats
from growth_service.core.score import (
    covariance_diagnostic,
    pool_inflation,
    whitener,
)
from growth_service.core.streams import stream_seed
from growth_service.errors import UserError
from growth_service.models.flops import block_flops_per_sample
from growth_service.models.sites import default_block_config, resolve, site_of
from growth_service.models.sites import sites as default_sites
from growth_service.probing import collect
from growth_service.probing.candidates import Batch, Candidate, Loss, Reduction, Taps, untouched
from growth_service.probing.certify import Look, certify
from growth_service.probing.report import SaturationReport

Item = TypeVar("Item")
Result = TypeVar("Result")
Mapper = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
"""Applies a function to items and returns results in their order; may spread them over ranks."""

R_MAX_RANGE = (0.05, 0.3)
R_MAX_WITHOUT_BLOCKS = 0.1
FEW = 8
"""Samples from which the cost of a probe is estimated."""
MAX_UNITS = 2048
"""Independent units per look; more are left for the next look."""


def probe(
    model: nn.Module,
    *,
    batches: Iterable[Batch],
    loss: Loss,
    reduction: Reduction,
    train_batches: Iterable[Batch] | None = None,
    sites: Sequence[str] | None = None,
    blocks: dict[str, Block] | None = None,
    pool: Iterable[Tensor] | None = None,
    level: float = 0.05,
    tolerance: float | None = None,
    ridge: float = 1e-3,
    seed: int = 0,
    candidates: Sequence[Candidate] | None = None,
    mapper: Mapper | None = None,
) -> SaturationReport:
    """Measure at every site how much loss a new block could remove, with confidence limits.

    The network is only looked at: eval mode, no parameter, buffer, gradient, hook, training mode
    or random stream is different afterwards, also after an exception.

    Args:
        model: Any module; its own families need no sites.
        batches: Re-iterable of (inputs, targets) that the network was NOT trained on, one
            independent unit a row (an image, a sequence).
        loss: ``loss(outputs, targets)``.
        reduction: What it does over samples: ``"mean"``, ``"sum"`` or ``"none"``.
        train_batches: Samples the network was trained on; gives the training score and transfer.
        sites: Module paths; None: the family's own.
        blocks: Candidate block by site path; None: shaped like the nearest block, drawn by seed.
        pool: Inputs for the feature second moment, disjoint from ``batches``; None: those of
            ``train_batches``.
        level: Error level over all candidates, in (0, 0.5).
        tolerance: Smallest gain that counts, in nats; None: max(0.01, 2 % of the loss).
        ridge: Share of the mean diagonal added to the second moment; "saturated" then means
            within the ridged family. 0: pseudo-inverse.
        seed: Of default blocks, sign flips and sketches.
        candidates: In place of ``sites`` and ``blocks``: any mix of new blocks and new units.
        mapper: How batches are worked off; None: one after the other here.

    Returns:
        Certificates, the network's verdict, and the best candidate.

    Raises:
        UserError: If there is no pool, too few samples, or a loss is not finite.
        SiteError: If a path is no residual stream.
    """
    run = mapper or _serially
    held_out = list(batches)
    if not held_out:
        raise UserError("batches is empty: a certificate needs at least 4 samples the network was not trained on")
    if train_batches is None and pool is None:
        raise UserError(
            "probe needs train_batches, or pool (inputs disjoint from batches): a second moment from the probe "
            "samples themselves would bias every score"
        )
    chosen = (
        list(candidates)
        if candidates is not None
        else _default_candidates(model, sites, blocks, example=held_out[0][0], seed=seed)
    )
    if not chosen:
        raise UserError("there is no candidate to probe: the network has no site")
    protocol = _protocol(chosen, ridge=ridge, tolerance=tolerance, level=level)

    train = _sum_moments(model, chosen, train_batches, loss=loss, reduction=reduction, run=run)
    pooled = _sum_pool(model, chosen, pool, run=run) if pool is not None else train
    assert pooled is not None
    _check_finite(chosen, pooled)
    whiteners = [whitener(s.sigma_KK, ridge=ridge) for s in pooled.sites]
    inflations = [
        pool_inflation(s.half_a_KK / max(s.kept_a, 1), s.half_b_KK / max(s.kept_b, 1), ridge=ridge)
        for s in pooled.sites
    ]
    train_cross = [s.cross_DK / train.num_samples for s in train.sites] if train else [s.cross_DK for s in pooled.sites]
    along = [g @ w.inv_sqrt_KK for g, w in zip(train_cross, whiteners, strict=True)]

    def look(batch: Batch) -> collect.Units:
        return collect.units(
            model,
            chosen,
            batch,
            inv_sqrt=[w.inv_sqrt_KK for w in whiteners],
            train_whitened=along,
            loss=loss,
            reduction=reduction,
            sketch_seed=seed,
        )

    num_held_out = sum(len(b[1]) for b in held_out)
    if num_held_out < 4:
        raise UserError(f"a certificate needs at least 4 held-out samples, got {num_held_out}: pass more in batches")
    rows = _at_most(collect.join(run(look, held_out)), MAX_UNITS)
    loss_nats = rows.loss_sum / num_held_out
    own = (train or pooled).block_ratio_sq
    shared = Look(
        loss_nats=loss_nats,
        tolerance=tolerance_nats(tolerance, loss_nats=loss_nats),
        level=level,
        r_max=_ordinary_step(own),
        num_candidates=len(chosen),
        num_train=train.num_samples if train else 0,
        seed=seed,
    )
    added = _added_flops(model, chosen, held_out[0][0])
    certified = [
        certify(
            candidate,
            rows.sites[i],
            whitening=whiteners[i],
            inflation=inflations[i],
            train_cross=train_cross[i],
            stream_norm=math.sqrt(pooled.sites[i].stream_sq / pooled.num_samples),
            added_flops=added[i],
            look=shared,
            s_plugin=float(np.square(rows.whitened_sums[i] / rows.num_samples).sum()),
        )
        for i, candidate in enumerate(chosen)
    ]
    reports = [report for report, _ in certified]
    flops = rows.flops + sum(cost for _, cost in certified)
    flops += (train.flops if train else 0) + (pooled.flops if pool is not None else 0)
    useful = [r for r in reports if r.verdict == "useful"]
    return SaturationReport(
        sites=reports,
        verdict=cert.network_verdict([r.verdict for r in reports]),
        best=max(useful, key=lambda r: r.gain_per_flop) if useful else None,
        covariance={c.path: covariance_diagnostic(s.gradient_ND) for c, s in zip(chosen, rows.sites, strict=True)},
        loss_nats=loss_nats,
        tolerance_nats=shared.tolerance,
        level=level,
        ridge=ridge,
        r_max=shared.r_max,
        flops=flops,
        protocol=protocol,
        blocks={(c.kind, c.path): c.block for c in chosen},
    )


def _default_candidates(
    model: nn.Module, paths: Sequence[str] | None, blocks: dict[str, Block] | None, *, example: Any, seed: int
) -> list[Candidate]:
    """One new block a site: the user's, or one shaped like the nearest block."""
    wanted = list(paths) if paths is not None else list(blocks or [s.path for s in default_sites(model)])
    for path in wanted:
        resolve(model, path)
    with untouched(model, with_gradient=False), Taps(model, wanted, with_gradient=False) as taps:
        model(example[:1])
    made = []
    for path in wanted:
        block = (blocks or {}).get(path)
        if block is None:
            generator = torch.Generator().manual_seed(stream_seed(seed, "candidate", path))
            block = block_from_config(
                default_block_config(model, site_of(taps.stream[path], path=path)), generator=generator
            )
            block.to(dtype=taps.stream[path].dtype, device=taps.stream[path].device)
        made.append(Candidate(path=path, block=block))
    return made


def _sum_moments(
    model: nn.Module,
    candidates: list[Candidate],
    batches: Iterable[Batch] | None,
    *,
    loss: Loss,
    reduction: Reduction,
    run: Mapper,
) -> collect.Moments | None:
    if batches is None:
        return None
    listed = list(batches)
    if not listed:
        raise UserError("train_batches is empty: pass at least one batch, or None")

    def one(item: tuple[int, Batch]) -> collect.Moments:
        return collect.moments(model, candidates, item[1], first=item[0], loss=loss, reduction=reduction)

    return _added_up(run(one, numbered(listed, size=lambda batch: len(batch[1]))))


def _sum_pool(model: nn.Module, candidates: list[Candidate], pool: Iterable[Tensor], *, run: Mapper) -> collect.Moments:
    listed = list(pool)
    if not listed:
        raise UserError("pool is empty: pass inputs disjoint from batches")

    def one(item: tuple[int, Tensor]) -> collect.Moments:
        return collect.pool_moments(model, candidates, item[1], first=item[0])

    return _added_up(run(one, numbered(listed, size=len)))


def numbered(batches: Sequence[Item], *, size: Callable[[Item], int]) -> list[tuple[int, Item]]:
    """Batches with the index of their first sample, so that no result depends on how samples are batched."""
    firsts = itertools.accumulate((size(b) for b in batches), initial=0)
    return list(zip(firsts, batches, strict=False))


def _added_up(parts: list[collect.Moments]) -> collect.Moments:
    total = parts[0]
    for part in parts[1:]:
        total = total.plus(part)
    return total


def _check_finite(candidates: list[Candidate], pooled: collect.Moments) -> None:
    for candidate, found in zip(candidates, pooled.sites, strict=True):
        if not np.isfinite(found.sigma_KK).all():
            raise UserError(
                f"features at {candidate.path!r} are not finite on the pool: its inputs hold NaN or infinity, or the "
                "network diverged"
            )


def _at_most(rows: collect.Units, limit: int) -> collect.Units:
    """The first ``limit`` rows; the loss stays over all."""
    kept = [collect.SiteUnits(**{f: getattr(s, f)[:limit] for f in s.__dataclass_fields__}) for s in rows.sites]
    return replace(rows, sites=kept)


def _ordinary_step(ratios: dict[str, tuple[float, float]]) -> float:
    """r_max: median over the network's blocks of ||h(z)|| / ||z||, clipped; 0.1 without blocks."""
    found = [math.sqrt(h / z) for h, z in ratios.values() if z > 0 and h > 0]
    if not found:
        return R_MAX_WITHOUT_BLOCKS
    return float(np.clip(np.median(found), *R_MAX_RANGE))


def _added_flops(model: nn.Module, candidates: list[Candidate], example: Any) -> list[int]:
    """FLOPs that each candidate would add to a training sample."""
    paths = list(dict.fromkeys(c.path for c in candidates))
    with untouched(model, with_gradient=False), Taps(model, paths, with_gradient=False) as taps:
        model(example[:1])
    with torch.enable_grad():
        return [
            block_flops_per_sample(c.block, (taps.stream if c.kind == "depth" else taps.read)[c.path])
            for c in candidates
        ]


def _protocol(candidates: list[Candidate], *, ridge: float, tolerance: float | None, level: float) -> str:
    """Digest of all that is fixed before a gradient is read, inner weights included."""
    digest = hashlib.sha256()
    for c in candidates:
        digest.update(json.dumps([c.kind, c.path, c.block.config()]).encode())
        for parameter in c.block.parameters():
            digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    digest.update(json.dumps([ridge, tolerance, level]).encode())
    return digest.hexdigest()


def _serially(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [function(item) for item in items]


class Estimate(NamedTuple):
    """What a probe will cost at most, and what it cost to find out."""

    flops: int
    cost: int


def estimate_flops(
    model: nn.Module,
    *,
    candidates: Sequence[Candidate],
    batches: Sequence[Batch],
    train_batches: Sequence[Batch],
    loss: Loss,
    reduction: Reduction,
    level: float,
) -> Estimate:
    """What a probe will cost at most, from a few samples of each kind, scaled up.

    An upper limit: of few samples a larger share enters the second moment, and all sign flips are counted.
    """
    chosen = list(candidates)
    seen = collect.moments(model, chosen, _few(train_batches), first=0, loss=loss, reduction=reduction)
    shapes = [s.cross_DK.shape for s in seen.sites]
    looked = collect.units(
        model,
        chosen,
        _few(batches),
        inv_sqrt=[np.eye(k) for _, k in shapes],
        train_whitened=[np.zeros(shape) for shape in shapes],
        loss=loss,
        reduction=reduction,
        sketch_seed=0,
    )
    num_held_out = sum(len(b[1]) for b in batches)
    passes = sum(
        part.flops * -(-sum(len(b[1]) for b in listed) // part.num_samples)
        for part, listed in ((seen, train_batches), (looked, batches))
    )
    resamples = math.ceil(20 * len(chosen) / level)
    certificates = sum(
        cert.certificate_flops(
            num_units=min(num_held_out, MAX_UNITS),
            numbers=min(d * k, collect.MAX_UNIT_NUMBERS),
            features=k,
            num_resamples=resamples,
        )
        for d, k in shapes
    )
    return Estimate(flops=passes + certificates, cost=seen.flops + looked.flops)


def _few(batches: Sequence[Batch]) -> Batch:
    """The first samples of the first batch."""
    inputs, targets = batches[0]
    return inputs[:FEW], targets[:FEW]
