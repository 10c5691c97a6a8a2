"""A long stage that is kept while it is under way, so that a kill costs minutes of it and not all.

It is a checkpoint like that of a finished stage, in a folder of its own, with how far the stage was. It is used only by
the very stage that wrote it: the stage's key says so.
"""

import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from growth_service.core.receipts import Receipt
from growth_service.errors import CheckpointError
from growth_service.training import checkpoint as store
from growth_service.training.growing import StepTaken
from growth_service.training.state import TrialState

logger = logging.getLogger(__name__)
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


class Kept(NamedTuple):
    """A stage as it was kept."""

    checkpoint: store.Checkpoint
    far: UnderWay
    before: dict[str, Tensor]
    """Weights with which its training began; empty where it may end anywhere."""


def keep(state: TrialState, far: UnderWay) -> None:
    """Write the stage down as it is."""
    state.beat(far.spent)  # first: what was kept is never more than what was told
    state.save(folder_of(state).name, under_way=far.to_dict())


def find(state: TrialState, *, key: str) -> Kept | None:
    """The coming stage as it was kept; None where it was not, where another stage was, or files are damaged."""
    if not (folder_of(state) / "manifest.json").is_file():
        return None
    try:
        found = store.load_checkpoint(folder_of(state))
        if found.streams["under_way"]["key"] != key:
            return None
        far = UnderWay.from_dict(found.streams["under_way"])
        return Kept(found, far, _weights_before(state, far))
    except CheckpointError as error:
        logger.warning("Starting stage %d of %s over, since %s", state.stage, state.config.trial, error)
        return None


def _weights_before(state: TrialState, far: UnderWay) -> dict[str, Tensor]:
    """Those of the jumpboard, or of the stage before where nothing grew."""
    if far.floor is None:
        return {}
    name = f"{state.stage:03d}-jumpboard" if far.taken.words else f"{state.stage - 1:03d}"
    return store.load_checkpoint(state.folder / "stages" / name).model.state_dict()


def drop(state: TrialState, *, stage: int) -> None:
    """Remove what was kept of a stage that has ended."""
    if state.ranks.is_first:
        shutil.rmtree(state.folder / "stages" / f"{stage:03d}-under-way", ignore_errors=True)
