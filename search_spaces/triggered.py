"""Baselines that grow when one simple number says so."""

from typing import Annotated

from annotated_types import Ge, Gt

from growth_service.core.policies import RandomSite, Triggered
from growth_service.core.schedule import GrowthSchedule, InitialSize
from growth_service.core.steps import AddBlock, Change, Deepen, Inner
from search_spaces.baselines import Share, Shares, Sizes, end_of_group, spread

Threshold = Annotated[float, Gt(0)]
Most = Annotated[int, Ge(1)]


def plateau(
    *,
    name: str,
    num_stages: int,
    shares: Shares = None,
    blocks: Sizes,
    hidden: Sizes,
    widths: Sizes | None = None,
    threshold: Threshold = 0.02,
    most: Most = 8,
    inner: Inner = "copy",
) -> GrowthSchedule:
    """A block at the end of each group whenever the validation loss fell by less than ``threshold`` over a stage.

    Source: AutoGrow, Wen et al. 2020 (arXiv:1906.02909).
    """
    changes = tuple(AddBlock(site=end_of_group(g, blocks), inner=inner) for g in range(len(blocks)))
    policy = Triggered(trigger="plateau", threshold=threshold, changes=changes, most=most)
    size = InitialSize(blocks=blocks, hidden=hidden, widths=widths)
    return GrowthSchedule(name=name, initial=size, policy=policy, num_stages=num_stages, shares=shares)


def ag_plateau(
    *,
    name: str,
    num_stages: int,
    shares: Shares = None,
    blocks: Sizes,
    hidden: Sizes,
    widths: Sizes | None = None,
    threshold: Threshold = 0.1,
    most: Most = 8,
    inner: Inner = "copy",
) -> GrowthSchedule:
    """A block at the end of each group until the largest activation gradient falls by less than ``threshold``.

    Source: the low plateau of AG_max in Liu et al. 2026 (arXiv:2608.14664).
    """
    changes = tuple(AddBlock(site=end_of_group(g, blocks), inner=inner) for g in range(len(blocks)))
    policy = Triggered(trigger="ag_plateau", threshold=threshold, changes=changes, most=most)
    size = InitialSize(blocks=blocks, hidden=hidden, widths=widths)
    return GrowthSchedule(name=name, initial=size, policy=policy, num_stages=num_stages, shares=shares)


def tokens_per_param(
    *,
    name: str,
    num_stages: int,
    shares: Shares = None,
    blocks: Sizes,
    hidden: Sizes,
    widths: Sizes | None = None,
    threshold: Threshold = 100.0,
    most: Most = 8,
    inner: Inner = "copy",
) -> GrowthSchedule:
    """Depth doubles whenever more than ``threshold`` training targets were seen per parameter."""
    changes: tuple[Change, ...] = (Deepen(inner=inner),)
    policy = Triggered(trigger="tokens_per_param", threshold=threshold, changes=changes, most=most)
    size = InitialSize(blocks=blocks, hidden=hidden, widths=widths)
    return GrowthSchedule(name=name, initial=size, policy=policy, num_stages=num_stages, shares=shares)


def random_site(
    *,
    name: str,
    num_stages: int,
    shares: Shares = None,
    blocks: Sizes,
    hidden: Sizes,
    widths: Sizes | None = None,
    steps: Annotated[int, Ge(1)] = 2,
    until_share: Share = 0.6,
    inner: Inner = "copy",
) -> GrowthSchedule:
    """A block at a site drawn by the seed, ``steps`` times, evenly spread up to a share of the budget."""
    when = spread(steps, until_share=until_share, num_stages=num_stages, shares=shares)
    size = InitialSize(blocks=blocks, hidden=hidden, widths=widths)
    policy = RandomSite(after=tuple(when), inner=inner)
    return GrowthSchedule(name=name, initial=size, policy=policy, num_stages=num_stages, shares=shares)
