"""Quantities with units, parsed by one function for job files and flags alike.

``2e15``, ``"3 PFLOP"``, ``"90 min"``, ``"64 GiB"``: a bare number is in the base unit of
its dimension (FLOP, seconds, bytes, nats). YAML reads ``2e15`` as a string; that works too.
"""

import math
import re
from typing import Literal

from growth_service.errors import UserError

Dimension = Literal["flops", "seconds", "bytes", "nats"]

_SI = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21}
_IEC = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

UNITS: dict[Dimension, dict[str, float]] = {
    "flops": {f"{p}FLOP": f for p, f in _SI.items()},
    "seconds": {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
    "bytes": {"B": 1.0}
    | {f"{p}B": f for p, f in _IEC.items()}
    | {f"{p}B": f for p, f in _SI.items() if p in {"k", "M", "G", "T"}},
    "nats": {"nats": 1.0, "nat": 1.0},
}
"""Accepted units of each dimension, as multiples of its base unit."""

_EXAMPLES: dict[Dimension, str] = {"flops": "20 GFLOP", "seconds": "90 min", "bytes": "64 GiB", "nats": "0.1 nats"}
_QUANTITY = re.compile(r"^\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-z]*)\s*$")


def parse_quantity(value: float | str, *, dimension: Dimension) -> float:
    """Turn a number or a text with a unit into a number in the base unit.

    Args:
        value: A number in the base unit, or a text such as ``"20 GFLOP"`` or ``"90 min"``.
        dimension: What is measured; decides which units are allowed.

    Returns:
        The amount in FLOP, seconds, bytes or nats; always finite and > 0.

    Raises:
        UserError: If the text is no quantity, its unit is unknown for this dimension, or
            the amount is not a finite positive number.
    """
    units = UNITS[dimension]
    if isinstance(value, bool):
        raise UserError(f"{value!r} is not a quantity in {dimension}: write a number and a unit")
    base = next(iter(units))
    allowed = ", ".join(units)
    if isinstance(value, str):
        match = _QUANTITY.match(value)
        if match is None:
            raise UserError(
                f"{value!r} is not a quantity in {dimension}: write a number and a unit, "
                f"for example {_EXAMPLES[dimension]!r} (units: {allowed})"
            )
        number, unit = float(match.group(1)), match.group(2) or base
        if unit not in units:
            raise UserError(f"unit {unit!r} in {value!r} is unknown for {dimension}: use one of {allowed}")
        amount = number * units[unit]
    else:
        try:
            amount = float(value)
        except OverflowError:
            amount = math.inf
    if not math.isfinite(amount) or amount <= 0:
        raise UserError(f"{value!r} must be a finite amount above zero (in {base} or one of {allowed})")
    return amount


def format_flops(flops: float) -> str:
    """Write FLOPs for people, with three digits: ``12.3 GFLOP``."""
    for prefix, factor in sorted(_SI.items(), key=lambda item: -item[1]):
        if abs(flops) >= 0.9995 * factor:  # 999.9 M is written as 1 G
            return f"{flops / factor:.3g} {prefix}FLOP"
    return f"{flops:.3g} FLOP"


def format_seconds(seconds: float) -> str:
    """Write a duration for people: ``48 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
