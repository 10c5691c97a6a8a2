"""Where every schedule starts: the keys of a job that all builders have, and what follows from them."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from growth_service.core.policies import Policy
from growth_service.core.schedule import GrowthSchedule, InitialSize
from growth_service.core.steps import AddBlock, Inner

Sizes = tuple[Annotated[int, Ge(0)], ...]
Count = Annotated[int, Ge(1)]
Share = Annotated[float, Ge(0.001), Le(1)]
Factor = Annotated[float, Gt(1), Le(16)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The initial network and the stages of a trial: a builder adds the rule by which it grows."""

    name: str
    """Of the trial."""
    num_stages: int
    """Decisions are taken after each stage but the last."""
    shares: tuple[float, ...] | None
    """Of the budget, one a stage; None: equal ones."""
    blocks: Sizes
    """Residual blocks of each group."""
    hidden: Sizes
    """Hidden units of a block in each group."""
    widths: Sizes | None = None
    """Channels of the stream in each group; None: as the model of the job says."""
    data_share: Share | None = None
    """Share of the training split; None: as the builder says, all of it mostly."""

    def schedule(self, policy: Policy, *, data_share: float = 1.0) -> GrowthSchedule:
        """This start with a rule.

        Args:
            policy: The rule.
            data_share: Where the job names none.
        """
        size = InitialSize(
            blocks=self.blocks, hidden=self.hidden, widths=self.widths, data_share=self.data_share or data_share
        )
        return GrowthSchedule(
            name=self.name, initial=size, policy=policy, num_stages=self.num_stages, shares=self.shares
        )

    def one_block_each(self, inner: Inner) -> tuple[AddBlock, ...]:
        """One block more at the end of each group."""
        ends = [f"blocks.{num - 1}" if num else "entry" for num in self.blocks]
        return tuple(AddBlock(site=f"groups.{group}.{end}", inner=inner) for group, end in enumerate(ends))

    def stage_before(self, share: float) -> int:
        """The stage whose end is nearest to a share of the budget, never the last one; the earlier of two as near."""
        even = tuple(1 / self.num_stages for _ in range(self.num_stages))
        ends = [sum((self.shares or even)[: s + 1]) for s in range(self.num_stages - 1)]
        return min(range(len(ends)), key=lambda s: abs(ends[s] - share), default=0)

    def spread(self, steps: int, *, until_share: float) -> list[int]:
        """Stages after which ``steps`` steps are taken, at even distances up to a share of the budget.

        Steps that would fall on one stage become one: there are fewer then.
        """
        if self.num_stages == 1:
            return []
        return sorted({self.stage_before(until_share * (k + 1) / steps) for k in range(steps)})
