"""Data that a function of one's own returns."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from growth_service.errors import UserError
from growth_service.training.datasets.raw import Raw, Tokens

_RAW = ("inputs", "targets", "test_inputs", "test_targets", "scale")


def load_from_code(name: str | None) -> Raw | Tokens:
    """Call ``package.module:factory``.

    It returns a mapping of arrays or tensors: ``inputs`` ``[N, ...]`` and ``targets`` ``[N]``, perhaps
    ``test_inputs``, ``test_targets`` and ``scale``; or ``tokens`` ``[N]``, perhaps with ``vocab``.

    Raises:
        UserError: If there is no such function, or it returns something else.
    """
    module_name, _, attribute = (name or "").partition(":")
    if not attribute:
        raise UserError(f"data.folder {name!r} names no function: write package.module:factory")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"data.folder {name}: there is no such function ({error})") from error
    found = factory()
    if not isinstance(found, Mapping):
        raise UserError(
            f"{name} returned a {type(found).__name__}: return a mapping with inputs and targets, or tokens"
        )
    if "tokens" in found:
        return _tokens(found, name)
    if unknown := sorted(set(found) - set(_RAW)):
        raise UserError(f"{name} returned {unknown[0]!r}: allowed are {', '.join(_RAW)}, or tokens and vocab")
    arrays = {key: None if found.get(key) is None else np.asarray(found[key]) for key in _RAW[:4]}
    inputs, targets = arrays["inputs"], arrays["targets"]
    if inputs is None or targets is None or len(inputs) != len(targets) or targets.ndim != 1:
        raise UserError(f"{name} must return inputs [N, ...] and as many targets [N]")
    if (arrays["test_inputs"] is None) != (arrays["test_targets"] is None):
        raise UserError(f"{name} returned one of test_inputs and test_targets: return both or neither")
    test_targets = arrays["test_targets"]
    return Raw(
        inputs,
        targets.astype(np.int64),
        arrays["test_inputs"],
        None if test_targets is None else test_targets.astype(np.int64),
        found.get("scale"),
    )


def _tokens(found: Mapping[str, Any], name: str | None) -> Tokens:
    tokens = np.asarray(found["tokens"])
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or not len(tokens):
        raise UserError(f"{name} must return tokens as whole numbers [N], got {tokens.dtype} {tokens.shape}")
    vocab = int(found.get("vocab", int(tokens.max()) + 1))
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        raise UserError(f"{name} returned tokens from {tokens.min()} to {tokens.max()}: they must be in [0, {vocab})")
    return Tokens(tokens=tokens, vocab=vocab)
