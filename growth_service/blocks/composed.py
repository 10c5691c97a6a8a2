"""Layers whose weights are an old matrix and pieces added to it: how a residual stream gets more channels.

A layer that reads or writes a stream needs more columns or rows when the stream gets wider. They are parameters of
their own, ``<layer>.wider.<id>.columns`` and the like, and the layer's ``weight`` and ``bias`` are put together from
them at every use. So the old parameter keeps its name, its bits and its optimiser state, and the new one starts
with a zero state and a step count of its own (padding an old tensor would inherit the count, and Adam's first
updates would be several times the learning rate). :func:`dense` makes one matrix of them again.

Shape legend: O = outputs, I = inputs, D = old channels, N = new channels.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from growth_service.errors import UserError


class Piece(nn.Module):
    """New parameters of one layer, from one step."""

    columns: nn.Parameter | None
    rows: nn.Parameter | None
    bias: nn.Parameter | None
    norm_before: tuple[float, float | None] | None = None
    """Scale and epsilon of a norm as they were."""

    def __init__(
        self, *, columns: Tensor | None = None, rows: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        for name, value in (("columns", columns), ("rows", rows), ("bias", bias)):
            self.register_parameter(name, None if value is None else nn.Parameter(value))


class Extended(nn.Module):
    """A layer with pieces. Never built: ``extend_...`` turns a layer into one, :func:`retract` back."""

    plain: ClassVar[type[nn.Module]]
    wider: nn.ModuleDict


class Composed(Extended):
    """A layer whose weight and bias are put together from pieces."""

    scale: float
    """By which the whole weight of a norm is multiplied (see :func:`extend_norm`)."""

    @property
    def pieces(self) -> list[Piece]:
        """In the order in which they were added."""
        return [piece for piece in self.wider.values() if isinstance(piece, Piece)]

    @property
    def weight(self) -> Tensor:
        """Old weight and pieces, put together."""
        whole: Tensor | None = self._parameters["weight"]
        assert whole is not None
        for piece in self.pieces:
            if piece.columns is not None:
                whole = torch.cat([whole, piece.columns], dim=1)
            if piece.rows is not None:
                whole = torch.cat([whole, piece.rows], dim=0)
        return whole if self.scale == 1.0 else whole * self.scale

    @property
    def bias(self) -> Tensor | None:
        """Old bias and pieces, put together."""
        found = self._parameters.get("bias")
        added = [piece.bias for piece in self.pieces if piece.bias is not None]
        return found if found is None or not added else torch.cat([found, *added])


class _Linear(Composed, nn.Linear):  # type: ignore[misc,override]  # a property in place of an attribute
    plain = nn.Linear


class _Conv2d(Composed, nn.Conv2d):  # type: ignore[override]
    plain = nn.Conv2d


class _Embedding(Composed, nn.Embedding):  # type: ignore[override]
    plain = nn.Embedding


class _LayerNorm(Composed, nn.LayerNorm):  # type: ignore[misc]
    plain = nn.LayerNorm


class _RMSNorm(Composed, nn.RMSNorm):  # type: ignore[misc]
    plain = nn.RMSNorm


class _GroupNorm(Composed, nn.GroupNorm):  # type: ignore[misc]
    plain = nn.GroupNorm


class _BatchNorm2d(Extended, nn.BatchNorm2d):
    """BatchNorm is a norm a channel: each stretch of channels has one of its own, with its own statistics."""

    plain = nn.BatchNorm2d

    @property
    def norms(self) -> list[nn.BatchNorm2d]:
        """Of the channels added, in order."""
        return [norm for norm in self.wider.values() if isinstance(norm, nn.BatchNorm2d)]

    def forward(self, images: Tensor) -> Tensor:
        """Normalised channels; same shape."""
        first, *others = images.split([len(self.weight), *(n.num_features for n in self.norms)], dim=1)
        return torch.cat(
            [super().forward(first), *(n(part) for n, part in zip(self.norms, others, strict=True))], dim=1
        )

    def whole(self) -> dict[str, Tensor]:
        """Weights, biases and statistics of all channels."""
        names = ("weight", "bias", "running_mean", "running_var")
        return {name: torch.cat([getattr(n, name).detach() for n in (self, *self.norms)]) for name in names}


_EXTENDED: dict[type[nn.Module], type[Extended]] = {
    c.plain: c for c in (_Linear, _Conv2d, _Embedding, _LayerNorm, _RMSNorm, _GroupNorm, _BatchNorm2d)
}


def plain_type(layer: nn.Module) -> type[nn.Module]:
    """Its class, as if nothing had been added."""
    return layer.plain if isinstance(layer, Extended) else type(layer)


def check_extendable(layer: nn.Module, *, path: str) -> None:
    """Refuse layers that cannot get pieces, before anything changes.

    Raises:
        UserError: Naming the layer and its type.
    """
    grouped = isinstance(layer, nn.Conv2d) and layer.groups != 1
    if plain_type(layer) not in _EXTENDED or grouped or layer._parameters.get("weight") is None:
        kind = f"{type(layer).__name__} with {layer.groups} groups" if grouped else type(layer).__name__
        raise UserError(
            f"the stream cannot be widened: {path!r} is a {kind}; layers that can follow are linear maps, plain "
            "convolutions, embeddings, LayerNorm, RMSNorm, GroupNorm and BatchNorm, with weights"
        )


@torch.no_grad()
def extend_reader(layer: nn.Module, columns: Tensor) -> dict[str, nn.Parameter]:
    """Let a linear map or convolution read more channels. ``columns``: ``[O, N, ...]``; returns what is new."""
    named = _add(layer, Piece(columns=columns))
    _count(layer, inputs=columns.shape[1])
    return named


@torch.no_grad()
def extend_writer(layer: nn.Module, rows: Tensor, bias: Tensor | None) -> dict[str, nn.Parameter]:
    """Let a layer write more channels. ``rows``: ``[N, I, ...]``, of an embedding its new columns ``[V, N]``."""
    if isinstance(layer, nn.Embedding):
        named = _add(layer, Piece(columns=rows))
        _count(layer, inputs=rows.shape[1])
        return named
    named = _add(layer, Piece(rows=rows, bias=bias))
    _count(layer, outputs=rows.shape[0])
    return named


@torch.no_grad()
def extend_norm(layer: nn.Module, num: int) -> dict[str, nn.Parameter]:
    r"""Let a norm cover more channels, such that it gives the old ones what it gave before.

    LayerNorm and RMSNorm divide by a root mean square over all channels: where the new ones hold zero (RMSNorm) or
    the mean (LayerNorm), it shrinks by :math:`\eta = \sqrt{d/d'}`, so the weight is multiplied by
    :math:`\eta` and epsilon by :math:`\eta^2`. GroupNorm gets groups of their own for the new channels, BatchNorm
    normalises each channel by itself anyway.

    Sources: average expansion, Wang et al. 2024, "LEMON" (arXiv:2310.07999); RMSNorm rescaling, Gesmundo and
    Maile 2023, "Composable Function-preserving Expansions" (arXiv:2308.06103).
    """
    like = layer._parameters["weight"]
    assert like is not None
    if isinstance(layer, nn.BatchNorm2d):
        norm = nn.BatchNorm2d(num, eps=layer.eps, momentum=layer.momentum).to(like)
        layer.num_features += num
        return _add(layer, norm)
    ones = torch.ones(num).to(like)
    zeros = None if layer._parameters.get("bias") is None else torch.zeros(num).to(like)
    piece = Piece(rows=ones, bias=zeros)
    named = _add(layer, piece)
    if isinstance(layer, nn.GroupNorm):
        layer.num_groups += num // (layer.num_channels // layer.num_groups)
        layer.num_channels += num
        return named
    assert isinstance(layer, nn.LayerNorm | nn.RMSNorm)
    assert isinstance(layer, Composed)
    (old,) = layer.normalized_shape
    piece.norm_before = (layer.scale, layer.eps)
    eps = torch.finfo(like.dtype).eps if layer.eps is None else layer.eps
    layer.normalized_shape = (old + num,)
    layer.scale *= math.sqrt(old / (old + num))
    layer.eps = eps * old / (old + num)
    return named


def retract(layer: nn.Module) -> None:
    """Take the last piece off again; the last of all makes the layer what it was."""
    assert isinstance(layer, Extended)
    last = str(len(layer.wider) - 1)
    piece = layer.wider[last]
    del layer.wider[last]
    if isinstance(layer, _BatchNorm2d):
        layer.num_features -= piece.num_features  # type: ignore[assignment,operator]
    else:
        assert isinstance(layer, Composed)
        assert isinstance(piece, Piece)
        _shorten(layer, piece)
    if not layer.wider:
        _make_plain(layer)


def _shorten(layer: Composed, piece: Piece) -> None:
    """Keep the sizes that a layer states about itself after it lost a piece."""
    if piece.columns is not None:
        _count(layer, inputs=-piece.columns.shape[1])
    num = 0 if piece.rows is None else len(piece.rows)
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        assert piece.norm_before is not None
        layer.normalized_shape = (layer.normalized_shape[0] - num,)
        layer.scale, layer.eps = piece.norm_before
    elif isinstance(layer, nn.GroupNorm):
        layer.num_groups -= num // (layer.num_channels // layer.num_groups)
        layer.num_channels -= num
    elif piece.rows is not None:
        _count(layer, outputs=-num)


@torch.no_grad()
def dense(layer: nn.Module) -> None:
    """Make one weight and one bias of a layer's pieces, in place; it is a plain layer again (to rounding)."""
    if not isinstance(layer, Extended):
        return
    whole = _whole(layer)
    _make_plain(layer)
    for name, value in whole.items():
        if name in layer._buffers:
            layer.register_buffer(name, value.clone())
        else:
            layer.register_parameter(name, nn.Parameter(value.clone()))


