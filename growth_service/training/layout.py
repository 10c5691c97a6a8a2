"""Where a trial keeps what: names of its folders. Knows no torch."""

from collections.abc import Iterator
from pathlib import Path


def stage_folders(stages: Path) -> Iterator[Path]:
    """Stage checkpoints of a trial, newest first (jumpboards are not among them)."""
    if stages.is_dir():
        yield from sorted((p for p in stages.iterdir() if p.name.isdigit()), reverse=True)
