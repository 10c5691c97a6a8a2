"""Probe more data until the network's verdict is in, and pay for every look.

Looks at n0, 2 n0, 4 n0, ... held-out samples; look j is judged at level 6 / (pi^2 (j + 1)^2) of the level,
so that all looks together err no more often than one would. What earlier looks collected is kept:
rows are sums, so neighbouring rows are added when the sample doubles.
Source: alpha spending over repeated looks, Lan and DeMets 1983 (Biometrika 70), with weights 1/j^2.
"""

from dataclasses import dataclass, replace

from growth_service.core.confidence import spend
from growth_service.errors import UserError
from growth_service.probing.prepare import MAX_CHUNKS, Prepared
from growth_service.probing.report import PastLook, SaturationReport
from growth_service.probing.rows import Rows
from growth_service.probing.samples import Counted, Taker


@dataclass(frozen=True, kw_only=True, slots=True)
class Looks:
    """How to look again: at twice the samples, until there is a verdict.

    Raises:
        UserError: If the first look has fewer than 4 samples.
    """

    first: int = 256
    """Held-out samples of the first look, at least 4."""
    most: int | None = None
    """Most held-out samples; None: all there are."""

    def __post_init__(self) -> None:
        if self.first < 4:
            raise UserError(f"the first look of {self.first} samples must have at least 4: a certificate needs them")


def look_until_decided(prepared: Prepared, held_out: Counted, looks: Looks, *, level: float) -> SaturationReport:
    """The report of the look that decided, or of the last; ``report.looks`` has all of them.

    Args:
        prepared: Of the probe.
        held_out: All held-out samples there are.
        looks: Sizes.
        level: Error level over all looks and candidates together.
    """
    limit = min(looks.most or held_out.num, held_out.num)
    taker = Taker(held_out.batches)  # over all looks: each sample enters once, also from a loader that shuffles
    size = -(-looks.first // MAX_CHUNKS)
    wanted = min(limit, looks.first)
    rows: Rows | None = None
    past: list[PastLook] = []
    done = 0
    while True:
        new = prepared.look(taker.take(wanted - done), num_samples=wanted - done, size=size)
        rows = new if rows is None else rows.then(new)
        while rows.num_rows > MAX_CHUNKS:
            rows, size = rows.merged(), 2 * size
        done = wanted
        spent = spend(level, look=len(past))
        report = prepared.report(rows, level=spent)
        past.append(PastLook(num_samples=done, level=spent, verdict=report.verdict))
        if report.verdict != "undetermined" or done >= limit:
            return replace(report, looks=tuple(past))
        wanted = min(limit, 2 * done)
