"""Records as JSON text that every parser accepts.

Records hold NaN (a failed trial has no test loss) and infinity (half of a gain of zero needs
endless samples). Python would write both as bare words, which browsers and most tools refuse.
Here they are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, as in the JSON mapping of
protocol buffers, and become numbers again when read.
"""

import json
import math
from typing import Any

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: Any) -> str:
    """Write plain JSON data, indented, in the order of its keys.

    Args:
        value: Dicts with text keys, lists, tuples (become lists), texts, numbers, booleans, None.

    Returns:
        Strict JSON; numbers that are not finite are the words above.

    Raises:
        TypeError: If something in it is not plain JSON.
    """
    return json.dumps(_encoded(value), indent=1, allow_nan=False)


def from_json(text: str) -> Any:
    """Inverse of :func:`to_json`; tuples come back as lists.

    Raises:
        json.JSONDecodeError: If the text is cut short or no JSON at all.
    """
    return _decoded(json.loads(text))


def _encoded(value: Any) -> Any:
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value
