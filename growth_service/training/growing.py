"""Candidates for a probe, and the execution of a grow step on a live network.

Inner weights of a candidate depend on (trial seed, stage, kind, path) alone, so the block that
was scored is the block that is inserted, on every rank and after every resume.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn, optim

from growth_service.blocks import Block, set_projection
from growth_service.core.receipts import Receipt
from growth_service.core.schedule import AddBlock, AddChannels, AddData, AddUnits, Change, SignalGuided
from growth_service.core.streams import stream_seed
from growth_service.errors import SiteError
from growth_service.growth import insert_block, new_units, record_jumpboard, widen, widen_stream
from growth_service.models import default_block, resolve, sites
from growth_service.models.flops import FlopCounter
from growth_service.models.sites import blocks_of, reader
from growth_service.probing import Candidate, Jumpboard, jumpboard
from growth_service.probing.jumpboard import clipped_direction
from growth_service.training.batches import chunks_of
from growth_service.training.data import Split
from growth_service.training.evaluate import CHUNK, loss_sum
from growth_service.training.ranks import Ranks


def candidates(model: nn.Module, policy: SignalGuided, *, stage: int, seed: int) -> list[Candidate]:
    """New blocks at every site and new units in every block, as far as the policy may grow them."""
    found = []
    if "depth" in policy.axes or "width" not in policy.axes:  # a policy that grows data alone looks at depth
        for site in sites(model):
            block = new_block(model, AddBlock(site=site.path, inner=policy.inner), stage=stage, seed=seed)
            own = reader(model, site) if policy.inner == "copy" else None
            found.append(Candidate(path=site.path, block=block, shared=own))
    if "width" in policy.axes:
        for path in blocks_of(model):
            branch = new_branch(model, AddUnits(block=path, units=policy.units), stage=stage, seed=seed)
            found.append(Candidate(path=path, block=branch, kind="width", beside=_projections_of(model, path)))
    return found


def _projections_of(model: nn.Module, path: str) -> tuple[str, ...]:
    """Last layers of a block and of the units that earlier width steps gave it: they all write at its output."""
    own = [f"{path}.project"]
    if isinstance(resolve(model, path), Block):
        grown = getattr(resolve(model, path), "widened", None)
        own += [f"{path}.widened.{i}.project" for i in grown] if isinstance(grown, nn.ModuleDict) else []
    return tuple(own)


def new_block(model: nn.Module, change: AddBlock, *, stage: int, seed: int) -> Block:
    """The block of a depth step: shaped like the nearest one, inner weights drawn or copied."""
    site = next((s for s in sites(model) if s.path == change.site), None)
    if site is None:
        resolve(model, change.site)  # says which paths exist
        known = ", ".join(s.path for s in sites(model))
        raise SiteError(f"{change.site!r} is no site of this network: use one of {known}")
    generator = torch.Generator().manual_seed(stream_seed(seed, "candidate", stage, "depth", change.site))
    return default_block(model, site, generator=generator, copy=change.inner == "copy")[0]


def new_branch(model: nn.Module, change: AddUnits, *, stage: int, seed: int) -> Block:
    """The new hidden units of a width step."""
    host = resolve(model, change.block)
    if not isinstance(host, Block):
        known = ", ".join(blocks_of(model))
        raise SiteError(f"{change.block!r} is no block of this network: use one of {known}")
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
    """True where a jumpboard step changed the outputs."""
    flops: int = 0


def take_step(
    model: nn.Module,
    changes: tuple[Change, ...],
    *,
    decided_after: int,
    seed: int,
    optimizer: optim.Optimizer,
    train: Split,
    subset: int,
    ridge: float,
    fold_limit: int,
    ranks: Ranks,
) -> StepTaken:
    """Execute the changes of one decision, in order.

    Args:
        model: The live network.
        changes: From the decision.
        decided_after: Stage after which they were decided, which names the random streams.
        seed: Of the trial.
        optimizer: Adopts new parameters.
        train: The training split; line searches use its present subset.
        subset: Samples in force.
        ridge: Of the second moment of a line-searched direction.
        fold_limit: Most training samples for a line search.
        ranks: Share the work of a line search.

    Returns:
        Receipts, with the largest output change seen on 64 training samples.
    """
    taken = StepTaken()
    check = train.inputs[: min(64, subset)]
    folds = _folds(train, min(subset, fold_limit))
    for change in changes:
        words = str(change)
        match change:
            case AddBlock():
                block = new_block(model, change, stage=decided_after, seed=seed)
                leap = _line_search(model, change, block, folds, ridge=ridge, ranks=ranks) if change.jumpboard else None
                words += _add_block(model, change, block, leap, taken, check, optimizer=optimizer)
            case AddUnits():
                branch = new_branch(model, change, stage=decided_after, seed=seed)
                with FlopCounter() as counter:  # the outputs on the check batch cost something too
                    receipt = widen(
                        model,
                        site=change.block,
                        units=branch,
                        generator=torch.Generator(),
                        optimizer=optimizer,
                        check_batch=check,
                    )
                taken.receipts.append(receipt)
                taken.flops += counter.flops
            case AddChannels():
                with FlopCounter() as counter:
                    receipt = add_channels(
                        model, change, stage=decided_after, seed=seed, optimizer=optimizer, check=check
                    )
                taken.receipts.append(receipt)
                taken.flops += counter.flops
            case AddData(share=share):
                taken.data_share = share
        taken.words.append(words)
    return taken


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
    check: Tensor,
    *,
    optimizer: optim.Optimizer,
) -> str:
    """Insert the block exactly; then, if a line search found a step, move it there. Returns words for the step."""
    with FlopCounter() as counter:
        receipt = insert_block(
            model, site=change.site, block=block, generator=torch.Generator(), optimizer=optimizer, check_batch=check
        )
        taken.receipts.append(receipt)
        if leap is not None and leap.relative_step > 0:
            before = _outputs(model, check)
            set_projection(block.project, torch.from_numpy(leap.matrix_DK))
            change_seen = float((_outputs(model, check) - before).abs().max())
            taken.receipts.append(record_jumpboard(model, path=receipt.path, output_change=change_seen))
            taken.moved = True
    taken.flops += counter.flops + (leap.flops if leap is not None else 0)
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
