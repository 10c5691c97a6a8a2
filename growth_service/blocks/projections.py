r"""What a zero output projection can express, to first order.

The parameters :math:`\theta` of a projection enter the branch linearly, so its tangent space is
spanned by its features. Every kind is a matrix with one row a coordinate of the stream and one
column a feature; what differs is whether all rows share their features:

* ``nn.Linear`` and ``nn.Conv2d``: all rows read the same features (unfolded patches for a
  convolution), and the constant one where there is a bias; the second moment is ``[K, K]``.
* gates: every row has features of its own, so there is one small second moment a row,
  ``[D, K, K]``: a scale per channel (K = 1), scale and shift (K = 2), one scale for all (D = K = 1).

Sources of the gates: LayerScale, Touvron et al. 2021 (arXiv:2103.17239); zero-gamma, Goyal et al.
2017 (arXiv:1706.02677); ReZero, Bachlechner et al. 2020 (arXiv:2003.04887).

Shape legend: B = batch, D = rows, K = features, P = positions.
"""

import torch
import torch.nn.grad
from torch import Tensor, nn

from growth_service.errors import UserError


class ScalarGate(nn.Module):
    """``alpha * F`` with one number: a one-dimensional tangent space, almost always saturated."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(1))

    def forward(self, branch: Tensor) -> Tensor:
        """Scaled branch; same shape."""
        return self.alpha * branch


class ChannelGate(nn.Module):
    """``gamma_c * F_c`` with one number a channel; channels are axis 1 of images, else the last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(width))

    def forward(self, branch: Tensor) -> Tensor:
        """Scaled branch; same shape."""
        return _over_channels(self.gamma, branch) * branch


class AffineGate(nn.Module):
    """``gamma_c * F_c + beta_c``: the zero-gamma of a normalisation layer at the end of a branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(width))
        self.beta = nn.Parameter(torch.zeros(width))

    def forward(self, branch: Tensor) -> Tensor:
        """Scaled and shifted branch; same shape."""
        return _over_channels(self.gamma, branch) * branch + _over_channels(self.beta, branch)


Projection = nn.Linear | nn.Conv2d | ScalarGate | ChannelGate | AffineGate


def _over_channels(values_C: Tensor, like: Tensor) -> Tensor:
    return values_C[:, None, None] if like.ndim == 4 else values_C


def projection_shape(project: Projection) -> tuple[int, int]:
    """Rows D and features K of a projection's matrix."""
    match project:
        case nn.Linear():
            return project.out_features, project.in_features + (project.bias is not None)
        case nn.Conv2d():
            return project.out_channels, project.weight[0].numel() + (project.bias is not None)
        case ScalarGate():
            return 1, 1
        case ChannelGate():
            return project.gamma.numel(), 1
        case AffineGate():
            return project.gamma.numel(), 2


def shares_features(project: Projection) -> bool:
    """Whether all rows read the same features: one second moment ``[K, K]`` in place of one a row."""
    return isinstance(project, nn.Linear | nn.Conv2d)


def add_cross_gradient(project: Projection, g: Tensor, phi: Tensor, *, to: Tensor) -> None:
    """Add the gradient of the zero projection, summed over samples and positions, to ``to`` ``[D, K]``.

    Args:
        project: The projection.
        g: Gradient of the loss with respect to the stream, in the stream's layout; of a stream with more channels
            than the projection has rows, the last ones are its own.
        phi: The block's features on the same samples.
        to: Changed in place.
    """
    match project:
        case nn.Linear():
            g_ND = g.reshape(-1, g.shape[-1])[:, -project.out_features :]
            to[:, : project.in_features].addmm_(g_ND.T, phi.reshape(-1, phi.shape[-1]))
            if project.bias is not None:
                to[:, -1].add_(g_ND.sum(dim=0))
        case nn.Conv2d():
            g = g[:, -project.out_channels :]
            if project.kernel_size == (1, 1):
                weight = torch.einsum("bdp,bkp->dk", g.flatten(2), phi.flatten(2))
            else:
                weight = torch.nn.grad.conv2d_weight(
                    phi, project.weight.shape, g, project.stride, project.padding, project.dilation
                ).flatten(1)
            to[:, : weight.shape[1]].add_(weight)
            if project.bias is not None:
                to[:, -1].add_(g.sum(dim=(0, 2, 3)))
        case ScalarGate():
            to.add_((g * phi).sum())
        case ChannelGate():
            to[:, 0].add_(_sum_over_positions(g * phi))
        case AffineGate():
            to[:, 0].add_(_sum_over_positions(g * phi))
            to[:, 1].add_(_sum_over_positions(g))


