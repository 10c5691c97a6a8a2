"""Grow residual networks under a compute budget: deeper, wider, more data - or stop?

Importing this package loads neither torch nor Ray: names resolve when they are first used.
Blocks are in :mod:`growth_service.blocks`.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_HOMES = {
    "informed_block": "growth_service.probing",
    "probe": "growth_service.probing",
    "probe_stream": "growth_service.training.stream_probe",
    "Looks": "growth_service.probing",
    "jumpboard": "growth_service.probing",
    "removal_costs": "growth_service.probing",
    "unit_costs": "growth_service.probing",
    "sites": "growth_service.models",
    "insert_block": "growth_service.growth",
    "widen": "growth_service.growth",
    "rebuild": "growth_service.growth",
    "growth_log": "growth_service.growth",
    "widen_stream": "growth_service.growth",
    "duplicate_units": "growth_service.growth",
    "merge": "growth_service.growth",
    "remove_block": "growth_service.growth",
    "remove_units": "growth_service.growth",
    "follow": "growth_service.growth",
    "save_network": "growth_service.training.export",
    "load_network": "growth_service.training.export",
    "load_job": "growth_service.spec",
    "run_job": "growth_service.cli.study",
}

__all__ = [
    "Looks",
    "duplicate_units",
    "follow",
    "growth_log",
    "informed_block",
    "insert_block",
    "jumpboard",
    "load_job",
    "load_network",
    "merge",
    "probe",
    "probe_stream",
    "rebuild",
    "removal_costs",
    "remove_block",
    "remove_units",
    "run_job",
    "save_network",
    "sites",
    "unit_costs",
    "widen",
    "widen_stream",
]

try:
    __version__ = version("growth-service")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'growth_service' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*__all__, "__version__"])
