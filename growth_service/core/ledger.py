r"""The exact account of what a grow step did to the validation loss.

With old network f, jumpboard f~ (the network one line-searched step away) and new network f',
losses L_S on the training subset in force and L_V on validation, and gap = L_V - L_S,

.. math:: L_V(f) - L_V(f') = \Delta_R + \Delta_{ERM} - \Gamma,\quad
   \Delta_R = L_V(f) - L_V(\tilde f),\; \Delta_{ERM} = L_S(\tilde f) - L_S(f'),\;
   \Gamma = gap(f') - gap(\tilde f).

Source: the test-risk accounting of Cheng et al. 2026 (arXiv:2605.08297), as an identity.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Six measured losses of one grow step, in nats, and the three terms they make."""

    step: str
    """The grow step in words, for example ``depth@groups.0.blocks.0``."""
    old_train: float
    old_val: float
    jumpboard_train: float
    jumpboard_val: float
    new_train: float
    new_val: float
    fallback: bool
    """True where training ended above the jumpboard on S, so the jumpboard was kept."""

    @property
    def delta_r(self) -> float:
        """Representational margin on validation: what the jumpboard already gained."""
        return self.old_val - self.jumpboard_val

    @property
    def delta_erm(self) -> float:
        """What training gained on S from the jumpboard on; >= 0 by the fallback rule."""
        return self.jumpboard_train - self.new_train

    @property
    def gamma(self) -> float:
        """Growth of the generalisation gap from the jumpboard to the new network."""
        return (self.new_val - self.new_train) - (self.jumpboard_val - self.jumpboard_train)

    @property
    def residual(self) -> float:
        """Left side minus right side of the identity: rounding only."""
        return (self.old_val - self.new_val) - (self.delta_r + self.delta_erm - self.gamma)

    def to_dict(self) -> dict[str, Any]:
        """Losses, terms and residual as plain JSON."""
        terms = {"delta_r": self.delta_r, "delta_erm": self.delta_erm}
        return asdict(self) | terms | {"gamma": self.gamma, "residual": self.residual}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Ledger":
        """Inverse of :meth:`to_dict`; derived terms are computed anew."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})
