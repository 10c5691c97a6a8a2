"""A growth schedule of one's own, as a list of steps in words."""

from typing import Annotated

from annotated_types import Ge

from growth_service.core.policies import FixedSteps
from growth_service.core.schedule import GrowthSchedule, InitialSize
from growth_service.core.steps import change_from_words
from growth_service.errors import UserError
from search_spaces.baselines import Share, Shares, Sizes


def fixed(
    *,
    name: str,
    num_stages: int,
    shares: Shares = None,
    blocks: Sizes,
    hidden: Sizes,
    widths: Sizes | None = None,
    data_share: Share = 1.0,
    steps: dict[Annotated[int, Ge(0)], str | tuple[str, ...]],
) -> GrowthSchedule:
    """Take these steps after these stages, counted from 0: ``{0: width*1.5, 2: [depth*2, data@1.0]}``.

    Args:
        name: Of the trial.
        num_stages: Of the trial.
        shares: Of the budget, one a stage.
        blocks: Initial residual blocks of each group.
        hidden: Initial hidden units of each group.
        widths: Initial channels of the stream in each group; None: as the model of the job says.
        data_share: Initial share of the training split.
        steps: By stage, in the words of the tables: ``depth*2``, ``stack*2``, ``width*1.5``, ``data@0.5``,
            ``depth@groups.0.entry``, ``width@groups.0.blocks.0.branch+8``, ``heads@...+2``,
            ``stream@groups.0.entry+16``.
    """
    late = [stage for stage in steps if stage > num_stages - 2]
    if late:
        raise UserError(
            f"schedule {name!r}: a step after stage {late[0]} is never taken, the last of {num_stages} stages is "
            f"{num_stages - 1}: use stages 0 to {num_stages - 2}"
        )
    listed = tuple(
        (stage, tuple(map(change_from_words, (words,) if isinstance(words, str) else words)))
        for stage, words in sorted(steps.items())
    )
    size = InitialSize(blocks=blocks, hidden=hidden, widths=widths, data_share=data_share)
    return GrowthSchedule(
        name=name, initial=size, policy=FixedSteps(steps=listed), num_stages=num_stages, shares=shares
    )
