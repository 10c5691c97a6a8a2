"""Where output goes: results on standard output, progress and errors on standard error."""

import json
import sys
from typing import Any

from rich.console import Console


def emit_json(value: Any) -> None:
    """The one JSON document of ``--json``; non-finite figures are null."""
    sys.stdout.write(json.dumps(_finite(value), indent=1) + "\n")


def out() -> Console:
    """Console of results, wide enough for tables when it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 150, highlight=False)


def err() -> Console:
    """Console of progress and errors."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else 150, highlight=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
