"""Candidates for a probe, and the execution of a grow step on a live network.

Inner weights of a candidate depend on (trial seed, stage, kind, path) alone, so the block that
was scored is the block that is inserted, on every rank and after every resume.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn, optim

from growth_service.blocks import Block, copy_of, set_projection
from growth_service.blocks.composed import dense_state
from growth_service.core.policies import Sight
from growth_service.core.receipts import Receipt
from growth_service.core.steps import AddBlock, AddChannels, AddData, AddHeads, AddUnits, Change, Deepen, Widen
from growth_service.core.streams import stream_seed
from growth_service.errors import SiteError
from growth_service.growth import insert_block, new_units, record_jumpboard, widen, widen_stream
from growth_service.growth.widen import new_heads
from growth_service.models import default_block, resolve, sites
from growth_service.models.flops import FlopCounter
from growth_service.models.sites import blocks_of, existing_block, reader
from growth_service.probing import Candidate, Jumpboard, jumpboard
from growth_service.probing.jumpboard import clipped_direction
from growth_service.training.batches import chunks_of
from growth_service.training.data import Split
from growth_service.training.evaluate import CHUNK, loss_sum
from growth_service.training.expansion import expand
from growth_service.training.ranks import Ranks

CHECKED_SAMPLES = 64
"""Training samples on which outputs before and after a step are compared."""


def candidates(model: nn.Module, sight: Sight, *, stage: int, seed: int) -> list[Candidate]:
    """New blocks at every site and new units in every block, as far as they are to be measured."""
    found = []
    if "depth" in sight.axes or "width" not in sight.axes:  # a trial that grows data alone looks at depth
        for site in sites(model):
            block = new_block(model, AddBlock(site=site.path, inner=sight.inner), stage=stage, seed=seed)
            own = reader(model, site) if sight.inner == "copy" else None
            found.append(Candidate(path=site.path, block=block, shared=own))
    if "width" in sight.axes:
        for path in blocks_of(model):
            branch = new_branch(model, AddUnits(block=path, units=sight.units), stage=stage, seed=seed)
            read = existing_block(model, path).units_read
            found.append(
                Candidate(
                    path=path,
                    block=branch,
                    kind="width",
                    beside=_projections_of(model, path),
                    reads=None if read is None else f"{path}.{read}",
                )
            )
    return found


def _projections_of(model: nn.Module, path: str) -> tuple[str, ...]:
    """Last layers of a block and of the units that earlier width steps gave it: they all write at its output."""
    return (f"{path}.project", *(f"{path}.widened.{i}.project" for i in _widened(model, path)))


def _widened(model: nn.Module, path: str) -> dict[str, Block]:
    """Units and heads that the block at a path was widened by, by their ids, in order."""
    return dict(getattr(existing_block(model, path), "widened", {}))


def new_block(model: nn.Module, change: AddBlock, *, stage: int, seed: int) -> Block:
    """The block of a depth step: shaped like the nearest one, inner weights drawn or copied."""
    site = next((s for s in sites(model) if s.path == change.site), None)
    if site is None:
        resolve(model, change.site)  # says which paths exist
        known = ", ".join(s.path for s in sites(model))
        raise SiteError(f"{change.site!r} is no site of this network: use one of {known}")
    generator = torch.Generator().manual_seed(stream_seed(seed, "candidate", stage, "depth", change.site))
    if change.like is None or change.inner == "random":
        return default_block(model, site, generator=generator, copy=change.inner == "copy")[0]
    source = existing_block(model, change.like)
    block = copy_of(source, generator=generator)
    if not change.exact:
        block.load_state_dict(block.state_dict() | dense_state(source))
    return block


def new_branch(model: nn.Module, change: AddUnits | AddHeads, *, stage: int, seed: int) -> Block:
    """The new hidden units or heads of a width step."""
    host = existing_block(model, change.block)
    if isinstance(change, AddHeads):
        generator = torch.Generator().manual_seed(stream_seed(seed, "candidate", stage, "heads", change.block))
        return new_heads(host, heads=change.heads, generator=generator)
    generator = torch.Generator().manual_seed(stream_seed(seed, "candidate", stage, "width", change.block))
    return new_units(host, units=change.units, generator=generator)


def add_channels(
    model: nn.Module,
    change: AddChannels,
    *,
    stage: int,
    seed: int,
    optimizer: optim.Optimizer | None = None,
    check: Tensor | None = None,
) -> Receipt:
    """Widen a stream, with new weights from the trial's seed."""
    generator = torch.Generator().manual_seed(stream_seed(seed, "channels", stage, change.site))
    return widen_stream(
        model,
        site=change.site,
        channels=change.channels,
        generator=generator,
        optimizer=optimizer,
        check_batch=check,
    )


@dataclass(kw_only=True)
class StepTaken:
    """What the execution of a decision changed."""

    receipts: list[Receipt] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    data_share: float | None = None
    """New share of the training data; None: as before."""
    moved: bool = False
    """True where a jumpboard step or an inexact copy changed the outputs."""
    flops: int = 0


