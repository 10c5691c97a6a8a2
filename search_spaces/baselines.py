"""Baselines that any growth schedule has to face at equal compute: fixed lists of steps."""

from typing import Annotated

from annotated_types import Ge

from growth_service.core.policies import FixedSteps
from growth_service.core.schedule import GrowthSchedule
from growth_service.core.steps import AddChannels, AddData, AddUnits, Change, Deepen, Inner, Widen, change_from_words
from growth_service.errors import UserError
from search_spaces.start import Count, Factor, Share, Start


def scratch(start: Start) -> GrowthSchedule:
    """Train one size from the start to the end."""
    return start.schedule(FixedSteps())


def depth_only(start: Start, *, inner: Inner = "copy", until_share: Share = 0.6) -> GrowthSchedule:
    """One block more at the end of each group after every stage, up to a share of the stages."""
    last = max(1, round(start.num_stages * until_share))
    stages = range(min(last, start.num_stages - 1))
    return start.schedule(FixedSteps(steps=tuple((stage, start.one_block_each(inner)) for stage in stages)))


def width_only(start: Start, *, factor: Factor = 1.5, steps: Count = 1, until_share: Share = 0.6) -> GrowthSchedule:
    """Streams, hidden units and heads times ``factor``, ``steps`` times, evenly spread up to a share of the budget."""
    when = start.spread(steps, until_share=until_share)
    return start.schedule(FixedSteps(steps=tuple((stage, (Widen(times=factor),)) for stage in when)))


def data_only(start: Start, *, factor: Annotated[float, Ge(1.1)] = 2.0) -> GrowthSchedule:
    """One size; the training subset, a quarter at first, grows by ``factor`` after each stage until all is in use."""
    steps: list[tuple[int, tuple[Change, ...]]] = []
    share = start.data_share or 0.25
    for stage in range(start.num_stages - 1):
        if share >= 1:
            break
        share = min(1.0, share * factor)
        steps.append((stage, (AddData(share=share),)))
    return start.schedule(FixedSteps(steps=tuple(steps)), data_share=0.25)


def compound(start: Start, *, width_factor: Factor = 1.5, steps: Count = 1, until_share: Share = 0.6) -> GrowthSchedule:
    """Depth, width and data at one fixed ratio: depth and data double as the width grows by ``width_factor``.

    Source: compound scaling, Tan and Le 2019 (arXiv:1905.11946).
    """
    share, listed = start.data_share or 1.0, []
    for stage in start.spread(steps, until_share=until_share):
        changes: tuple[Change, ...] = (Widen(times=width_factor), Deepen())
        if share < 1:
            share = min(1.0, 2 * share)
            changes = (*changes, AddData(share=share))
        listed.append((stage, changes))
    return start.schedule(FixedSteps(steps=tuple(listed)))


def stacking(start: Start, *, steps: Count = 2, until_share: Share = 0.5) -> GrowthSchedule:
    """Depth doubles by plain copies of all blocks, output projections too: outputs change.

    Source: progressive stacking, Gong et al. 2019; Du et al. 2024 (arXiv:2405.15319).
    """
    when = start.spread(steps, until_share=until_share)
    return start.schedule(FixedSteps(steps=tuple((stage, (Deepen(exact=False),)) for stage in when)))


def one_shot_late(
    start: Start,
    *,
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
            for g, num in enumerate(start.blocks)
            for b in range(num)
        ]
    if add_channels:
        changes += [AddChannels(site=f"groups.{g}.entry", channels=add_channels) for g in range(len(start.blocks))]
    for block in start.one_block_each(inner):
        changes += [block] * add_blocks
    steps = ((start.stage_before(at_share), tuple(changes)),) if start.num_stages > 1 and changes else ()
    return start.schedule(FixedSteps(steps=steps))


def fixed(start: Start, *, steps: dict[Annotated[int, Ge(0)], str | tuple[str, ...]]) -> GrowthSchedule:
    """Take these steps after these stages, counted from 0: ``{0: width*1.5, 2: [depth*2, data@1.0]}``.

    Args:
        start: Network and stages.
        steps: By stage, in the words of the tables: ``depth*2``, ``stack*2``, ``width*1.5``, ``data@0.5``,
            ``depth@groups.0.entry``, ``width@groups.0.blocks.0.branch+8``, ``heads@...+2``,
            ``stream@groups.0.entry+16``.

    Raises:
        UserError: If a step is none, or is due after the last stage.
    """
    last = start.num_stages - 1
    late = [stage for stage in steps if stage >= last]
    if late:
        raise UserError(
            f"schedule {start.name!r}: a step after stage {late[0]} is never taken, the last of {start.num_stages} "
            f"stages is {last}: use stages 0 to {last - 1}"
        )
    listed = tuple(
        (stage, tuple(map(change_from_words, (words,) if isinstance(words, str) else words)))
        for stage, words in sorted(steps.items())
    )
    return start.schedule(FixedSteps(steps=listed))
