"""What a network would be after the steps that its policy considers: taken on a copy, and counted."""

import copy
import logging
from dataclasses import replace

from growth_service.core.decisions import SizeAfter
from growth_service.core.policies import BudgetAware, Policy
from growth_service.core.steps import Change, Deepen
from growth_service.errors import GrowthError
from growth_service.models.flops import flops_per_sample
from growth_service.training.growing import CHECKED_SAMPLES, take_step
from growth_service.training.state import TrialState

logger = logging.getLogger(__name__)


def sizes_after(state: TrialState, policy: Policy) -> tuple[SizeAfter, ...]:
    """What the network would be after each step that the policy considers; steps that it cannot take are left out.

    Nothing is run but one sample a step, to count its FLOPs.
    """
    if not isinstance(policy, BudgetAware):
        return ()
    return tuple(found for step in policy.steps if (found := _size_after(state, step)) is not None)


def _size_after(state: TrialState, step: Change) -> SizeAfter | None:
    """Take the step on a copy."""
    model, train = copy.deepcopy(state.model), state.splits.train
    try:
        taken = take_step(
            model,
            (replace(step, exact=True) if isinstance(step, Deepen) else step,),  # the same sizes
            decided_after=state.stage,
            seed=state.config.seed,
            optimizer=None,
            train=train,
            subset=state.subset,
            ridge=state.config.probe["ridge"],
            fold_limit=state.config.probe["train_samples"],
            ranks=state.ranks,
            checked=False,
        )
    except GrowthError as error:
        logger.info("Not considering %s: %s", step, error)
        return None
    cost = flops_per_sample(model.train(), train.inputs[:1])
    return SizeAfter(
        change=step,
        params=sum(p.numel() for p in model.parameters()),
        flops_per_sample=cost.train,
        flops=2 * CHECKED_SAMPLES * cost.forward * len(taken.receipts),  # outputs before and after each part
    )
