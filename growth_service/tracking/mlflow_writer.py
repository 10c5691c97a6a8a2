"""A tracker that writes to MLflow, through the client alone."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from growth_service.errors import UserError
from growth_service.tracking.base import RunTracker, Status, StoredRun
from growth_service.tracking.mlflow_client import open_client, search_all, sqlite_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow.entities import Run


class MlflowRuns:
    """A :class:`growth_service.tracking.base.RunStore` that is one MLflow experiment.

    Nothing is retried here: a sqlite store waits for its lock by itself, and for a tracking
    server MLflow repeats requests (``MLFLOW_HTTP_REQUEST_MAX_RETRIES``).
    """

    def __init__(self, tracking_uri: str, *, experiment: str, artifact_location: str | None = None) -> None:
        database = sqlite_path(tracking_uri)
        if database is not None:
            database.parent.mkdir(parents=True, exist_ok=True)
            if artifact_location is None:
                artifact_location = (database.parent / "artifacts").as_uri()
        self.client = open_client(tracking_uri)
        self._experiment = experiment
        self._artifact_location = artifact_location
        self._experiment_id: str | None = None

    @property
    def experiment_id(self) -> str:
        """The experiment, made at the first use."""
        if self._experiment_id is None:
            known = self.client.get_experiment_by_name(self._experiment)
            if known is not None and known.lifecycle_stage != "active":
                raise UserError(
                    f"experiment {self._experiment!r} is deleted in MLflow: use another name, or bring it back "
                    f"with 'mlflow experiments restore --experiment-id {known.experiment_id}'"
                )
            self._experiment_id = (
                known.experiment_id
                if known is not None
                else self.client.create_experiment(self._experiment, artifact_location=self._artifact_location)
            )
        return self._experiment_id

    def study(self, name: str) -> StoredRun | None:
        """The first study run of this name."""
        studies = search_all(self.client, [self.experiment_id], "tags.`growth.kind` = 'study'")
        # Compared here: a filter cannot hold a name with quotes.
        return next((_stored(run) for run in studies if run.data.tags.get("growth.study") == name), None)

    def children(self, parent_id: str) -> list[StoredRun]:
        """Runs below a run, oldest first."""
        below = f"tags.`mlflow.parentRunId` = '{parent_id}'"
        return [_stored(run) for run in search_all(self.client, [self.experiment_id], below)]

    def create(self, name: str, *, tags: Mapping[str, str]) -> str:
        """Make a run."""
        tags = {"mlflow.source.name": "growth", **tags}
        return str(self.client.create_run(self.experiment_id, tags=tags, run_name=name).info.run_id)

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Write params in one batch."""
        from mlflow.entities import Param

        batch = [Param(key, value) for key, value in params.items()]
        self.client.log_batch(run_id, params=batch, synchronous=True)

    def log_metrics(self, run_id: str, metrics: Mapping[str, float], *, step: int) -> None:
        """Write metrics in one batch, at the present time."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        batch = [Metric(key, value, now_ms, step) for key, value in metrics.items()]
        self.client.log_batch(run_id, metrics=batch, synchronous=True)

    def history(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        """Steps and values of one metric, by step."""
        return sorted((m.step, m.value) for m in self.client.get_metric_history(run_id, metric))

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set or replace tags in one batch."""
        from mlflow.entities import RunTag

        self.client.log_batch(run_id, tags=[RunTag(k, v) for k, v in tags.items()], synchronous=True)

    def log_text(self, run_id: str, text: str, path: str) -> None:
        """Write or replace a text artifact."""
        self.client.log_text(run_id, text, path)

    def log_figure(self, run_id: str, figure: "Figure", path: str) -> None:
        """Write or replace a picture artifact."""
        self.client.log_figure(run_id, figure, path)

    def set_status(self, run_id: str, status: Status) -> None:
        """Set the state of a run, and its end time where it has ended."""
        if status == "RUNNING":
            self.client.update_run(run_id, status=status)
        else:
            self.client.set_terminated(run_id, status=status)


class MlflowTracker(RunTracker):
    """A :class:`growth_service.tracking.base.Tracker` that writes to one MLflow experiment.

    Making it opens the store, and for ``sqlite:///`` makes its folder and tables: do it once,
    in the driver, before anybody else opens the store.

    Args:
        tracking_uri: ``sqlite:///PATH`` or the address of a tracking server.
        experiment: Name of the experiment; made with the first study.
        artifact_location: Where a new experiment keeps its artifacts. None: ``artifacts`` beside
            a sqlite store, else what the server decides.

    Raises:
        UserError: If the store cannot be opened.
    """

    def __init__(self, tracking_uri: str, experiment: str, artifact_location: str | None = None) -> None:
        super().__init__(MlflowRuns(tracking_uri, experiment=experiment, artifact_location=artifact_location))


def _stored(run: "Run") -> StoredRun:
    return StoredRun(run_id=run.info.run_id, status=run.info.status, tags=run.data.tags, params=run.data.params)
