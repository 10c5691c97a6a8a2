"""Data that a function of one's own returns."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        found = factory()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(f"data.folder {name}: there is no such function without arguments ({error})") from error
    if not isinstance(found, Mapping):
        raise UserError(f"{name} returned a {type(found).__name__}: return a mapping with inputs and targets")
    if "tokens" in found:
        return _tokens(found, name)
    if unknown := sorted(set(map(str, found)) - set(_RAW)):
        raise UserError(f"{name} returned {unknown[0]!r}: allowed are {', '.join(_RAW)}, or tokens and vocab")
    inputs, targets = _samples(found, name, prefix="")
    if ("test_inputs" in found) != ("test_targets" in found):
        raise UserError(f"{name} returned one of test_inputs and test_targets: return both or neither")
    test_inputs, test_targets = _samples(found, name, prefix="test_") if "test_inputs" in found else (None, None)
    if test_inputs is not None and test_targets is not None:
        if test_inputs.shape[1:] != inputs.shape[1:]:
            raise UserError(f"{name} returned test inputs of {test_inputs.shape[1:]}, inputs are {inputs.shape[1:]}")
        if test_targets.max() > targets.max():
            raise UserError(
                f"{name} returned test targets up to {test_targets.max()}, training targets end at {targets.max()}"
            )
    scale = found.get("scale")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0):
        raise UserError(f"{name} returned scale {scale!r}: the largest value of an input, above 0, or None")
    return Raw(inputs, targets, test_inputs, test_targets, scale)


def _samples(found: Mapping[str, Any], name: str | None, *, prefix: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Inputs and as many classes, checked."""
    for key in ("inputs", "targets"):
        if found.get(prefix + key) is None:
            raise UserError(
                f"{name} must return {prefix}inputs [N, ...] and as many {prefix}targets [N]: no {prefix}{key}"
            )
    inputs, targets = (_array(found[prefix + key], prefix + key, name) for key in ("inputs", "targets"))
    if not inputs.ndim or not len(inputs) or targets.shape != (len(inputs),):
        raise UserError(
            f"{name} must return {prefix}inputs [N, ...] and as many {prefix}targets [N], got {inputs.shape} and "
            f"{targets.shape}"
        )
    if not np.issubdtype(targets.dtype, np.integer) or targets.min() < 0:
        raise UserError(
            f"{name} must return {prefix}targets as classes from 0 on, got {targets.dtype} from {targets.min()}"
        )
    return inputs, targets.astype(np.int64)


def _array(value: Any, what: str, name: str | None) -> NDArray[Any]:
    """Numbers as an array; tensors of any precision and device."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise UserError(f"{name} returned {what} that are no array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise UserError(f"{name} must return {what} as numbers, got {array.dtype}")
    return array


def _tokens(found: Mapping[str, Any], name: str | None) -> Tokens:
    tokens = _array(found["tokens"], "tokens", name)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or not len(tokens):
        raise UserError(f"{name} must return tokens as whole numbers [N], got {tokens.dtype} {tokens.shape}")
    vocab = found.get("vocab", int(tokens.max()) + 1)
    if isinstance(vocab, bool) or not isinstance(vocab, int):
        raise UserError(f"{name} returned vocab {vocab!r}: a whole number")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
        raise UserError(f"{name} returned tokens from {tokens.min()} to {tokens.max()}: they must be in [0, {vocab})")
    return Tokens(tokens=tokens, vocab=vocab)