def second_moment(project: Projection, phi: Tensor) -> Tensor:
    """Sum of phi phi^T over samples and positions, one a row of a gate. ``[D, K, K]``."""
    assert not shares_features(project)
    if isinstance(project, ScalarGate):
        return phi.square().sum().reshape(1, 1, 1)
    squares = _sum_over_positions(phi.square())
    if isinstance(project, ChannelGate):
        return squares[:, None, None]
    sums, count = _sum_over_positions(phi), phi.numel() // phi.shape[1 if phi.ndim == 4 else -1]
    ones = torch.full_like(sums, count)
    return torch.stack([torch.stack([squares, sums], dim=1), torch.stack([sums, ones], dim=1)], dim=1)


def _sum_over_positions(values: Tensor) -> Tensor:
    """Sum over all but the channel axis. ``[C]``."""
    return values.sum(dim=(0, 2, 3)) if values.ndim == 4 else values.reshape(-1, values.shape[-1]).sum(dim=0)


def patches(project: nn.Linear | nn.Conv2d, phi: Tensor, *, positions_BQ: Tensor | None = None) -> Tensor:
    """Features per position with the constant: what the projection's matrix multiplies. ``[B, P, K]``.

    Args:
        project: The projection.
        phi: The block's features.
        positions_BQ: Indices of the positions wanted of each sample. None: all.
    """
    if isinstance(project, nn.Conv2d):
        padding = project.padding
        assert not isinstance(padding, str)
        flat = nn.functional.unfold(phi, project.kernel_size, project.dilation, padding, project.stride)
        flat = flat.transpose(1, 2)
    else:
        flat = phi.reshape(phi.shape[0], -1, phi.shape[-1])
    if positions_BQ is not None:
        flat = flat.gather(1, positions_BQ[:, :, None].expand(-1, -1, flat.shape[2]))
    if project.bias is None:
        return flat
    return torch.cat([flat, flat.new_ones(*flat.shape[:2], 1)], dim=2)


def tangent_features(block: nn.Module, z: Tensor) -> Tensor:
    """Features per position, such that ``delta_p = [W, b] phi_p``: unfolded, with the constant.

    Args:
        block: A block whose rows share their features (no gate).
        z: The stream.

    Returns:
        ``[B, K, P]``; K = hidden * kernel area (+ 1 with a bias), the columns of
        :func:`flatten_projection`.
    """
    return patches(block.project, block.features(z)).transpose(1, 2)  # type: ignore[arg-type,operator]


def stream_positions(z: Tensor) -> Tensor:
    """A stream tensor as ``[B, D, P]``: vectors have one position, images H*W, sequences T.

    Raises:
        UserError: If the tensor has no batch and channel axes.
    """
    match z.ndim:
        case 2:
            return z.unsqueeze(2)
        case 3:
            return z.transpose(1, 2)
        case 4:
            return z.flatten(2)
        case _:
            raise UserError(f"a residual stream is [B, d], [B, T, d] or [B, C, H, W], got shape {tuple(z.shape)}")


def flatten_projection(project: Projection) -> Tensor:
    """All parameters of a projection as one matrix. ``[D, K]``."""
    match project:
        case nn.Linear() | nn.Conv2d():
            weight = project.weight.flatten(1)
            return weight if project.bias is None else torch.cat([weight, project.bias[:, None]], dim=1)
        case ScalarGate():
            return project.alpha[:, None]
        case ChannelGate():
            return project.gamma[:, None]
        case AffineGate():
            return torch.stack([project.gamma, project.beta], dim=1)


@torch.no_grad()
def set_projection(project: Projection, matrix_DK: Tensor) -> None:
    """Inverse of :func:`flatten_projection`: write a matrix into the parameters."""
    matrix_DK = matrix_DK.to(next(project.parameters()))
    match project:
        case nn.Linear() | nn.Conv2d():
            if project.bias is not None:
                project.bias.copy_(matrix_DK[:, -1])
                matrix_DK = matrix_DK[:, :-1]
            project.weight.copy_(matrix_DK.reshape(project.weight.shape))
        case ScalarGate():
            project.alpha.copy_(matrix_DK[:, 0])
        case ChannelGate():
            project.gamma.copy_(matrix_DK[:, 0])
        case AffineGate():
            project.gamma.copy_(matrix_DK[:, 0])
            project.beta.copy_(matrix_DK[:, 1])
