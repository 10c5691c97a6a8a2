"""A tracker that keeps everything in memory: for tests, simulations and trials without a store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from growth_service.tracking.base import RunTracker, Status, StoredRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(kw_only=True)
class MemoryRun:
    """One run: all that was written to it."""

    name: str
    tags: dict[str, str]
    status: Status = "RUNNING"
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Steps and values by metric, in the order of writing."""
    texts: dict[str, str] = field(default_factory=dict)
    figures: dict[str, "Figure"] = field(default_factory=dict)


class MemoryRuns:
    """A :class:`growth_service.tracking.base.RunStore` that is a dict of runs by id."""

    def __init__(self) -> None:
        self.runs: dict[str, MemoryRun] = {}

    def study(self, name: str) -> StoredRun | None:
        """The first study run of this name."""
        wanted = {"growth.kind": "study", "growth.study": name}.items()
        return next((self._stored(i) for i, run in self.runs.items() if wanted <= run.tags.items()), None)

    def children(self, parent_id: str) -> list[StoredRun]:
        """Runs below a run, oldest first."""
        return [self._stored(i) for i, run in self.runs.items() if run.tags.get("mlflow.parentRunId") == parent_id]

    def create(self, name: str, *, tags: Mapping[str, str]) -> str:
        """Make a run; ids count up."""
        run_id = f"run-{len(self.runs)}"
        self.runs[run_id] = MemoryRun(name=name, tags=dict(tags))
        return run_id

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Write params; a second value for a key is an error, as in MLflow."""
        known = self.runs[run_id].params
        changed = sorted(key for key in params if known.get(key, params[key]) != params[key])
        assert not changed, f"params {changed} of {run_id} have a value already"
        known.update(params)

    def log_metrics(self, run_id: str, metrics: Mapping[str, float], *, step: int) -> None:
        """Append metrics at one step."""
        for key, value in metrics.items():
            self.runs[run_id].metrics.setdefault(key, []).append((step, float(value)))

    def history(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        """Steps and values of one metric, by step."""
        return sorted(self.runs[run_id].metrics.get(metric, []), key=lambda point: point[0])

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set or replace tags."""
        self.runs[run_id].tags.update(tags)

    def log_text(self, run_id: str, text: str, path: str) -> None:
        """Keep a text under its path."""
        self.runs[run_id].texts[path] = text

    def log_figure(self, run_id: str, figure: "Figure", path: str) -> None:
        """Keep a figure under its path."""
        self.runs[run_id].figures[path] = figure

    def set_status(self, run_id: str, status: Status) -> None:
        """Set the state of a run."""
        self.runs[run_id].status = status

    def _stored(self, run_id: str) -> StoredRun:
        run = self.runs[run_id]
        return StoredRun(run_id=run_id, status=run.status, tags=dict(run.tags), params=dict(run.params))


class MemoryTracker(RunTracker):
    """A :class:`growth_service.tracking.base.Tracker` in memory.

    Args:
        runs: What an earlier tracker wrote, to resume from it; empty by default.
    """

    def __init__(self, runs: MemoryRuns | None = None) -> None:
        self.memory = runs if runs is not None else MemoryRuns()
        super().__init__(self.memory)
