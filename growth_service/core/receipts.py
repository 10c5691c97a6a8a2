"""What a grow step returns: all that optimiser, data-parallel wrapper and records get to know."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One change to a live network. A growth log is the ordered list of these."""

    kind: Literal["insert", "widen", "duplicate", "stream", "remove", "shrink", "jumpboard"]
    """``insert``, ``widen`` (units or heads of a block) and ``stream`` (channels) keep the function, the last to
    rounding, as ``duplicate`` (copies of units) does; ``remove`` (a block) and ``shrink`` (units or heads) may change
    it, ``jumpboard`` does so on purpose."""
    path: str
    """Path of the block that is new, gone, smaller or moved, for example ``stem.grown.0``; of the group whose stream
    got wider."""
    block: dict[str, Any]
    """Configuration of the block, enough to build it again (of copies of units under ``branch``, beside the indices of
    the ``copied`` ones); of a stream its new ``channels``; of a block that shrank
    the ``units`` and ``heads`` that are gone."""
    parameters: tuple[str, ...]
    """Names of the parameters that are new, gone, smaller or moved."""
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
