"""Whitened cross-gradients of chunks, cut down to a fixed number of numbers each.

A row must keep inner products with other rows. A whitened cross-gradient ``[D, R]`` of up to 32,768 entries
is kept whole: cutting it down costs power, since the noise of inner products grows with every direction
that shares a number with another. Where there are more, whitening alone would cost too much, so its rows are
multiplied by random signs from the right, a matrix of their own for every group of rows, to 16,384 numbers.
Sources: random projections, Achlioptas 2003 (J. Comput. Syst. Sci. 66); random signs and buckets,
Charikar et al. 2002.

Shape legend: D = rows of the projection, J = features, R = whitened directions.
"""

import numpy as np
import torch
from torch import Tensor

from growth_service.core.score import FloatArray

MAX_EXACT = 32768
"""Numbers of a whitened cross-gradient that are kept whole."""
MAX_NUMBERS = 16384
"""Numbers kept of a larger one: inner products are kept in expectation."""
_ROW_GROUPS = 16
_MAX_ROWS = 256


class Sketch:
    """The fixed linear map from a cross-gradient to its row.

    Args:
        root: Q (or M Q, where existing features are taken off). ``[J, R]`` or ``[D, J, R]``. None: the identity.
        shape: D and J of the cross-gradients.
        seed: Of the signs, fixed before any gradient is seen.
        like: Gives device and number type.
    """

    def __init__(self, root: FloatArray | None, *, shape: tuple[int, int], seed: int, like: Tensor) -> None:
        rng = np.random.default_rng(seed)
        self._map: Tensor | None = None
        self._signs: Tensor | None = None
        self._bucket: Tensor | None = None
        self._groups = 0
        self.is_lossy = False
        """Whether rows have fewer numbers than whitened cross-gradients."""
        rows, size = shape[0], shape[0] * (shape[1] if root is None else root.shape[-1])
        self.numbers = size
        if root is None:
            return
        if root.ndim == 3 or size <= MAX_EXACT:
            self._map = torch.from_numpy(np.ascontiguousarray(root)).to(like)
            return
        self.is_lossy = True
        kept = min(rows, _MAX_ROWS)
        if kept < rows:
            self._bucket = torch.from_numpy(rng.integers(0, kept, size=rows)).to(like.device)
            self._signs = torch.from_numpy(rng.integers(0, 2, size=(rows, 1)) * 2.0 - 1.0).to(like)
        self._groups = min(_ROW_GROUPS, kept, max(1, root.shape[1] * kept // MAX_NUMBERS))  # no larger than the root
        self._padded = -(-kept // self._groups) * self._groups
        columns = max(1, MAX_NUMBERS // self._padded)
        signs = rng.integers(0, 2, size=(root.shape[1], self._groups * columns), dtype=np.int8)
        mixed = torch.from_numpy(np.ascontiguousarray(root)).to(like) @ (torch.from_numpy(signs).to(like) * 2 - 1)
        mixed = mixed.reshape(root.shape[0], self._groups, columns) / columns**0.5
        self._map = mixed.transpose(0, 1).contiguous()
        self.numbers = self._padded * columns

    def __call__(self, cross_DJ: Tensor) -> Tensor:
        """The row of a cross-gradient. ``[numbers]``."""
        if self._map is None:
            return cross_DJ.flatten()
        if self._groups:
            return self._project(cross_DJ, self._map)
        if self._map.ndim == 3:
            return torch.einsum("dj,djr->dr", cross_DJ, self._map).flatten()
        return (cross_DJ @ self._map).flatten()

    def _project(self, cross_DJ: Tensor, map_GJC: Tensor) -> Tensor:
        if self._bucket is not None and self._signs is not None:
            kept = cross_DJ.new_zeros(_MAX_ROWS, cross_DJ.shape[1])
            cross_DJ = kept.index_add_(0, self._bucket, cross_DJ * self._signs)
        if self._padded > cross_DJ.shape[0]:
            cross_DJ = torch.nn.functional.pad(cross_DJ, (0, 0, 0, self._padded - cross_DJ.shape[0]))
        return torch.bmm(cross_DJ.reshape(self._groups, -1, cross_DJ.shape[1]), map_GJC).flatten()
