"""Texts that come with Python, for jobs that need no files (``data.name: python``)."""

from typing import Any


def python_documentation() -> dict[str, Any]:
    """The topics of Python's own help, character by character: about 465,000 of them, installed with Python."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    index = {character: token for token, character in enumerate(sorted(set(text)))}
    return {"tokens": [index[character] for character in text], "vocab": len(index)}
