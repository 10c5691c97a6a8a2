"""More channels for a residual stream, without changing the network's function (to rounding).

Every layer that writes the stream gets rows for the new channels, every layer that reads it gets columns, every
norm over it covers them too. What new rows and columns are at first depends on the norms, such that outputs stay as
they are and every new number gets a gradient, at once or after one step:

* RMSNorm: rows zero, columns random. Zeros keep the root mean square known (see ``extend_norm``).
* LayerNorm: rows the mean of the old ones, so that new channels hold the mean of the old, which keeps mean and
  variance known; normed they are zero. Columns random.
* GroupNorm, BatchNorm: new channels are normed by themselves, so rows may be random, and columns are zero. (Zero rows
  would be exact too, but a norm blows a channel near zero up by 1 / sqrt(eps): the first step would be a jump.)

Sources: Wang et al. 2024, "LEMON" (arXiv:2310.07999); Gesmundo and Maile 2023 (arXiv:2308.06103); Evci et al. 2022,
"GradMax" (arXiv:2201.05125), for one side zero and the other not.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from growth_service.blocks import Block
from growth_service.blocks.composed import (
    check_extendable,
    extend_norm,
    extend_reader,
    extend_writer,
    plain_type,
    retract,
)
from growth_service.core.receipts import Receipt
from growth_service.errors import SiteError, UserError
from growth_service.growth import log
from growth_service.growth.check import growable, largest_change, outputs, renew_graphs, untied, whole_number
from growth_service.growth.sharding import check_unsharded
from growth_service.growth.transplant import Optimizers, adopt
from growth_service.models.families import GPT, Family, Group, TokenEmbedding
from growth_service.models.streams import resolve

_ON_STREAM = re.compile(r"groups\.\d+\.(entry|blocks\.\d+)(\.branch)?(\.(grown|widened)\.\d+)*")
"""Paths of blocks that read and write a stream."""
Start = Literal["mean", "zero", "random"]
"""What the new rows of writers are at first."""
ROUNDING = 5e-6
"""Largest change of an output, relative to the largest output, that counts as rounding (single precision)."""
_DOUBLE_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The layers on one stream, by path."""

    writers: dict[str, nn.Module]
    readers: dict[str, nn.Module]
    """Of the normed stream; of the raw one where it is followed by another group."""
    norms: dict[str, nn.Module]
    blocks: list[Block]


@torch.no_grad()
def widen_stream(
    model: nn.Module,
    *,
    site: str,
    channels: int,
    generator: torch.Generator,
    optimizer: Optimizers | None = None,
    check_batch: Any = None,
) -> Receipt:
    """Add channels to the residual stream that passes through ``site``.

    Args:
        model: A network of one of this project's families.
        site: Any site on the stream; all sites of a group share one.
        channels: How many more; whole groups where norms are GroupNorm.
        generator: Of random rows or columns, as large as the old ones of the same matrix.
        optimizer: If given, adopts the new parameters.
        check_batch: Inputs on which outputs before and after are compared: they agree to 5e-6 of the largest output
            in single precision.

    Returns:
        The receipt, also appended to :func:`growth_log`.

    Raises:
        SiteError: If there is no such stream.
        UserError: If a layer on it cannot follow, or outputs moved by more than rounding (the network is left as it
            was).
    """
    model = growable(model)
    check_unsharded(model, what="a wider stream")
    group = _group_of(model, site)
    parts = parts_of(model, group)
    channels = whole_number(channels, what="channels")
    if channels < 1:
        raise UserError(f"a stream is widened by at least 1 channel, got {channels}")
    start = _check(parts, channels=channels)
    untied(model, [*parts.writers, *parts.readers, *parts.norms])
    before = None if check_batch is None else outputs(model, check_batch)
    undo = _remember(model, group, parts)
    named = _extend(parts, channels=channels, start=start, generator=generator)
    _restate(model, group, parts, channels)
    renew_graphs()
    try:
        change = None
        if before is not None:
            change = largest_change(before, outputs(model, check_batch))
            if not change <= rounding_of(before):  # NaN is refused too
                raise UserError(
                    f"{channels} more channels at {site!r} change outputs by {change:.3g}: more than rounding"
                )
        if optimizer is not None:
            adopt(optimizer, named, model=model)
    except Exception:
        undo()
        raise
    receipt = Receipt(
        kind="stream",
        path=group,
        block={"channels": channels},
        parameters=tuple(named),
        parameters_added=sum(p.numel() for p in named.values()),
        output_change=change,
    )
    log.append(model, receipt)
    return receipt