def take_step(
    model: nn.Module,
    changes: tuple[Change, ...],
    *,
    decided_after: int,
    seed: int,
    optimizer: optim.Optimizer | None,
    train: Split,
    subset: int,
    ridge: float,
    fold_limit: int,
    ranks: Ranks,
    checked: bool = True,
) -> StepTaken:
    """Execute the changes of one decision, in order.

    Args:
        model: The live network.
        changes: From the decision.
        decided_after: Stage after which they were decided, which names the random streams.
        seed: Of the trial.
        optimizer: Adopts new parameters; None: nothing trains them.
        train: The training split; line searches use its present subset.
        subset: Samples in force.
        ridge: Of the second moment of a line-searched direction.
        fold_limit: Most training samples for a line search.
        ranks: Share the work of a line search.
        checked: False: outputs are not compared, which costs nothing; for exact steps only.

    Returns:
        Receipts, with the largest output change seen on 64 training samples.
    """
    taken = StepTaken()
    check = train.inputs[: min(CHECKED_SAMPLES, subset)] if checked else None
    folds = _folds(train, min(subset, fold_limit))
    for change in changes:
        words = str(change)
        for part in expand(model, change):
            match part:
                case AddBlock():
                    block = new_block(model, part, stage=decided_after, seed=seed)
                    leap = _line_search(model, part, block, folds, ridge=ridge, ranks=ranks) if part.jumpboard else None
                    words += _add_block(model, part, block, leap, taken, check, optimizer=optimizer)
                case AddUnits() | AddHeads():
                    branch = new_branch(model, part, stage=decided_after, seed=seed)
                    _add_branch(model, part.block, branch, taken, check, optimizer=optimizer)
                case AddChannels():
                    with FlopCounter() as counter:  # the outputs on the check batch cost something too
                        receipt = add_channels(
                            model, part, stage=decided_after, seed=seed, optimizer=optimizer, check=check
                        )
                    taken.receipts.append(receipt)
                    taken.flops += counter.flops
                case AddData(share=share):
                    taken.data_share = share
                case Deepen() | Widen():
                    raise AssertionError(f"{part} was not spelled out")
        taken.words.append(words)
    return taken


def _add_branch(
    model: nn.Module,
    path: str,
    branch: Block,
    taken: StepTaken,
    check: Tensor | None,
    *,
    optimizer: optim.Optimizer | None,
) -> None:
    """Give the block at a path new units or heads."""
    with FlopCounter() as counter:
        receipt = widen(
            model, site=path, units=branch, generator=torch.Generator(), optimizer=optimizer, check_batch=check
        )
    taken.receipts.append(receipt)
    taken.flops += counter.flops


def _line_search(
    model: nn.Module,
    change: AddBlock,
    block: Block,
    folds: tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]],
    *,
    ridge: float,
    ranks: Ranks,
) -> Jumpboard:
    """The jumpboard of a new block: direction from one fold, size from the other; its cost is all of both."""
    candidate = Candidate(path=change.site, block=block)
    direction, flops = clipped_direction(
        model, candidate=candidate, batches=folds[0], loss=loss_sum, reduction="sum", ridge=ridge, mapper=ranks.map
    )
    leap = jumpboard(
        model,
        site=change.site,
        block=block,
        direction=direction,
        batches=folds[1],
        loss=loss_sum,
        reduction="sum",
        mapper=ranks.map,
    )
    return replace(leap, flops=leap.flops + flops)


def _add_block(
    model: nn.Module,
    change: AddBlock,
    block: Block,
    leap: Jumpboard | None,
    taken: StepTaken,
    check: Tensor | None,
    *,
    optimizer: optim.Optimizer | None,
) -> str:
    """Insert the block exactly; then, if a line search found a step, move it there. Returns words for the step."""
    with FlopCounter() as counter:
        receipt = insert_block(
            model,
            site=change.site,
            block=block,
            generator=torch.Generator(),
            optimizer=optimizer,
            check_batch=check,
            preserve=change.exact,
        )
        taken.receipts.append(receipt)
        taken.moved = taken.moved or not change.exact
        if leap is not None and leap.relative_step > 0 and check is not None:
            before = _outputs(model, check)
            set_projection(block.project, torch.from_numpy(leap.matrix_DK))
            change_seen = float((_outputs(model, check) - before).abs().max())
            taken.receipts.append(record_jumpboard(model, path=receipt.path, output_change=change_seen))
            taken.moved = True
    taken.flops += counter.flops + (leap.flops if leap is not None else 0)
    for wider in _widened(model, change.like).values() if change.like is not None else ():
        generator = torch.Generator().manual_seed(0)  # all weights are copied
        _add_branch(model, receipt.path, copy_of(wider, generator=generator), taken, check, optimizer=optimizer)
    return f" (jumpboard {leap.relative_step:g})" if leap is not None and leap.relative_step > 0 else ""


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    was_training = model.training
    model.eval()
    outputs: Tensor = model(inputs)
    model.train(was_training)
    return outputs


def _folds(train: Split, limit: int) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Two disjoint folds of the first ``limit`` training samples: for the direction, for its size."""
    even = Split(train.inputs[:limit:2], train.targets[:limit:2])
    odd = Split(train.inputs[1:limit:2], train.targets[1:limit:2])
    return chunks_of(even, size=CHUNK), chunks_of(odd, size=CHUNK)
