"""What a grow step returns: all that optimiser, data-parallel wrapper and records get to know."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One change to a live network. A growth log is the ordered list of these."""

    kind: Literal["insert", "widen", "jumpboard"]
    """``insert`` and ``widen`` keep the function; ``jumpboard`` changes it on purpose."""
    path: str
    """Path of the new (or, for a jumpboard, the moved) block, for example ``stem.grown.0``."""
    block: dict[str, Any]
    """Configuration of the block, enough to build it again."""
    parameters: tuple[str, ...]
    """Names of the parameters that are new (or, for a jumpboard, that moved)."""
    parameters_added: int
    output_change: float | None
    """Largest absolute change of any output seen on the check batch; None: not checked."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self) | {"parameters": list(self.parameters)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Receipt":
        """Inverse of :meth:`to_dict`."""
        return cls(**data | {"parameters": tuple(data["parameters"])})
