"""What a study found, as a value."""

from dataclasses import dataclass, field
from typing import Any

from growth_service.core.budget import Budget
from growth_service.core.frontier import SAME_COMPUTE_SHARE, Outcome, Preference, frontier, outcomes, prefer
from growth_service.core.records import TrialRecord
from growth_service.orchestration.profile import Part


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """Trials in the order in which they were planned, and what they say together."""

    name: str
    folder: str
    trials: list[TrialRecord]
    budget: Budget
    decisions: list[dict[str, Any]] = field(default_factory=list)
    """Verdicts of the scheduler, one a record."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Wall seconds of each phase of the run."""
    profile: list[Part] = field(default_factory=list)
    """What the lanes spent their time on."""
    not_started: int = 0
    """Trials that the study's limits did not leave room for."""
    machine: dict[str, float] = field(default_factory=dict)
    """CPU seconds of all processes (``cpu_s``)."""
    resumed: bool = False

    @property
    def frontier(self) -> list[Outcome]:
        """Schedules that no other beats on compute and validation loss."""
        return frontier(outcomes(self.trials), same_share=SAME_COMPUTE_SHARE)

    @property
    def preference(self) -> Preference | None:
        """The schedule to prefer, and why."""
        return prefer(outcomes(self.trials))

    @property
    def saved_flops(self) -> int:
        """What sharing the beginnings of trials saved: in their records, not in the study's account."""
        return sum(t.final.flops_reused for t in self.trials if t.final is not None)

    @property
    def failed(self) -> list[TrialRecord]:
        """Trials whose work failed."""
        return [t for t in self.trials if t.final is None or t.final.cause == "failed"]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        preference = self.preference
        return {
            "study": self.name,
            "folder": self.folder,
            "trials": [t.to_dict() for t in self.trials],
            "frontier": [o._asdict() for o in self.frontier],
            "prefer": preference._asdict() if preference else None,
            "budget": self.budget.to_dict(),
            "saved_flops": self.saved_flops,
            "decisions": self.decisions,
            "phases_s": self.phases_s,
            "profile": [part._asdict() for part in self.profile],
            "machine": self.machine,
            "not_started": self.not_started,
            "resumed": self.resumed,
        }
