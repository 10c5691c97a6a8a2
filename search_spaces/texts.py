"""Texts that come with Python, for jobs that need no files (``data.name: python``)."""

import sys
import sysconfig
from pathlib import Path
from typing import Any


def python_documentation() -> dict[str, Any]:
    """The topics of Python's own help, character by character: about 465,000 of them, installed with Python."""
    from pydoc_data.topics import topics

    return _characters("\n\n".join(topics[name] for name in sorted(topics)))


def python_sources() -> dict[str, Any]:
    """The modules at the top of Python's standard library, character by character: about 4.7 million in ASCII."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [p.read_text(encoding="utf-8", errors="replace") for p in sorted(folder.glob("*.py"))]
    if not texts:
        raise FileNotFoundError(f"{sys.executable} keeps no sources of its standard library in {folder}")
    return _characters("\n\n".join(texts).encode("ascii", "replace").decode())


def _characters(text: str) -> dict[str, Any]:
    index = {character: token for token, character in enumerate(sorted(set(text)))}
    return {"tokens": [index[character] for character in text], "vocab": len(index)}
