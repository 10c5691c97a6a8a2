"""Simple numbers decide: what a schedule that looks at certificates has to beat."""

import math

import numpy as np

from growth_service.core.decisions import Decision, Grow, Reading, TrainOn
from growth_service.core.policies import RandomSite, Triggered
from growth_service.core.steps import AddBlock
from growth_service.core.streams import stream_seed


def decide_triggered(reading: Reading, policy: Triggered) -> Decision:
    """Take the policy's changes when its number says so, as often as it may."""
    fires, finding = _fires(reading, policy)
    if not fires:
        return TrainOn(reason=finding)
    if reading.times_grown >= policy.most:
        return TrainOn(reason=f"{finding}, but the network grew {reading.times_grown} times already")
    return Grow(changes=policy.changes, reason=finding)


def _fires(reading: Reading, policy: Triggered) -> tuple[bool, str]:
    limit = policy.threshold
    match policy.trigger:
        case "tokens_per_param":
            seen = reading.targets_per_param
            return seen > limit, f"{seen:.3g} training targets were seen per parameter, {_side(seen, limit)} {limit:g}"
        case "plateau":
            drop = _drop([p.loss_val for p in reading.past])
            what = "the validation loss"
        case _:
            drop = _drop([math.nan if p.ag_max is None else p.ag_max for p in reading.past])
            what = "the largest activation gradient"
    if math.isnan(drop):
        # Gradients fall from the first look on, so depth is added until they stop; losses have to be seen to stop.
        return policy.trigger == "ag_plateau", f"{what} was measured once so far"
    fell = f"{what} fell by {drop:.1%} over the last stage, {_side(drop, limit)} {limit:.1%}"
    return (drop < limit) == (policy.trigger == "plateau"), fell


def _side(value: float, limit: float) -> str:
    return "more than" if value > limit else "not more than"


def _drop(values: list[float]) -> float:
    """By what share the last value is below the one before; NaN where there are not two."""
    if len(values) < 2 or not values[-2]:
        return math.nan
    return 1 - values[-1] / values[-2]


def decide_random_site(reading: Reading, policy: RandomSite) -> Decision:
    """A block at a site drawn by the seed, where one is due."""
    if reading.stage not in policy.after or not reading.sites:
        return TrainOn(reason=f"the schedule grows nothing after stage {reading.stage}")
    drawn = np.random.default_rng(stream_seed(reading.seed, "site", reading.stage)).integers(len(reading.sites))
    site = reading.sites[int(drawn)]
    return Grow(
        changes=(AddBlock(site=site, inner=policy.inner),),
        reason=f"the schedule says a block after stage {reading.stage}; drawn from {len(reading.sites)} sites: {site}",
    )
