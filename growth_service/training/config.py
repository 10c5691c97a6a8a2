"""Everything that determines one trial, as plain JSON that crosses processes."""

from dataclasses import asdict, dataclass
from typing import Any

from growth_service.core.schedule import GrowthSchedule

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialConfig:
    """The input of the stage loop. Equal configurations give equal records."""

    trial: str
    """Name of the trial in its study, for example ``05-joint``."""
    schedule: dict[str, Any]
    """A :class:`GrowthSchedule` as JSON."""
    base: dict[str, Any]
    """``{"spec": ..., "seed": ...}`` of the base network."""
    training: dict[str, Any]
    """Optimiser, learning rate, batch size, shards: the job's ``training`` section."""
    probe: dict[str, Any]
    """Ridge and sample limits: the job's ``probe`` section."""
    budget_flops: int
    seed: int
    folder: str
    """Where the trial keeps its checkpoints."""
    data: str
    """Folder of the prepared data set."""
    cache: dict[str, Any] | None = None
    """``{"folder": ..., "limit_bytes": ...}`` of the stage cache; None: run every stage."""
    checkpoint_s: float = 600.0
    """Seconds after which a stage that is under way is kept."""
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TrialConfig":
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: If it was written by another version.
        """
        if data.get("version") != VERSION:
            raise ValueError(f"trial configuration has version {data.get('version')!r}, this code reads {VERSION}")
        return cls(**data)

    def growth_schedule(self) -> GrowthSchedule:
        """The schedule as a value."""
        return GrowthSchedule.from_dict(self.schedule)
