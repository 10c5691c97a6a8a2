"""Sums over samples from which scores and certificates follow: one function a batch.

Each function returns plain float64 arrays that add up (``moments``) or line up (``units``)
over batches, so batches may be spread over ranks and combined in a fixed order.

Shape legend: B = samples, D = stream width, K = features, P = positions, M = numbers kept of a unit.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from growth_service.blocks import Block, stream_positions, tangent_features
from growth_service.core.score import FloatArray
from growth_service.errors import NotFiniteError
from growth_service.models.flops import FlopCounter
from growth_service.models.sites import blocks_of
from growth_service.probing.candidates import Batch, Candidate, Loss, Reduction, Taps, summed, untouched

MAX_UNIT_NUMBERS = 4096
"""Whitened cross-gradients larger than this are sketched: inner products kept in expectation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteMoments:
    """Sums of one candidate over samples."""

    half_a_KK: FloatArray
    """Sum of phi phi^T over ``kept_a`` samples with even index; the other half: with odd index."""
    half_b_KK: FloatArray
    kept_a: int
    kept_b: int
    cross_DK: FloatArray
    """Sum of the cross-gradients G_i (zeros where no labels were used)."""
    gradient_sq: float
    """Sum of ||g_i||^2."""
    gradient_max: float
    """Largest ||g_i||: AG_max."""
    stream_sq: float
    """Sum of ||z_i||^2 of the stream written to."""

    @property
    def sigma_KK(self) -> FloatArray:
        """Second moment of the features, summed over positions, averaged over samples."""
        return (self.half_a_KK + self.half_b_KK) / max(self.kept_a + self.kept_b, 1)

    def plus(self, other: "SiteMoments") -> "SiteMoments":
        """Sums over both; the largest of the largest."""
        added = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return SiteMoments(**added | {"gradient_max": max(self.gradient_max, other.gradient_max)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Sums over samples for all candidates at once, and of the network's own blocks."""

    num_samples: int
    loss_sum: float
    flops: int
    """What collecting them cost."""
    sites: list[SiteMoments]
    block_ratio_sq: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Per existing block: sums of ||h(z)||^2 and ||z||^2, for the size of an ordinary step."""

    def plus(self, other: "Moments") -> "Moments":
        """Sums over both."""
        ratios = {
            path: (sums[0] + other.block_ratio_sq[path][0], sums[1] + other.block_ratio_sq[path][1])
            for path, sums in self.block_ratio_sq.items()
        }
        return Moments(
            num_samples=self.num_samples + other.num_samples,
            loss_sum=self.loss_sum + other.loss_sum,
            flops=self.flops + other.flops,
            sites=[a.plus(b) for a, b in zip(self.sites, other.sites, strict=True)],
            block_ratio_sq=ratios,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteUnits:
    """One row a sample, for one candidate."""

    psi_NM: FloatArray
    """Whitened cross-gradients, sketched where they are long."""
    along_N: FloatArray
    """Their inner product with the whitened training cross-gradient (exact, never sketched)."""
    gradient_ND: FloatArray
    """Activation gradients summed over positions, for the covariance diagnostic."""
    gradient_norm_N: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """Rows of all candidates for the same samples."""

    loss_sum: float
    num_samples: int
    flops: int
    sites: list[SiteUnits]
    whitened_sums: list[FloatArray]
    """Sum of the whitened cross-gradients of each candidate, exact. ``[D, K]`` each."""


def moments(
    model: nn.Module, candidates: list[Candidate], batch: Batch, *, first: int, loss: Loss, reduction: Reduction
) -> Moments:
    """Second moments and cross-gradients of every candidate on one labelled batch, which starts at sample ``first``.

    The second moment is only a preconditioner: it is taken from every ``P // 4``-th sample, so
    that each sample counts for about 4 positions (fixed by shapes alone, before any gradient).
    """
    with untouched(model, with_gradient=True), FlopCounter() as counter:
        _, num, loss_sum, taps, gradients, ratios = forward_backward(
            model, candidates, batch, loss=loss, reduction=reduction
        )
        found = []
        for candidate in candidates:
            z = stream_positions(taps.stream[candidate.path].detach())
            g = stream_positions(gradients[candidate.path])
            phi = candidate_features(candidate, taps)
            norms = g.double().square().sum(dim=(1, 2))
            halves = _halves(phi, first=first, every=max(1, phi.shape[2] // 4))
            found.append(
                SiteMoments(
                    **halves,
                    cross_DK=_array(torch.einsum("bdp,bkp->dk", g, phi)),
                    gradient_sq=float(norms.sum()),
                    gradient_max=float(norms.max().sqrt()),
                    stream_sq=float(z.double().square().sum()),
                )
            )
    return Moments(
        num_samples=num,
        loss_sum=loss_sum,
        flops=counter.flops,
        sites=found,
        block_ratio_sq=ratios,
    )


def pool_moments(model: nn.Module, candidates: list[Candidate], inputs: Tensor, *, first: int) -> Moments:
    """Second moments of every candidate on one batch without labels (forward only)."""
    with untouched(model, with_gradient=False), FlopCounter() as counter:
        with Taps(model, [c.path for c in candidates], with_gradient=False) as taps:
            model(inputs)
        found = []
        for candidate in candidates:
            phi = candidate_features(candidate, taps)
            z = taps.stream[candidate.path]
            halves = _halves(phi, first=first, every=1)
            found.append(
                SiteMoments(
                    **halves,
                    cross_DK=np.zeros((stream_positions(z).shape[1], phi.shape[1])),
                    gradient_sq=0.0,
                    gradient_max=0.0,
                    stream_sq=float(z.double().square().sum()),
                )
            )
    return Moments(num_samples=inputs.shape[0], loss_sum=0.0, flops=counter.flops, sites=found)


def units(
    model: nn.Module,
    candidates: list[Candidate],
    batch: Batch,
    *,
    inv_sqrt: list[FloatArray],
    train_whitened: list[FloatArray],
    loss: Loss,
    reduction: Reduction,
    sketch_seed: int,
) -> Units:
    """Whitened cross-gradients of each sample of one held-out batch, for every candidate.

    Args:
        model: The network.
        candidates: As in :func:`moments`.
        batch: Inputs and targets.
        inv_sqrt: Whitener Q of each candidate. ``[K, K]`` each.
        train_whitened: G_train Q of each candidate. ``[D, K]`` each.
        loss: Of outputs and targets.
        reduction: What the loss does over samples.
        sketch_seed: Of the random projection of long rows; fixed beforehand.
    """
    with untouched(model, with_gradient=True), FlopCounter() as counter:
        _, num, loss_sum, taps, gradients, _ = forward_backward(
            model, candidates, batch, loss=loss, reduction=reduction
        )
        found, sums = [], []
        for candidate, q_KK, along_DK in zip(candidates, inv_sqrt, train_whitened, strict=True):
            g = stream_positions(gradients[candidate.path])
            phi = candidate_features(candidate, taps)
            cross_BDK = torch.bmm(g, phi.transpose(1, 2)).double()
            psi_BDK = cross_BDK @ torch.from_numpy(q_KK).to(cross_BDK.device)
            norms = g.double().square().sum(dim=(1, 2)).sqrt()
            sums.append(_array(psi_BDK.sum(dim=0)))
            found.append(
                SiteUnits(
                    psi_NM=_array(_sketch(psi_BDK.flatten(1), seed=sketch_seed)),
                    along_N=_array((psi_BDK * torch.from_numpy(along_DK).to(psi_BDK.device)).sum(dim=(1, 2))),
                    gradient_ND=_array(g.sum(dim=2)),
                    gradient_norm_N=_array(norms),
                )
            )
    return Units(loss_sum=loss_sum, num_samples=num, flops=counter.flops, sites=found, whitened_sums=sums)


def join(parts: list[Units]) -> Units:
    """Line up the rows of several batches, in their order."""
    columns = [
        SiteUnits(**{f.name: np.concatenate([getattr(s, f.name) for s in rows]) for f in fields(SiteUnits)})
        for rows in zip(*(p.sites for p in parts), strict=True)
    ]
    return Units(
        loss_sum=sum(p.loss_sum for p in parts),
        num_samples=sum(p.num_samples for p in parts),
        flops=sum(p.flops for p in parts),
        sites=columns,
        whitened_sums=[np.sum(sums, axis=0) for sums in zip(*(p.whitened_sums for p in parts), strict=True)],
    )


def forward_backward(
    model: nn.Module, candidates: list[Candidate], batch: Batch, *, loss: Loss, reduction: Reduction
) -> tuple[Tensor, int, float, Taps, dict[str, Tensor], dict[str, tuple[float, float]]]:
    """One forward and one data-only backward: streams, gradients, and sizes of existing blocks."""
    inputs, targets = batch
    num = len(targets)
    own = blocks_of(model)
    ratios: dict[str, tuple[float, float]] = {}
    handles = [m.register_forward_hook(_ratio_hook(path, ratios)) for path, m in own.items()]
    paths = list(dict.fromkeys(c.path for c in candidates))
    try:
        with Taps(model, paths, with_gradient=True) as taps:
            outputs = model(inputs)
        total = summed(loss(outputs, targets), reduction=reduction, num_samples=num)
        if not torch.isfinite(total):
            raise NotFiniteError(
                f"the loss of a probe batch is {float(total.detach())}: the network diverged, or its inputs are not "
                "finite"
            )
        grads = torch.autograd.grad(total, [taps.stream[p] for p in paths], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    gradients = {p: torch.zeros_like(taps.stream[p]) if g is None else g for p, g in zip(paths, grads, strict=True)}
    return outputs, num, float(total.detach().double()), taps, gradients, ratios


def _ratio_hook(path: str, out: dict[str, tuple[float, float]]):  # type: ignore[no-untyped-def]
    def hook(_module: Block, args: tuple[Tensor, ...], delta: Tensor) -> None:
        out[path] = (float(delta.detach().double().square().sum()), float(args[0].detach().double().square().sum()))

    return hook


def candidate_features(candidate: Candidate, taps: Taps) -> Tensor:
    """Tangent features of a candidate on what it reads, without a graph. ``[B, K, P]``."""
    source = taps.stream if candidate.kind == "depth" else taps.read
    with torch.no_grad():
        return tangent_features(candidate.block, source[candidate.path].detach())


def _halves(phi_BKP: Tensor, *, first: int, every: int) -> dict[str, Any]:
    """Second-moment sums over kept samples with even and odd index; indices, not batches, decide."""
    index_B = torch.arange(first, first + phi_BKP.shape[0])
    out: dict[str, Any] = {}
    for name, parity in (("a", 0), ("b", 1)):
        kept = phi_BKP[(index_B % 2 == parity) & ((index_B // 2) % every == 0)]
        flat = kept.transpose(0, 1).flatten(1)
        out |= {f"half_{name}_KK": _array(flat @ flat.T), f"kept_{name}": kept.shape[0]}
    return out


def _array(tensor: Tensor) -> FloatArray:
    array: FloatArray = tensor.detach().to("cpu", torch.float64).numpy()
    return array


def _sketch(rows_BL: Tensor, *, seed: int) -> Tensor:
    """CountSketch of long rows: random signs, random buckets. Source: Charikar et al. 2002."""
    length = rows_BL.shape[1]
    if length <= MAX_UNIT_NUMBERS:
        return rows_BL
    rng = np.random.default_rng(seed)
    bucket = torch.from_numpy(rng.integers(0, MAX_UNIT_NUMBERS, size=length)).to(rows_BL.device)
    sign = torch.from_numpy(rng.integers(0, 2, size=length) * 2.0 - 1.0).to(rows_BL.device)
    return rows_BL.new_zeros(rows_BL.shape[0], MAX_UNIT_NUMBERS).index_add_(1, bucket, rows_BL * sign)
