"""Baselines that grow when one simple number says so, or where a die falls."""

from typing import Annotated

from annotated_types import Gt

from growth_service.core.policies import RandomSite, Triggered
from growth_service.core.schedule import GrowthSchedule
from growth_service.core.steps import Deepen, Inner
from search_spaces.start import Count, Share, Start

Threshold = Annotated[float, Gt(0)]


def plateau(start: Start, *, threshold: Threshold = 0.02, most: Count = 8, inner: Inner = "copy") -> GrowthSchedule:
    """A block at the end of each group whenever the validation loss fell by less than ``threshold`` over a stage.

    Source: AutoGrow, Wen et al. 2020 (arXiv:1906.02909).
    """
    changes = start.one_block_each(inner)
    return start.schedule(Triggered(trigger="plateau", threshold=threshold, changes=changes, most=most))


def ag_plateau(start: Start, *, threshold: Threshold = 0.1, most: Count = 8, inner: Inner = "copy") -> GrowthSchedule:
    """A block at the end of each group until the largest activation gradient falls by less than ``threshold``.

    Source: the low plateau of AG_max in Liu et al. 2026 (arXiv:2608.14664).
    """
    changes = start.one_block_each(inner)
    return start.schedule(Triggered(trigger="ag_plateau", threshold=threshold, changes=changes, most=most))


def tokens_per_param(
    start: Start, *, threshold: Threshold = 100.0, most: Count = 8, inner: Inner = "copy"
) -> GrowthSchedule:
    """Depth doubles whenever more than ``threshold`` training targets were seen per parameter."""
    changes = (Deepen(inner=inner),)
    return start.schedule(Triggered(trigger="tokens_per_param", threshold=threshold, changes=changes, most=most))


def random_site(start: Start, *, steps: Count = 2, until_share: Share = 0.6, inner: Inner = "copy") -> GrowthSchedule:
    """A block at a site drawn by the seed, ``steps`` times, evenly spread up to a share of the budget."""
    return start.schedule(RandomSite(after=tuple(start.spread(steps, until_share=until_share)), inner=inner))
