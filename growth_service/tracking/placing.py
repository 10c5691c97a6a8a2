"""Where names go in a crowded chart: beside their points, over nothing that matters, cut to fit."""

from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle, in points (1/72 inch) of a chart."""

    left: float
    low: float
    right: float
    high: float

    @classmethod
    def around(cls, x: float, y: float, *, width: float, height: float) -> "Box":
        """The box with this centre."""
        return cls(x - width / 2, y - height / 2, x + width / 2, y + height / 2)

    def hits(self, others: "Sequence[Box]") -> int:
        """How many of the others it covers in part; touching edges do not count."""
        return sum(
            self.left < o.right and o.left < self.right and self.low < o.high and o.low < self.high for o in others
        )

    def is_inside(self, frame: "Box") -> bool:
        """True where no part of it is outside the frame."""
        return (
            frame.left <= self.left and self.right <= frame.right and frame.low <= self.low and self.high <= frame.high
        )


class Name(NamedTuple):
    """A name to place: its point and the size of its text, in points."""

    x: float
    y: float
    width: float
    height: float


def place_names(names: Sequence[Name], *, marks: Sequence[Box], frame: Box) -> list[tuple[float, float]]:
    """Offsets from the points to the centres of their names, in points.

    One name after another takes the best spot that is left: inside the frame first, then free
    of other names, then near (within 20 points above or below), then free of marks.
    """
    placed: list[Box] = []
    out = []
    for name in names:
        dx, dy = min(_spots(name.width), key=lambda spot: _cost(name, spot, placed=placed, marks=marks, frame=frame))
        placed.append(_moved(name, dx, dy))
        out.append((dx, dy))
    return out


def elided(text: str, most: int) -> str:
    """At most ``most`` characters of a text, from both ends: paths differ at their ends."""
    if len(text) <= most:
        return text
    head = (most - 2) // 3
    return f"{text[:head]}..{text[len(text) - (most - 2 - head) :]}"


def _spots(width: float) -> list[tuple[float, float]]:
    """Places to try, the most pleasing first: below, beside, above, then ever farther."""
    side = width / 2 + 8
    near = [(0.0, -15.0), (-side, 0.0), (side, 0.0), (0.0, 15.0), (-side, -13.0), (side, -13.0), (side, 13.0)]
    return near + [(dx, sign * (15.0 + 14.0 * k)) for k in range(1, 9) for sign in (-1, 1) for dx in (0.0, -side, side)]


def _cost(name: Name, spot: tuple[float, float], *, placed: Sequence[Box], marks: Sequence[Box], frame: Box) -> float:
    here = _moved(name, *spot)
    is_far = abs(spot[1]) > 20
    return 100 * (not here.is_inside(frame)) + 20 * here.hits(placed) + 3 * is_far + here.hits(marks)


def _moved(name: Name, dx: float, dy: float) -> Box:
    return Box.around(name.x + dx, name.y + dy, width=name.width, height=name.height)
