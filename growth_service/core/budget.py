"""FLOP accounts that conserve: spent + reserved + free == total, always.

A stage reserves what it may cost before it starts and settles what it did cost afterwards;
a trial does the same with the study. FLOPs are integers, so the balance is exact.
"""

from dataclasses import dataclass, replace

from growth_service.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """An account; every operation returns a new one."""

    total_flops: int
    spent_flops: int = 0
    reserved_flops: int = 0

    def __post_init__(self) -> None:
        """Refuse an account that is out of balance."""
        if min(self.total_flops, self.spent_flops, self.reserved_flops, self.free_flops) < 0:
            raise ValueError(f"budget out of balance: {self}")

    @property
    def free_flops(self) -> int:
        """Neither spent nor promised."""
        return self.total_flops - self.spent_flops - self.reserved_flops

    def reserve(self, flops: int) -> "Budget":
        """Promise ``flops`` to somebody.

        Raises:
            UserError: If less than that is free.
        """
        if flops < 0:
            raise ValueError(f"cannot reserve {flops} FLOPs: it must be at least 0")
        if flops > self.free_flops:
            raise UserError(
                f"cannot reserve {flops} FLOPs: {self.free_flops} of {self.total_flops} are free; "
                "raise the budget or start fewer trials"
            )
        return replace(self, reserved_flops=self.reserved_flops + flops)

    def settle(self, *, reserved: int, spent: int) -> "Budget":
        """Turn a promise of ``reserved`` into ``spent``; the difference is free again.

        Raises:
            ValueError: If more was spent than promised, or more settled than reserved.
        """
        if not 0 <= spent <= reserved <= self.reserved_flops:
            raise ValueError(f"cannot settle {spent} of {reserved} FLOPs with {self.reserved_flops} reserved")
        return replace(
            self,
            reserved_flops=self.reserved_flops - reserved,
            spent_flops=self.spent_flops + spent,
        )

    def to_dict(self) -> dict[str, int]:
        """The four figures, for records."""
        return {
            "total_flops": self.total_flops,
            "spent_flops": self.spent_flops,
            "reserved_flops": self.reserved_flops,
            "free_flops": self.free_flops,
        }
