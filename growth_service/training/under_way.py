"""A long stage that is kept while it is under way, so that a kill costs minutes of it and not all.

It is a checkpoint like that of a finished stage, in a folder of its own, with how far the stage was. It is used only by
the very stage that wrote it: the stage's key says so.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from growth_service.core.receipts import Receipt
from growth_service.errors import CheckpointError
from growth_service.training import checkpoint as store
from growth_service.training.growing import StepTaken
from growth_service.training.state import TrialState

EVERY_STEPS = 20
"""Optimiser steps between two looks at the clock: all ranks have to agree on the moment."""


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """How far a stage is."""

    key: str
    """The stage's address; see ``training.sharing``."""
    step: int
    """Optimiser steps done."""
    num_batches: int
    """Optimiser steps in all."""
    spent: int
    """FLOPs of the stage so far."""
    taken: StepTaken
    """The step with which it began."""
    losses: tuple[float, float, float, float] | None
    """Old network and jumpboard, on the training subset and on validation; None where nothing grew."""
    floor: float | None
    """Training loss that it must not end above."""
    look_flops: int
    """What its look will cost at most."""
    trained_s: float = 0.0
    grown_s: float = 0.0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self) | {"taken": asdict(self.taken) | {"receipts": [r.to_dict() for r in self.taken.receipts]}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "UnderWay":
        """Inverse of :meth:`to_dict`."""
        receipts = [Receipt.from_dict(r) for r in data["taken"]["receipts"]]
        losses = data["losses"]
        return cls(
            **data
            | {
                "taken": StepTaken(**data["taken"] | {"receipts": receipts}),
                "losses": None if losses is None else tuple(losses),
            }
        )


def folder_of(state: TrialState) -> Path:
    """Where the coming stage of a trial is kept while it is under way."""
    return state.folder / "stages" / f"{state.stage:03d}-under-way"


def keep(state: TrialState, far: UnderWay) -> None:
    """Write the stage down as it is."""
    state.save(folder_of(state).name, under_way=far.to_dict())
    state.beat(far.spent)


def find(state: TrialState, *, key: str) -> tuple[store.Checkpoint, UnderWay] | None:
    """The coming stage as it was kept; None where it was not, or where another stage was."""
    if not (folder_of(state) / "manifest.json").is_file():
        return None
    try:
        found = store.load_checkpoint(folder_of(state))
    except CheckpointError:
        return None
    far = UnderWay.from_dict(found.streams["under_way"])
    return (found, far) if far.key == key else None


def drop(state: TrialState, *, stage: int) -> None:
    """Remove what was kept of a stage that has ended."""
    if state.ranks.is_first:
        shutil.rmtree(state.folder / "stages" / f"{stage:03d}-under-way", ignore_errors=True)
