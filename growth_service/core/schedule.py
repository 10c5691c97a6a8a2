"""Growth schedules as values: an initial size and the rule that turns it into grow steps.

A schedule says nothing about weights or gradients; it can be compared, hashed, stored as JSON
and played in simulated time.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from growth_service.core.policies import Policy, policy_from_dict, policy_to_dict
from growth_service.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialSize:
    """The size a network starts with."""

    blocks: tuple[int, ...]
    """Residual blocks in each group of equal resolution."""
    hidden: tuple[int, ...]
    """Hidden units (channels) of a block in each group."""
    data_share: float = 1.0
    """Share of the training split, in (0, 1]."""
    widths: tuple[int, ...] | None = None
    """Channels of the stream in each group; None: as the job's model says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthSchedule:
    """One point of a growth space: what one trial runs.

    Raises:
        UserError: If shares of the budget are not positive, are not one a stage, or do not sum to one.
    """

    name: str
    initial: InitialSize
    policy: Policy
    num_stages: int
    """Stretches of training between decisions."""
    shares: tuple[float, ...] | None = None
    """Share of the trial's budget that each stage gets; None: equal shares."""

    def __post_init__(self) -> None:
        if self.shares is None:
            return
        if len(self.shares) != self.num_stages or min(self.shares) <= 0 or not math.isclose(sum(self.shares), 1):
            raise UserError(
                f"the shares of the stages of schedule {self.name!r} must be {self.num_stages} positive numbers that "
                f"sum to 1, got {list(self.shares)}"
            )

    def stage_ends(self) -> tuple[float, ...]:
        """Share of the budget that is spent after each stage; the last is exactly 1."""
        shares = self.shares or (1 / self.num_stages,) * self.num_stages
        return (*list(accumulate(shares))[:-1], 1.0)

    def with_shares(self, shares: tuple[float, ...] | None) -> "GrowthSchedule":
        """The same schedule on stages of these shares."""
        return replace(self, shares=shares)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON that :meth:`from_dict` reads back."""
        initial = self.initial
        return {
            "name": self.name,
            "initial": {
                "blocks": list(initial.blocks),
                "hidden": list(initial.hidden),
                "data_share": initial.data_share,
                "widths": list(initial.widths) if initial.widths is not None else None,
            },
            "policy": policy_to_dict(self.policy),
            "num_stages": self.num_stages,
            "shares": list(self.shares) if self.shares is not None else None,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "GrowthSchedule":
        """Inverse of :meth:`to_dict`, after a trip through JSON too."""
        initial = dict(data["initial"])
        widths, shares = initial.get("widths"), data.get("shares")
        size = InitialSize(
            blocks=tuple(initial["blocks"]),
            hidden=tuple(initial["hidden"]),
            data_share=initial["data_share"],
            widths=tuple(widths) if widths is not None else None,
        )
        return cls(
            name=data["name"],
            initial=size,
            policy=policy_from_dict(data["policy"]),
            num_stages=data["num_stages"],
            shares=tuple(shares) if shares is not None else None,
        )
