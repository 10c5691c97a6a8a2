"""What a look at held-out samples leaves behind: one row of numbers a chunk of samples, for each candidate.

Shape legend: D = rows of a projection, J = features, N = chunks of samples, M = numbers kept of one,
B = samples of which the activation gradients are kept.
"""

from dataclasses import dataclass, replace

import numpy as np

from growth_service.core.score import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Rows of numbers, as they were measured or in half precision with a scale each.

    Half precision is for sketches in single: rounding by 2^-11 is far below the error of the sketch itself.
    """

    numbers_NM: FloatArray
    scale_N: FloatArray | None = None
    """By which half-precision rows are multiplied; None: rows are as they were measured."""

    @classmethod
    def of(cls, rows_NM: FloatArray, *, half: bool) -> "Packed":
        """Pack rows."""
        if not half:
            return cls(numbers_NM=rows_NM)
        scale_N = np.sqrt(np.square(rows_NM, dtype=np.float64).mean(axis=1))
        safe_N = np.where(scale_N > 0, scale_N, 1.0)
        return cls(numbers_NM=(rows_NM / safe_N[:, None]).astype(np.float16), scale_N=scale_N)

    @property
    def half(self) -> bool:
        """Whether rows are in half precision."""
        return self.scale_N is not None

    def full(self) -> FloatArray:
        """The rows in double precision. ``[N, M]``."""
        rows_NM: FloatArray = self.numbers_NM.astype(np.float64)
        return rows_NM if self.scale_N is None else rows_NM * self.scale_N[:, None]

    def plus(self, other: "Packed") -> "Packed":
        """Row by row."""
        if not self.half:
            return Packed(numbers_NM=self.numbers_NM + other.numbers_NM)
        return Packed.of(self.full() + other.full(), half=True)

    def then(self, other: "Packed") -> "Packed":
        """These rows, then the others."""
        numbers_NM = np.concatenate([self.numbers_NM, other.numbers_NM])
        if self.scale_N is None or other.scale_N is None:
            return Packed(numbers_NM=numbers_NM)
        return Packed(numbers_NM=numbers_NM, scale_N=np.concatenate([self.scale_N, other.scale_N]))

    def merged(self) -> "Packed":
        """Neighbouring rows added up."""
        rows_NM = self.full() if self.half else self.numbers_NM
        return Packed.of(np.add.reduceat(rows_NM, np.arange(0, len(rows_NM), 2), axis=0), half=self.half)


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteRows:
    """One row a chunk of held-out samples, for one candidate."""

    rows: Packed
    """Sums of whitened cross-gradients over each chunk, sketched where they are long."""
    along_N: FloatArray
    """Sums of their inner products with the whitened training cross-gradient (exact, never sketched)."""
    cross_DJ: FloatArray
    """Sum of all cross-gradients, exact."""
    gradients_BD: FloatArray
    """Activation gradients (summed over positions) of about 512 samples of each look."""
    gradient_sq: float
    """Sum of ||g_i||^2."""
    gradient_max: float
    """Largest ||g_i||: AG_max."""

    def plus(self, other: "SiteRows") -> "SiteRows":
        """Sums over both parts of the samples; the largest of the largest."""
        return replace(
            self._with(other),
            rows=self.rows.plus(other.rows),
            along_N=self.along_N + other.along_N,
        )

    def then(self, other: "SiteRows") -> "SiteRows":
        """These rows, then those of further samples."""
        return replace(
            self._with(other),
            rows=self.rows.then(other.rows),
            along_N=np.concatenate([self.along_N, other.along_N]),
        )

    def _with(self, other: "SiteRows") -> "SiteRows":
        return replace(
            self,
            cross_DJ=np.add(self.cross_DJ, other.cross_DJ, dtype=np.float64),
            gradients_BD=np.concatenate([self.gradients_BD, other.gradients_BD]),
            gradient_sq=self.gradient_sq + other.gradient_sq,
            gradient_max=max(self.gradient_max, other.gradient_max),
        )

    def merged(self) -> "SiteRows":
        """Neighbouring rows added up: half as many, each over twice the samples."""
        starts = np.arange(0, len(self.along_N), 2)
        return replace(self, rows=self.rows.merged(), along_N=np.add.reduceat(self.along_N, starts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of all candidates for the same chunks."""

    num_samples: int
    loss_sum: float
    sites: list[SiteRows]

    def plus(self, other: "Rows") -> "Rows":
        """Sums over both parts of the samples."""
        return self._with(other, [a.plus(b) for a, b in zip(self.sites, other.sites, strict=True)])

    def then(self, other: "Rows") -> "Rows":
        """These rows, then those of further samples."""
        return self._with(other, [a.then(b) for a, b in zip(self.sites, other.sites, strict=True)])

    def _with(self, other: "Rows", sites: list[SiteRows]) -> "Rows":
        return Rows(
            num_samples=self.num_samples + other.num_samples, loss_sum=self.loss_sum + other.loss_sum, sites=sites
        )

    @property
    def num_rows(self) -> int:
        """Chunks of samples."""
        return len(self.sites[0].along_N)

    def merged(self) -> "Rows":
        """Neighbouring rows of each candidate added up."""
        return replace(self, sites=[s.merged() for s in self.sites])
