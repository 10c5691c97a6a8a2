"""What a pass over samples leaves behind, and which samples enter it: plain numbers that add up.

Sums over batches may be formed on different ranks and combined in a fixed order. Which samples enter
what is a function of their index alone, so no result depends on how they are batched.

Shape legend: D = rows of a projection, J = features (new ones, then existing ones that are taken off).
"""

import math
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from growth_service.core.score import FloatArray
from growth_service.errors import UserError

ROWS_PER_FEATURE = 8
"""Positions per feature that enter a second moment: it is only a preconditioner, and its error is measured."""
POSITIONS_PER_SAMPLE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Thinning:
    """Which samples and positions enter a second moment, fixed by counts alone before any gradient."""

    every: int = 1
    """Every how many samples one enters."""
    positions: int | None = None
    """Positions taken of such a sample; None: all."""


def thinning(*, num_samples: int, num_positions: int, num_features: int) -> Thinning:
    """Enough positions for a second moment: 8 a feature, at least 8 of a sample where it has them."""
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
    """Sum of ||z_i||^2 of the stream that the candidate reads, over the same samples as the halves."""
    streams: tuple[Tensor, ...] = ()
    """Streams of the kept samples, for a block whose second moment is only ever applied."""

    @property
    def sigma(self) -> FloatArray:
        """Second moment of the features, summed over positions, averaged over samples."""
        found: FloatArray = np.add(self.half_a, self.half_b, dtype=np.float64)
        found /= max(self.kept_a + self.kept_b, 1)
        return found

    @property
    def stream_norm(self) -> float:
        """Root mean square over samples of ||z||."""
        return math.sqrt(self.stream_sq / max(self.kept_a + self.kept_b, 1))

    def plus(self, other: "SiteSums") -> "SiteSums":
        """Sums over both, in double precision."""
        arrays = {
            name: np.add(getattr(self, name), getattr(other, name), dtype=np.float64)
            for name in ("half_a", "half_b", "cross_DJ")
        }
        others = ("kept_a", "kept_b", "stream_sq", "streams")
        return SiteSums(**arrays, **{name: getattr(self, name) + getattr(other, name) for name in others})


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
class Frame:
    """How cross-gradients of one candidate are whitened, and the training direction in that frame."""

    root: FloatArray | None
    """``[J, R]`` or ``[D, J, R]``; None: rows are left as they are, and whitened when they meet."""
    along_DJ: FloatArray
    """A with <A, G> = <G_train Q, G Q>."""


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
