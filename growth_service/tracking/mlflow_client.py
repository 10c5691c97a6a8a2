"""Opening an MLflow store, quietly and without a trace elsewhere.

MLflow is imported here and only inside functions, so that nobody pays for it who does not use it.
"""

import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from growth_service.errors import UserError

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

_DEFAULTS = {
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # stdout belongs to --json
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # a study reports to its own store and to nobody else
}
_QUIET = ("mlflow", "alembic")
CONNECT_S = 2.0


def check_reachable(tracking_uri: str) -> None:
    """Refuse a tracking server that nobody answers at, at once: MLflow itself would retry for minutes.

    Raises:
        UserError: If there is no connection within ``CONNECT_S`` seconds; other kinds of store pass.
    """
    parts = urlsplit(tracking_uri)
    if parts.scheme not in ("http", "https"):
        return
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"no MLflow server answers at {parts.scheme}://{parts.hostname}:{parts.port or ''} ({error}): start it, or "
            "change mlflow.tracking_uri (left out, records go to a file in the job's storage)"
        ) from None


def open_client(tracking_uri: str) -> "MlflowClient":
    """A client for one store; no global of MLflow is set or read.

    For a sqlite store this makes the tables where they are missing, so call it once before
    several processes use a new store. ``MLFLOW_RUN_ID`` and ``MLFLOW_EXPERIMENT_ID`` have no
    influence: they belong to MLflow's active-run stack, which is not used.

    Args:
        tracking_uri: ``sqlite:///PATH`` or the address of a tracking server.

    Raises:
        UserError: If MLflow cannot open it.
    """
    check_reachable(tracking_uri)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
    except MlflowException as error:
        raise UserError(f"cannot open the MLflow store at {tracking_uri}: {first_line(error)}") from error


def sqlite_path(tracking_uri: str) -> Path | None:
    """The absolute path of a sqlite store; None for servers and for stores in memory."""
    scheme, separator, rest = tracking_uri.partition(":///")
    path = rest.partition("?")[0]
    if not separator or scheme.partition("+")[0] != "sqlite" or not path or path == ":memory:":
        return None
    return Path(path).absolute()


def search_all(client: "MlflowClient", experiment_ids: list[str], filter_string: str) -> "list[Run]":
    """All matching runs that are not deleted, oldest first, over as many pages as it takes."""
    found: list[Run] = []
    token: str | None = None
    while experiment_ids:
        page = client.search_runs(experiment_ids, filter_string, max_results=1000, page_token=token)
        found.extend(page)
        token = page.token
        if not token:
            break
    return sorted(found, key=lambda run: (run.info.start_time, run.info.run_name or "", run.info.run_id))


def first_line(error: Exception) -> str:
    """The first line of an error, for messages to people; its type where it has no text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
