"""Baselines that any growth schedule has to face at equal compute: fixed lists of steps."""

from typing import Annotated

from annotated_types import Ge, Gt, Le

from growth_service.core.policies import FixedSteps
from growth_service.core.schedule import GrowthSchedule, InitialSize
from growth_service.core.steps import AddBlock, AddChannels, AddData, AddUnits, Change, Deepen, Inner, Widen

Sizes = tuple[Annotated[int, Ge(0)], ...]
Share = Annotated[float, Ge(0.001), Le(1)]
Factor = Annotated[float, Gt(1), Le(16)]
Shares = tuple[float, ...] | None
"""Shares of the budget of each stage, which come from the job; None: equal ones."""
Steps = tuple[tuple[int, tuple[Change, ...]], ...]


def end_of_group(group: int, blocks: Sizes) -> str:
    """Path of the last site of a group of the initial network."""
    return f"groups.{group}.blocks.{blocks[group] - 1}" if blocks[group] else f"groups.{group}.entry"


def stage_before(share: float, *, num_stages: int, shares: Shares) -> int:
    """The stage whose end is nearest to a share of the budget, never the last one; the earlier of two as near."""
    even = tuple(1 / num_stages for _ in range(num_stages))
    ends = [sum((shares or even)[: s + 1]) for s in range(num_stages - 1)]
    return min(range(len(ends)), key=lambda s: abs(ends[s] - share), default=0)


def scratch(
    *,
    name: str,
    num_stages: int,
    shares: Shares = None,
    blocks: Sizes,
    hidden: Sizes,
    widths: Sizes | None = None,
    data_share: Share = 1.0,
) -> GrowthSchedule:
    """Train one size from the start to the end."""
    size = InitialSize(blocks=blocks, hidden=hidden, widths=widths, data_share=data_share)
    return GrowthSchedule(name=name, initial=size, policy=FixedSteps(), num_stages=num_stages, shares=shares)


def depth_only(
    *,
    name: str,
    num_stages: int,
    shares: Shares = None,
    blocks: Sizes,
    hidden: Sizes,
    widths: Sizes | None = None,
    inner: Inner = "copy",
    until_share: Share = 0.6,
) -> GrowthSchedule:
    """One block more at the end of each group after every stage, up to a share of the stages."""
    last = max(1, round(num_stages * until_share))
    step = tuple(AddBlock(site=end_of_group(g, blocks), inner=inner) for g in range(len(blocks)))
    steps = tuple((stage, step) for stage in range(min(last, num_stages - 1)))
    size = InitialSize(blocks=blocks, hidden=hidden, widths=widths)
    return GrowthSchedule(name=name, initial=size, policy=FixedSteps(steps=steps), num_stages=num_stages, shares=shares)


def data_only(
    *,
    name: str,
    num_stages: int,
    shares: Shares = None,
    blocks: Sizes,
    hidden: Sizes,
    widths: Sizes | None = None,
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
    size = InitialSize(blocks=blocks, hidden=hidden, widths=widths, data_share=data_share)
    policy = FixedSteps(steps=tuple(steps))
    return GrowthSchedule(name=name, initial=size, policy=policy, num_stages=num_stages, shares=shares)


def width_only(
    *,
    name: str,
    num_stages: int,
    shares: Shares = None,
    blocks: Sizes,
    hidden: Sizes,
    widths: Sizes | None = None,
    factor: Factor = 1.5,
    steps: Annotated[int, Ge(1)] = 1,
    until_share: Share = 0.6,
) -> GrowthSchedule:
    """Streams, hidden units and heads times ``factor``, ``steps`` times, evenly spread up to a share of the budget."""
    when = spread(steps, until_share=until_share, num_stages=num_stages, shares=shares)
    size = InitialSize(blocks=blocks, hidden=hidden, widths=widths)
    policy = FixedSteps(steps=tuple((stage, (Widen(times=factor),)) for stage in when))
    return GrowthSchedule(name=name, initial=size, policy=policy, num_stages=num_stages, shares=shares)


def compound(
    *,
    name: str,
    num_stages: int,
    shares: Shares = None,
    blocks: Sizes,
    hidden: Sizes,
    widths: Sizes | None = None,
    data_share: Share = 1.0,
    width_factor: Factor = 1.5,
    steps: Annotated[int, Ge(1)] = 1,
    until_share: Share = 0.6,
) -> GrowthSchedule:
    """Depth, width and data at one fixed ratio: depth and data double as the width grows by ``width_factor``.

    Source: compound scaling, Tan and Le 2019 (arXiv:1905.11946).
    """
    when = spread(steps, until_share=until_share, num_stages=num_stages, shares=shares)
    share, listed = data_share, []
    for stage in when:
        changes: tuple[Change, ...] = (Widen(times=width_factor), Deepen())
        if share < 1:
            share = min(1.0, 2 * share)
            changes = (*changes, AddData(share=share))
        listed.append((stage, changes))
    size = InitialSize(blocks=blocks, hidden=hidden, widths=widths, data_share=data_share)
    policy = FixedSteps(steps=tuple(listed))
    return GrowthSchedule(name=name, initial=size, policy=policy, num_stages=num_stages, shares=shares)


def stacking(
    *,
    name: str,
    num_stages: int,
    shares: Shares = None,
    blocks: Sizes,
    hidden: Sizes,
    widths: Sizes | None = None,
    steps: Annotated[int, Ge(1)] = 2,
    until_share: Share = 0.5,
) -> GrowthSchedule:
    """Depth doubles by plain copies of all blocks, output projections too: outputs change.

    Source: progressive stacking, Gong et al. 2019; Du et al. 2024 (arXiv:2405.15319).
    """
    when = spread(steps, until_share=until_share, num_stages=num_stages, shares=shares)
    size = InitialSize(blocks=blocks, hidden=hidden, widths=widths)
    policy = FixedSteps(steps=tuple((stage, (Deepen(exact=False),)) for stage in when))
    return GrowthSchedule(name=name, initial=size, policy=policy, num_stages=num_stages, shares=shares)


def one_shot_late(
    *,
    name: str,
    num_stages: int,
    shares: Shares = None,
    blocks: Sizes,
    hidden: Sizes,
    widths: Sizes | None = None,
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
    stage = stage_before(at_share, num_stages=num_stages, shares=shares)
    steps = ((stage, tuple(changes)),) if num_stages > 1 and changes else ()
    size = InitialSize(blocks=blocks, hidden=hidden, widths=widths)
    return GrowthSchedule(name=name, initial=size, policy=FixedSteps(steps=steps), num_stages=num_stages, shares=shares)


def spread(steps: int, *, until_share: float, num_stages: int, shares: Shares) -> list[int]:
    """Stages after which ``steps`` steps are taken, at even distances up to a share of the budget."""
    if num_stages == 1:
        return []
    wanted = [until_share * (k + 1) / steps for k in range(steps)]
    return sorted({stage_before(share, num_stages=num_stages, shares=shares) for share in wanted})
