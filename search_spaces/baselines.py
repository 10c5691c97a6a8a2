"""Baselines that any growth schedule has to face at equal compute."""

from typing import Annotated, Literal

from annotated_types import Ge, Le

from growth_service.core.schedule import (
    AddBlock,
    AddChannels,
    AddData,
    AddUnits,
    Change,
    FixedSteps,
    GrowthSchedule,
    InitialSize,
)

Sizes = tuple[Annotated[int, Ge(0)], ...]
Share = Annotated[float, Ge(0.001), Le(1)]
Inner = Literal["random", "copy"]


def end_of_group(group: int, blocks: Sizes) -> str:
    """Path of the last site of a group of the initial network."""
    return f"groups.{group}.blocks.{blocks[group] - 1}" if blocks[group] else f"groups.{group}.entry"


def scratch(*, name: str, num_stages: int, blocks: Sizes, hidden: Sizes, data_share: Share = 1.0) -> GrowthSchedule:
    """Train one size from the start, with the same learning-rate restarts as everybody."""
    size = InitialSize(blocks=blocks, hidden=hidden, data_share=data_share)
    return GrowthSchedule(name=name, initial=size, policy=FixedSteps(), num_stages=num_stages)


def depth_only(
    *, name: str, num_stages: int, blocks: Sizes, hidden: Sizes, inner: Inner = "copy", until_share: Share = 0.6
) -> GrowthSchedule:
    """One block more at the end of each group after every stage, up to a share of the stages."""
    last = max(1, round(num_stages * until_share))
    step = tuple(AddBlock(site=end_of_group(g, blocks), inner=inner) for g in range(len(blocks)))
    steps = tuple((stage, step) for stage in range(min(last, num_stages - 1)))
    size = InitialSize(blocks=blocks, hidden=hidden)
    return GrowthSchedule(name=name, initial=size, policy=FixedSteps(steps=steps), num_stages=num_stages)


def data_only(
    *,
    name: str,
    num_stages: int,
    blocks: Sizes,
    hidden: Sizes,
    data_share: Share = 0.25,
    factor: Annotated[float, Ge(1.1)] = 2.0,
) -> GrowthSchedule:
    """One size; the training subset grows by ``factor`` after each stage until all is in use."""
    steps: list[tuple[int, tuple[Change, ...]]] = []
    share = data_share
    for stage in range(num_stages - 1):
        if share >= 1:
            break
        share = min(1.0, share * factor)
        steps.append((stage, (AddData(share=share),)))
    size = InitialSize(blocks=blocks, hidden=hidden, data_share=data_share)
    return GrowthSchedule(name=name, initial=size, policy=FixedSteps(steps=tuple(steps)), num_stages=num_stages)


def one_shot_late(
    *,
    name: str,
    num_stages: int,
    blocks: Sizes,
    hidden: Sizes,
    add_blocks: Annotated[int, Ge(0)] = 1,
    add_units: Annotated[int, Ge(0)] = 0,
    add_channels: Annotated[int, Ge(0)] = 0,
    at_share: Share = 0.6,
    inner: Inner = "copy",
) -> GrowthSchedule:
    """Everything at once, late: new units in every block, channels for every stream, then blocks at each group's end.

    Source: single late expansion at about 80 % of training, Bu 2025 (arXiv:2511.04981).
    """
    changes: list[Change] = []
    if add_units:
        changes += [
            AddUnits(block=f"groups.{g}.blocks.{b}.branch", units=add_units)
            for g, num in enumerate(blocks)
            for b in range(num)
        ]
    if add_channels:
        changes += [AddChannels(site=f"groups.{g}.entry", channels=add_channels) for g in range(len(blocks))]
    for g in range(len(blocks)):
        changes += [AddBlock(site=end_of_group(g, blocks), inner=inner)] * add_blocks
    stage = min(max(0, round(num_stages * at_share) - 1), num_stages - 2)
    steps = ((stage, tuple(changes)),) if num_stages > 1 and changes else ()
    size = InitialSize(blocks=blocks, hidden=hidden)
    return GrowthSchedule(name=name, initial=size, policy=FixedSteps(steps=steps), num_stages=num_stages)