def dense_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of a module with the pieces of its layers put together, under the names of plain layers."""
    state = {name: value for name, value in module.state_dict().items() if ".wider." not in f".{name}"}
    for path, layer in module.named_modules():
        if isinstance(layer, Extended):
            state |= {f"{path}.{name}" if path else name: value for name, value in _whole(layer).items()}
    return state


def _whole(layer: Extended) -> dict[str, Tensor]:
    """Tensors of the plain layer that an extended one amounts to."""
    if isinstance(layer, _BatchNorm2d):
        return layer.whole()
    assert isinstance(layer, Composed)
    both = {"weight": layer.weight, "bias": layer.bias}
    return {name: value.detach() for name, value in both.items() if value is not None}


def _add(layer: nn.Module, piece: nn.Module) -> dict[str, nn.Parameter]:
    """Attach a piece; the layer puts its weight together from now on."""
    if not isinstance(layer, Extended):
        extended = _EXTENDED[type(layer)]
        layer.add_module("wider", nn.ModuleDict())
        if issubclass(extended, Composed):
            layer.__dict__["scale"] = 1.0
        layer.__class__ = extended
    assert isinstance(layer, Extended)
    identifier = str(len(layer.wider))
    piece.train(layer.training)
    layer.wider[identifier] = piece
    return {f"wider.{identifier}.{name}": p for name, p in piece.named_parameters()}


def _make_plain(layer: Extended) -> None:
    del layer.wider
    layer.__dict__.pop("scale", None)
    layer.__class__ = layer.plain  # type: ignore[assignment]


def _count(layer: Any, *, inputs: int = 0, outputs: int = 0) -> None:
    """Keep the sizes that a layer states about itself."""
    if isinstance(layer, nn.Embedding):
        layer.embedding_dim += inputs
    elif isinstance(layer, nn.Conv2d):
        layer.in_channels += inputs
        layer.out_channels += outputs
    else:
        layer.in_features += inputs
        layer.out_features += outputs
