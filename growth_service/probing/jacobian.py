r"""Any block that adds nothing at birth: its tangent space through Jacobian products.

Where a block is not a zero projection of features, its parameters :math:`\theta` still span a tangent
space :math:`v \mapsto Jv`. Cross-gradients are vector-Jacobian products, :math:`J^Tg`; the second moment
:math:`J^TJ/n + \lambda I` is never formed, only applied: systems with it are solved by conjugate gradients,
many right-hand sides at a time. Source: Gauss-Newton products, Schraudolph 2002 (Neural Computation
14); conjugate gradients, Hestenes and Stiefel 1952.

Shape legend: Q = parameters of the block, N = right-hand sides.
"""

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from growth_service.core.score import FloatArray
from growth_service.errors import UserError

MAX_ITERATIONS = 500
RELATIVE_RESIDUAL = 1e-12
_TRACE_PROBES = 32


def check_residual(block: nn.Module, z: Tensor) -> None:
    """A block keeps the shape of the stream, and adds nothing yet.

    Raises:
        UserError: If it does not, so that inserting it would change the outputs.
    """
    with torch.no_grad():
        change = block(z)
    if not isinstance(change, Tensor) or change.shape != z.shape:
        found = tuple(change.shape) if isinstance(change, Tensor) else type(change).__name__
        raise UserError(
            f"the block {type(block).__name__} maps a stream {tuple(z.shape)} to {found}: a residual branch keeps "
            "the shape"
        )
    if bool(change.any()):
        raise UserError(
            f"the block {type(block).__name__} already adds up to {float(change.abs().max()):.3g} to the stream: "
            "its last layer (or gate) must be zero"
        )


class ParameterTangent:
    """The map from a block's parameters to what it adds, to first order, at its present (zero) point."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._parameters = {n: p.detach() for n, p in block.named_parameters() if p.requires_grad}
        self._buffers = {n: b.detach() for n, b in block.named_buffers()}
        self._buffers |= {n: p.detach() for n, p in block.named_parameters() if not p.requires_grad}
        if not self._parameters:
            raise UserError(f"the block {type(block).__name__} has no trainable parameters: it cannot learn anything")

    @property
    def size(self) -> int:
        """Q."""
        return sum(p.numel() for p in self._parameters.values())

    def pull_back(self, z: Tensor, g: Tensor) -> Tensor:
        """J^T g, summed over samples and positions. ``[Q]``."""
        back = vjp(lambda p: self._apply(p, z), self._parameters)[1]
        return self._flat(back(g)[0])

    def normal(self, z: Tensor, weights_NQ: Tensor) -> Tensor:
        """J^T J w for many w. ``[N, Q]``."""

        def one(weights_Q: Tensor) -> Tensor:
            moved = jvp(lambda p: self._apply(p, z), (self._parameters,), (self._unflat(weights_Q),))[1]
            back = vjp(lambda p: self._apply(p, z), self._parameters)[1]
            return self._flat(back(moved)[0])

        # the fused attention kernels have no forward mode; torch still compiles its own rules with torch.jit
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
            found: Tensor = vmap(one, chunk_size=16)(weights_NQ)
        return found

    def _apply(self, parameters: dict[str, Tensor], z: Tensor) -> Tensor:
        out: Tensor = functional_call(self._block, parameters | self._buffers, (z,))
        return out

    def _flat(self, tree: dict[str, Tensor]) -> Tensor:
        return torch.cat([tree[n].reshape(-1) for n in self._parameters])

    def _unflat(self, weights_Q: Tensor) -> dict[str, Tensor]:
        sizes = [p.numel() for p in self._parameters.values()]
        pieces = weights_Q.split(sizes)
        return {n: piece.reshape(p.shape) for (n, p), piece in zip(self._parameters.items(), pieces, strict=True)}


class NormalSolver:
    """Applies (J^T J / n + lambda I)^-1, with J taken on a pool of streams.

    Args:
        tangent: Of the block.
        streams: The pool, in batches.
        num_samples: In the pool.
        ridge: Share of the mean diagonal that is added; 0 finds the least-norm solution.
        seed: Of the probes that estimate the mean diagonal.
    """

    def __init__(
        self, tangent: ParameterTangent, streams: list[Tensor], *, num_samples: int, ridge: float, seed: int
    ) -> None:
        self._tangent, self._streams, self._num = tangent, streams, num_samples
        rng = np.random.default_rng(seed)
        signs = torch.from_numpy(rng.integers(0, 2, size=(_TRACE_PROBES, tangent.size)) * 2.0 - 1.0).to(streams[0])
        trace = float((signs * self._moment(signs)).sum()) / _TRACE_PROBES
        self.ridge_lambda = ridge * trace / tangent.size
        self.residual = 0.0
        """Largest relative residual of the solutions so far: a score may be off by as much."""

    def _moment(self, weights_NQ: Tensor) -> Tensor:
        total = torch.zeros_like(weights_NQ)
        for z in self._streams:
            total += self._tangent.normal(z, weights_NQ)
        return total / self._num

    def solve(self, right_NQ: FloatArray) -> FloatArray:
        """Solutions of (Sigma + lambda) u = v for each row v. ``[N, Q]``."""
        v = torch.from_numpy(np.ascontiguousarray(right_NQ)).to(self._streams[0])
        found = conjugate_gradients(lambda w: self._moment(w) + self.ridge_lambda * w, v)
        rest = self._moment(found) + self.ridge_lambda * found - v
        self.residual = max(self.residual, float(rest.norm() / v.norm().clamp(min=torch.finfo(v.dtype).tiny)))
        array: FloatArray = found.double().cpu().numpy()
        return array


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], right_NQ: Tensor, *, max_iterations: int = MAX_ITERATIONS
) -> Tensor:
    """Solve ``apply(u) = v`` for several v at once; ``apply`` is symmetric and positive semi-definite.

    Stops where all residuals are below 1e-12 of their right-hand side (1e-6 in single precision), or
    no longer fall. A singular system with v in its range gives the least-norm solution.
    """
    relative = RELATIVE_RESIDUAL if right_NQ.dtype == torch.float64 else 1e-6
    found, rest = torch.zeros_like(right_NQ), right_NQ.clone()
    direction = rest.clone()
    size_N = rest.square().sum(dim=1)
    stop_N = size_N * relative**2
    for _ in range(max_iterations):
        busy_N = size_N > stop_N
        if not bool(busy_N.any()):
            break
        moved = apply(direction)
        curvature_N = (direction * moved).sum(dim=1)
        busy_N &= curvature_N > 0
        step_N = torch.where(busy_N, size_N / torch.where(busy_N, curvature_N, 1.0), 0.0)
        found += step_N[:, None] * direction
        rest -= step_N[:, None] * moved
        new_N = rest.square().sum(dim=1)
        ratio_N = torch.where(busy_N, new_N / torch.where(size_N > 0, size_N, 1.0), 0.0)
        direction = rest + ratio_N[:, None] * direction
        size_N = torch.where(busy_N, new_N, torch.zeros_like(new_N))
    return found
