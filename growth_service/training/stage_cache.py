"""Finished stages on shared storage: trials that begin alike run their common beginning once.

An entry is a folder named by the hash of everything that determines the stage. Whoever wants an entry locks its
name: the first one finds nothing and runs the stage, the others wait for the lock and find it. The kernel drops the
lock of a process that dies, so a dead runner never blocks the others. Source of the idea: Shin et al. 2020, "Hippo"
(arXiv:2006.11972).
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from growth_service.training.files import sha256_of

NUMERICS = ("core", "blocks", "models", "growth", "probing", "training")
"""Packages whose code decides what a stage gives."""
logger = logging.getLogger(__name__)


@functools.cache
def numerics_version() -> str:
    """Digest of the code that decides what a stage gives, of torch's version and of the processor's type."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256(f"{torch.__version__} {platform.machine()}".encode())
    for package in NUMERICS:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(sha256_of(file).encode())
    return digest.hexdigest()


def stage_key(**determined_by: Any) -> str:
    """The address of a stage: a digest of plain JSON values and of the version of the numerics."""
    text = json.dumps(determined_by | {"numerics": numerics_version()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(kw_only=True)
class Claim:
    """The right to run one stage, or the stage that another trial ran."""

    found: Path | None
    """Folder of the finished stage; None: the holder of the claim runs it."""
    _entry: Path
    _lock: TextIO
    _cache: "StageCache"

    def publish(self, *folders: Path) -> None:
        """Keep copies of these folders as the result of the stage, all or nothing, and make room for them.

        A cache that cannot be written is no reason to lose a stage: it is said, and the trial goes on.
        """
        try:
            self._publish(*folders)
        except OSError as error:
            logger.warning("A finished stage is not shared, since the stage cache cannot be written: %s", error)

    def _publish(self, *folders: Path) -> None:
        partial = self._entry.with_name(f".{self._entry.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for folder in folders:
            shutil.copytree(folder, partial / folder.name, copy_function=_link)
        shutil.rmtree(self._entry, ignore_errors=True)
        partial.rename(self._entry)
        self._cache.evict()  # the present entry is locked, so it stays

    def release(self) -> None:
        """Let the next one have it."""
        self._lock.close()


class StageCache:
    """A folder of finished stages.

    Args:
        folder: Shared by all who use it.
        limit_bytes: Least recently used entries are dropped beyond this.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes

    def claim(self, key: str) -> Claim:
        """Wait until nobody runs this stage; then it is there, or the caller runs it."""
        (self._folder / "locks").mkdir(parents=True, exist_ok=True)
        lock = (self._folder / "locks" / key).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        entry = self._folder / key
        found = entry if entry.is_dir() else None
        if found is not None:
            with contextlib.suppress(OSError):  # evicted at this very moment: loading it will say so
                os.utime(entry, (time.time(), time.time()))
        return Claim(found=found, _entry=entry, _lock=lock, _cache=self)

    def evict(self) -> None:
        """Drop the entries that were not used for longest and nobody holds, until the rest is within the limit."""
        used = {e: found for e in self._entries() if (found := _use_of(e)) is not None}
        total = sum(size for _, size in used.values())
        for entry, (_, size) in sorted(used.items(), key=lambda item: item[1][0]):
            if total <= self._limit_bytes:
                return
            if self._drop(entry):
                total -= size

    def _drop(self, entry: Path) -> bool:
        """Remove an entry, unless somebody is at it."""
        with (self._folder / "locks" / entry.name).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            logger.info("Dropping %s from the stage cache: it is over %d bytes", entry.name[:12], self._limit_bytes)
            shutil.rmtree(entry, ignore_errors=True)
            return True

    def _entries(self) -> Iterator[Path]:
        return (p for p in self._folder.iterdir() if p.is_dir() and len(p.name) == hashlib.sha256().digest_size * 2)


def _use_of(entry: Path) -> tuple[float, int] | None:
    """When an entry was used last, and its bytes; None where another trial drops it at this very moment."""
    try:
        return entry.stat().st_mtime, sum(f.stat().st_size for f in entry.rglob("*") if f.is_file())
    except OSError:
        return None


def _link(source: str, target: str) -> str:
    """A hard link where the storage has them (checkpoints are never written in place), else a copy."""
    try:
        os.link(source, target)
    except OSError:
        return str(shutil.copy2(source, target))
    return target