def rounding_of(outputs_before: Tensor) -> float:
    """Largest change of an output that is taken for rounding."""
    kind = outputs_before.dtype
    shares = {torch.float64: _DOUBLE_ROUNDING, torch.float32: ROUNDING}
    return shares.get(kind, 4 * torch.finfo(kind).eps) * float(outputs_before.abs().max())


def replay_stream(model: nn.Module, group: str, *, channels: int, generator: torch.Generator) -> tuple[str, ...]:
    """The same without weights that matter: names of the new parameters, for a log that is replayed."""
    parts = parts_of(model, group)
    named = _extend(parts, channels=channels, start=_check(parts, channels=channels), generator=generator)
    _restate(model, group, parts, channels)
    return tuple(named)


def _group_of(model: nn.Module, site: str) -> str:
    """Path of the group whose stream passes through a site."""
    if not isinstance(model, Family):
        raise SiteError(
            f"the stream of a {type(model).__name__} cannot be widened: it is known for this project's own families "
            "only, whose layers on a stream are all known"
        )
    resolve(model, site)
    head = ".".join(site.split(".")[:2])
    if not site.startswith("groups.") or not isinstance(model.get_submodule(head), Group):
        raise SiteError(f"{site!r} is on no residual stream: name a site, for example 'groups.0.entry'")
    return head


def parts_of(model: nn.Module, group_path: str) -> Parts:
    """All layers on the stream of a group."""
    assert isinstance(model, Family)
    group = model.get_submodule(group_path)
    assert isinstance(group, Group)
    writers = {f"{group_path}.entry.{p}".rstrip("."): m for p, m in _entry_writers(group.entry)}
    readers: dict[str, nn.Module] = {}
    norms: dict[str, nn.Module] = {}
    last = group_path == f"groups.{len(model.groups) - 1}"
    around = [p for p, m in model.named_modules() if isinstance(m, Block) and last and p.startswith(("norm.", "head."))]
    blocks = [(p, m) for p, m in group.named_modules(prefix=group_path) if isinstance(m, Block)]
    for path in [*around, *(p for p, _ in blocks if not _ON_STREAM.fullmatch(p))]:
        raise UserError(
            f"the stream cannot be widened: the block at {path!r} is on no residual stream of the network; remove it "
            "first"
        )
    for path, block in blocks:
        writers[f"{path}.project"] = block.project
        for names, found in ((block.stream_readers, readers), (block.stream_norms, norms)):
            found.update({f"{path}.{n}": block.get_submodule(n) for n in names})
    following = f"groups.{int(group_path.split('.')[1]) + 1}.entry"
    if len(model.groups) > int(following.split(".")[1]):
        readers[following] = model.get_submodule(following)
    else:
        norms["norm"], readers["head"] = model.get_submodule("norm"), model.get_submodule("head")
    norms = {p: m for p, m in norms.items() if not isinstance(m, nn.Identity)}
    return Parts(writers=writers, readers=readers, norms=norms, blocks=[b for _, b in blocks])


