"""Names that a job gives: of something shipped, or ``package.module:function`` of the user's own."""

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from growth_service.errors import UserError


def found(known: Mapping[str, Callable[..., Any]], name: str, *, where: str, what: str) -> Callable[..., Any]:
    """The function of a name; one with a colon is imported, from the present folder too.

    Raises:
        UserError: If nothing is known by it, or it cannot be imported.
    """
    if ":" in name:
        return _imported(name, where=where, what=what)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"{where}: unknown {what} {name!r}; {hint}use one of {', '.join(sorted(known))}, or package.module:function"
        )
    return known[name]


def _imported(name: str, *, where: str, what: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), attribute, None)
    except Exception as error:
        raise UserError(
            f"{where}: {what} {name!r} cannot be imported from {here} ({type(error).__name__}: {error})"
        ) from error
    if not callable(function):
        raise UserError(f"{where}: {what} {name!r}: module {module_name!r} has no function {attribute!r}")
    found_function: Callable[..., Any] = function
    return found_function
