"""``probe``: is this network deep enough, and where not - with a certificate."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

from growth_service.probing.candidates import Batch, Candidate, Loss, Reduction
from growth_service.probing.cost import cost_of, probe_flops
from growth_service.probing.defaults import Inner
from growth_service.probing.prepare import Mapper, Progress, chunk_size, prepare
from growth_service.probing.report import SaturationReport
from growth_service.probing.samples import counted
from growth_service.probing.sequential import Looks, look_until_decided

Call = ParamSpec("Call")
Result = TypeVar("Result")


def _leaving_random_streams_alone(function: Callable[Call, Result]) -> Callable[Call, Result]:
    """Whatever draws numbers meanwhile - a loader draws one to start - draws them from a copy of the global stream."""

    @wraps(function)
    def wrapped(*args: Call.args, **kwargs: Call.kwargs) -> Result:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            return function(*args, **kwargs)

    return wrapped


@_leaving_random_streams_alone
def probe(
    model: nn.Module,
    *,
    batches: Iterable[Batch],
    loss: Loss,
    reduction: Reduction,
    train_batches: Iterable[Batch] | None = None,
    sites: Sequence[str] | None = None,
    blocks: dict[str, nn.Module | Sequence[nn.Module]] | None = None,
    pool: Iterable[Any] | None = None,
    level: float = 0.05,
    tolerance: float | None = None,
    ridge: float = 1e-3,
    seed: int = 0,
    inner: Inner | Sequence[Inner] = "copy",
    candidates: Sequence[Candidate] | None = None,
    fresh: Iterable[Batch] | None = None,
    looks: Looks | None = None,
    mapper: Mapper | None = None,
    progress: Progress | None = None,
) -> SaturationReport:
    """Measure at every site how much loss a new block could remove, with confidence limits.

    The network is only looked at: eval mode, no parameter, buffer, gradient, hook, training mode
    or random stream is different afterwards, also after an exception.

    Args:
        model: Any module; its own families and the architectures of :func:`sites` need no sites.
        batches: Re-iterable of (inputs, targets) that the network was NOT trained on, one
            independent unit a row (an image, a sequence), in random order. Inputs are a tensor, or a
            mapping of keyword arguments.
        loss: ``loss(outputs, targets)``.
        reduction: What it does over samples: ``"mean"``, ``"sum"`` or ``"none"``.
        train_batches: Samples the network was trained on; gives the training score and transfer.
        sites: Module paths; None: the known ones.
        blocks: Candidate block, or several, by site path; None: shaped like the nearest block. A
            module that is no :class:`Block` must add nothing yet, and is scored through Jacobian products.
        pool: Inputs for the feature second moment, disjoint from ``batches``, every one of which
            enters; None: as many of ``train_batches`` as the second moment needs.
        level: Error level over all candidates, in (0, 0.5).
        tolerance: Smallest gain that counts, in nats; None: max(0.01, 2 % of the loss).
        ridge: Share of the mean diagonal added to the second moment; "saturated" then means
            within the ridged family. 0: pseudo-inverse.
        seed: Of default blocks, sign flips and sketches.
        inner: Inner weights of default blocks: a ``"copy"`` of the nearest block's (where there is one),
            ``"random"`` draws, or several of these as candidates side by side.
        candidates: In place of ``sites`` and ``blocks``: any mix of new blocks and new units.
        fresh: More held-out samples, used for the best candidate alone: a choice among many is
            certified again where it was not made.
        looks: Look at more and more of ``batches`` until there is a verdict; None: at all of them, once.
        mapper: How parts of a pass are worked off; None: one after the other here.
        progress: Told after each batch how many samples are done, of how many.

    Returns:
        Certificates, the network's verdict, and the best candidate.

    Raises:
        UserError: If there is no pool, too few samples, or a loss is not finite.
        SiteError: If a path is no residual stream.
    """
    need = "a certificate needs at least 4 samples the network was not trained on"
    held_out = counted(batches, what="batches", need=need, labelled=True)
    prepared = prepare(
        model,
        example=held_out.first,
        num_held_out=held_out.num,
        loss=loss,
        reduction=reduction,
        train_batches=train_batches,
        sites=sites,
        blocks=blocks,
        pool=pool,
        level=level,
        tolerance=tolerance,
        ridge=ridge,
        seed=seed,
        inner=inner,
        candidates=candidates,
        mapper=mapper,
        progress=progress,
    )
    if looks is None:
        rows = prepared.look(held_out.items(), num_samples=held_out.num, size=chunk_size(held_out.num))
        report = prepared.report(rows, level=level)
    else:
        report = look_until_decided(prepared, held_out, looks, level=level)
    if fresh is not None:
        report = prepared.confirmed(report, fresh, level=level)
    return replace(report, notes=prepared.notes(held_out))


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
    """What a probe will cost at most: all sign flips are counted, the rest is exact.

    Finding out runs two passes of one sample.
    """
    chosen = list(candidates)
    cost = cost_of(model, chosen, batches[0], loss=loss, reduction=reduction, with_pool=False)
    num_held_out = sum(len(b[1]) for b in batches)
    resamples = math.ceil(20 * len(chosen) / level)
    flops = probe_flops(
        cost,
        num_train=sum(len(b[1]) for b in train_batches),
        num_pool=0,
        num_held_out=num_held_out,
        num_chunks=-(-num_held_out // chunk_size(num_held_out)),
        resamples=[resamples] * len(chosen),
    )
    return Estimate(flops=flops, cost=cost.labelled + cost.unlabelled)
