"""Probe more data until the network's verdict is in, and pay for every look.

Looks at n0, 2 n0, 4 n0, ... held-out samples; look j is judged at level 6 / (pi^2 (j + 1)^2) of the level,
so that all looks together err no more often than one would. What earlier looks collected is kept:
rows are sums, so neighbouring rows are added when the sample doubles.
Source: alpha spending over repeated looks, Lan and DeMets 1983 (Biometrika 70), with the weights of 1/j^2.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from growth_service.core.certificate import Verdict
from growth_service.core.confidence import spend
from growth_service.errors import UserError
from growth_service.probing.candidates import Batch, Candidate, Loss, Reduction, slice_samples
from growth_service.probing.defaults import Inner
from growth_service.probing.prepare import MAX_CHUNKS, Mapper, Progress, counted, prepare
from growth_service.probing.report import SaturationReport
from growth_service.probing.sums import Rows

FIRST_LOOK = 256
"""Held-out samples of the first look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PastLook:
    """One look of several."""

    num_samples: int
    level: float
    """Error level spent on it."""
    verdict: Verdict


def probe_until_decided(
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
    first_look: int = FIRST_LOOK,
    max_samples: int | None = None,
    mapper: Mapper | None = None,
    progress: Progress | None = None,
) -> tuple[SaturationReport, list[PastLook]]:
    """Look at more and more held-out samples until every candidate together gives a verdict.

    Args:
        model: As in :func:`probe`, like all arguments not named here.
        batches: All held-out samples there are, in random order.
        loss: See :func:`probe`.
        reduction: See :func:`probe`.
        train_batches: See :func:`probe`.
        sites: See :func:`probe`.
        blocks: See :func:`probe`.
        pool: See :func:`probe`.
        level: Error level over all looks and candidates together.
        tolerance: See :func:`probe`.
        ridge: See :func:`probe`.
        seed: See :func:`probe`.
        inner: See :func:`probe`.
        candidates: See :func:`probe`.
        first_look: Samples of the first look, at least 4; each look doubles them.
        max_samples: Most samples; None: all there are.
        mapper: See :func:`probe`.
        progress: See :func:`probe`; the total is that of the longest possible probe.

    Returns:
        The report of the last look, and all looks.

    Raises:
        UserError: As :func:`probe`, or if the first look has fewer than 4 samples.
    """
    if first_look < 4:
        raise UserError(f"first_look {first_look} must be at least 4: a certificate needs 4 held-out samples")
    need = "a certificate needs at least 4 samples the network was not trained on"
    held_out = counted(batches, what="batches", need=need)
    limit = min(max_samples or held_out.num, held_out.num)
    prepared = prepare(
        model,
        example=held_out.first,
        num_held_out=limit,
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
    size = -(-first_look // MAX_CHUNKS)
    done, looks = 0, list[PastLook]()
    rows: Rows | None = None
    while True:
        wanted = min(limit, max(size * min(MAX_CHUNKS, first_look // size), 2 * done if done else 0))
        items = samples_between(held_out.items(), done, wanted)
        new = prepared.look(items, num_samples=wanted - done, size=size)
        rows = new if rows is None else rows.then(new).merged()
        size, done = (size if not looks else 2 * size), wanted
        spent = spend(level, look=len(looks))
        report = prepared.report(rows, level=spent)
        looks.append(PastLook(num_samples=done, level=spent, verdict=report.verdict))
        if report.verdict != "undetermined" or done >= limit:
            return replace(report, notes=prepared.notes(held_out)), looks


def samples_between(items: Iterable[tuple[int, Batch]], start: int, stop: int) -> Iterator[tuple[int, Batch]]:
    """The samples with index in [start, stop), numbered from 0 on."""
    for first, (inputs, targets) in items:
        a, b = max(start - first, 0), min(stop - first, len(targets))
        if a < b:
            yield first + a - start, (slice_samples(inputs, a, b), targets[a:b])
        if first >= stop:
            return
