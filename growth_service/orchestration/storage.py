"""The folder of a study: what was asked, where each trial stands, what came out.

Everything that a resumed study needs is here, as JSON and checkpoints; nothing is pickled.
"""

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from growth_service.core.records import FinalRecord, StageRecord, TrialRecord
from growth_service.errors import UserError
from growth_service.spec import JobSpec
from growth_service.training.layout import stage_folders


@dataclass(frozen=True, kw_only=True)
class StudyFolder:
    """Paths and small files of one study."""

    path: Path
    name: str

    @property
    def trials(self) -> Path:
        """One folder a trial."""
        return self.path / "trials"

    @property
    def data(self) -> Path:
        """The prepared data set."""
        return self.path / "data"

    def state(self) -> dict[str, Any]:
        """``study.json``: status, attempt, digest of the job; empty where there is none."""
        try:
            state: dict[str, Any] = json.loads((self.path / "study.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return state

    def write_state(self, **values: Any) -> None:
        """Change ``study.json``, whole or not at all."""
        write_json(self.path / "study.json", self.state() | values)

    def journal(self) -> list[dict[str, Any]]:
        """Suggestions of the searcher in order, as far as they were written down."""
        try:
            lines = (self.path / "suggestions.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        entries = []
        for line in lines:
            with contextlib.suppress(ValueError):  # a line cut short by a kill was never acted on
                entries.append(json.loads(line))
        return entries

    def append_journal(self, entry: dict[str, Any]) -> None:
        """Write a suggestion down before its trial starts."""
        path = self.path / "suggestions.jsonl"
        kept = "".join(json.dumps(e) + "\n" for e in self.journal())  # without a line that a kill cut short
        write_text(path, kept + json.dumps(entry) + "\n")

    def known_points(self) -> list[dict[str, Any]] | None:
        """What earlier studies told the sampler when this one began; None: it has not begun."""
        try:
            points: list[dict[str, Any]] = json.loads((self.path / "warm_start.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return points

    def keep_known_points(self, points: list[dict[str, Any]]) -> None:
        """Write down what the sampler is told at the start: a resumed study tells it the same."""
        write_json(self.path / "warm_start.json", points)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other drivers out of this study while inside.

        Raises:
            UserError: If another process runs it.
        """
        with (self.path / "driver.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"study {self.name!r} is being run by another process: wait for it, or end it first"
                ) from None
            yield

    def trial_record(self, trial: str, *, schedule: dict[str, Any], seed: int) -> TrialRecord:
        """What a trial left in its folder so far."""
        folder = self.trials / trial
        stages: tuple[StageRecord, ...] = ()
        for stage in stage_folders(folder / "stages"):
            with contextlib.suppress(OSError, ValueError):
                history = json.loads((stage / "history.json").read_text(encoding="utf-8"))
                stages = tuple(map(StageRecord.from_dict, history))
                break
        final = None
        with contextlib.suppress(OSError, ValueError):
            final = FinalRecord.from_dict(json.loads((folder / "final.json").read_text(encoding="utf-8")))
        return TrialRecord(trial=trial, schedule=schedule, seed=seed, stages=stages, final=final)


def open_study(job: JobSpec, *, resume: bool) -> StudyFolder:
    """The folder of a job's study: a fresh one, or the unfinished one that ``resume`` continues.

    Raises:
        UserError: If an unfinished study of this name exists and ``resume`` was not asked for, if the job of
            an unfinished study differs, or the storage cannot be written.
    """
    root = Path(job.storage).expanduser()
    digest = job.model_dump_json()
    for name in _names(job.name):
        folder = StudyFolder(path=root / name, name=name)
        state = folder.state()
        if not state:
            if resume:
                raise UserError(
                    f"there is no unfinished study {job.name!r} in {root} to resume: run it without --resume"
                )
            break
        if state["status"] != "finished":
            if not resume:
                raise UserError(
                    f"study {name!r} in {root} is unfinished: go on with --resume, or remove {folder.path} to start "
                    "anew"
                )
            if state["job"] != digest:
                raise UserError(
                    f"study {name!r} in {root} was started with another job: resume it with the same file and --set "
                    f"options, or remove {folder.path} to start anew"
                )
            return folder
    try:
        folder.trials.mkdir(parents=True, exist_ok=True)
        folder.write_state(status="running", job=digest, attempt=0)
        (folder.path / "job.json").write_text(job.model_dump_json(indent=1), encoding="utf-8")
    except OSError as error:
        raise UserError(f"storage {root} cannot be written ({error}): name another folder as storage") from error
    return folder


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a kill leaves the old file or the new one."""
    write_text(path, json.dumps(value, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write a text so that a kill leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def _names(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}-{number}"
        number += 1
