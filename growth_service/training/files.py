"""Small files that must be whole: digests and JSON that is on the disk when the call returns. Knows no torch."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def sha256_of(path: Path) -> str:
    """Digest of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write and flush to the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
