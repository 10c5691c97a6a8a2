"""Texts: characters of a file, or tokens of a binary file that is mapped, not read."""

from pathlib import Path

import numpy as np

from growth_service.errors import DataNotFoundError, UserError
from growth_service.training.datasets.raw import Tokens


def load_text(path: Path | None) -> Tokens:
    """A ``.txt`` file as characters, or a ``.bin`` file of little-endian 16-bit tokens.

    Raises:
        DataNotFoundError: If there is no such file.
        UserError: If it has another ending, is no text, or is empty.
    """
    if path is None or not path.is_file():
        raise DataNotFoundError(f"data.folder {path} is no file: name a .txt file, or a .bin file of 16-bit tokens")
    match path.suffix:
        case ".txt":
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path} is no text in UTF-8: {error}") from error
            return _characters(text, path)
        case ".bin":
            if not path.stat().st_size or path.stat().st_size % 2:
                raise UserError(f"{path} has {path.stat().st_size} bytes: 16-bit tokens take two each")
            tokens = np.memmap(path, dtype="<u2", mode="r")
            return Tokens(tokens=tokens, vocab=int(tokens.max()) + 1)
        case suffix:
            raise UserError(f"{path}: cannot read {suffix or 'a file without an ending'} as a text; use .txt or .bin")


def _characters(text: str, path: Path) -> Tokens:
    if not text:
        raise UserError(f"{path} is empty")
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    alphabet, tokens = np.unique(points, return_inverse=True)
    if len(alphabet) > np.iinfo(np.uint16).max:
        raise UserError(f"{path} has {len(alphabet)} different characters, more than 16 bits can tell apart")
    return Tokens(
        tokens=tokens.astype(np.uint16), vocab=len(alphabet), alphabet="".join(chr(point) for point in alphabet)
    )