def _entry_writers(entry: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(entry, TokenEmbedding):
        yield "tokens", entry.tokens
        if entry.positions is not None:
            yield "positions", entry.positions
    else:
        yield "", entry


def _check(parts: Parts, *, channels: int) -> Start:
    """Refuse what cannot follow, before anything changes; returns what new rows are at first.

    Raises:
        UserError: Naming the layer.
    """
    for path, layer in [*parts.writers.items(), *parts.readers.items(), *parts.norms.items()]:
        check_extendable(layer, path=path)
    for block in parts.blocks:
        if not block.stream_readers:
            raise UserError(f"the stream cannot be widened: a block of type {block.type_name!r} on it cannot follow")
    kinds = {plain_type(n) for n in parts.norms.values()}
    by_channel = kinds <= {nn.GroupNorm, nn.BatchNorm2d}
    if len(kinds) > 1 and not by_channel:
        names = ", ".join(sorted(k.__name__ for k in kinds))
        raise UserError(
            f"the stream cannot be widened: its norms are {names}, and each needs new channels to start in another "
            "way (LayerNorm: the mean of the old ones, RMSNorm: zero, GroupNorm and BatchNorm: at random)"
        )
    for path, norm in parts.norms.items():
        if not isinstance(norm, nn.GroupNorm):
            continue
        size = norm.num_channels // norm.num_groups
        if norm.num_groups == 1 or channels % size:
            raise UserError(
                f"{channels} channels do not fill whole groups of {path!r} ({norm.num_groups} groups of {size}): old "
                f"groups would change; add a multiple of {size} to a norm of several groups"
            )
    return "mean" if nn.LayerNorm in kinds else "random" if kinds and by_channel else "zero"


def _extend(parts: Parts, *, channels: int, start: Start, generator: torch.Generator) -> dict[str, nn.Parameter]:
    """Give every layer its pieces."""
    named: dict[str, nn.Parameter] = {}

    def note(path: str, new: dict[str, nn.Parameter]) -> None:
        named.update({f"{path}.{name}": p for name, p in new.items()})

    for path, layer in parts.writers.items():
        weight, bias = layer.weight, layer.bias if hasattr(layer, "bias") else None
        assert isinstance(weight, Tensor)
        axis = 1 if isinstance(layer, nn.Embedding) else 0
        rows = _first_rows(weight, axis=axis, num=channels, start=start, generator=generator)
        quiet: Start = "zero" if start == "random" else start
        added = None
        if isinstance(bias, Tensor):
            added = _first_rows(bias, axis=0, num=channels, start=quiet, generator=generator)
        note(path, extend_writer(layer, rows, added))
    for path, layer in parts.readers.items():
        weight = layer.weight
        assert isinstance(weight, Tensor)
        columns = _drawn((weight.shape[0], channels, *weight.shape[2:]), like=weight, generator=generator)
        note(path, extend_reader(layer, torch.zeros_like(columns) if start == "random" else columns))
    for path, layer in parts.norms.items():
        note(path, extend_norm(layer, channels))
    return named


def _first_rows(values: Tensor, *, axis: int, num: int, start: Start, generator: torch.Generator) -> Tensor:
    """What a writer writes to new channels at first."""
    shape = list(values.shape)
    shape[axis] = num
    match start:
        case "mean":
            return values.mean(dim=axis, keepdim=True).expand(shape).clone()
        case "zero":
            return values.new_zeros(shape)
        case "random":
            return _drawn(shape, like=values, generator=generator)


def _drawn(shape: Sequence[int], *, like: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers, as large as those of an old matrix."""
    drawn = torch.randn(list(shape), generator=generator).to(like)
    return drawn * like.square().mean().sqrt()


def _restate(model: nn.Module, group: str, parts: Parts, channels: int) -> None:
    """Keep the sizes that blocks and entries state about themselves."""
    for block in parts.blocks:
        block.restate(width=channels)
    entry = model.get_submodule(f"{group}.entry")
    if isinstance(entry, TokenEmbedding):
        entry.embedding_dim += channels
    if isinstance(model, GPT):  # of blocks that a network without any would get
        head_dim = model.branch.get("head_dim") or model.branch["width"] // model.branch["heads"]
        model.branch |= {
            "width": model.branch["width"] + channels,
            "head_dim": head_dim,
            "norm_eps": model.get_submodule("norm").eps,
        }


def _remember(model: nn.Module, group: str, parts: Parts) -> Callable[[], None]:
    """How to take the pieces off again, and to state the sizes as before."""
    configs = [(block, dict(block._config)) for block in parts.blocks]
    entry = model.get_submodule(f"{group}.entry")
    width = entry.embedding_dim if isinstance(entry, TokenEmbedding) else None
    branch = dict(model.branch) if isinstance(model, GPT) else None

    def undo() -> None:
        for layer in [*parts.writers.values(), *parts.readers.values(), *parts.norms.values()]:
            retract(layer)
        for block, config in configs:
            block._config = config
        if isinstance(entry, TokenEmbedding) and width is not None:
            entry.embedding_dim = width
        if isinstance(model, GPT) and branch is not None:
            model.branch = branch
        renew_graphs()

    return undo
