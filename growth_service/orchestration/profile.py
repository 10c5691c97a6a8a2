"""Where the time of a study went: seconds of its lanes, added up. Knows neither torch nor Ray."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from growth_service.core.records import StageRecord

AFTER = {
    "up": "waiting for a trial",
    "took": "at work",
    "record": "waiting for a verdict",
    "verdict": "at work",
    "end": "waiting for a trial",
}
"""Events of a lane (its workers are up, it takes a trial, hands a record in, reads the verdict, ends the trial), and
what it does after each."""


class Event(NamedTuple):
    """Something that a lane did."""

    at: float
    """Seconds since the epoch, all on one clock."""
    lane: int
    what: str
    """A key of :data:`AFTER`."""
    trial: str = ""


class Part(NamedTuple):
    """What lanes spent time on."""

    what: str
    seconds: float
    """Of all lanes together."""
    share: float
    """Of the time in which there could have been lanes at work."""


def profile_of(
    events: Iterable[Event], stages: Sequence[StageRecord], *, started: float, ended: float, lanes: int
) -> list[Part]:
    """Split ``lanes`` times the time between ``started`` and ``ended`` (seconds since the epoch).

    Args:
        events: In the order of time.
        stages: Those that these lanes ran.
        started: When the study began.
        ended: When its last lane ended.
        lanes: That were started.

    Returns:
        Training first, then what was not training; empty without lanes.
    """
    total = lanes * (ended - started)
    if total <= 0:
        return []
    spent = dict.fromkeys(("start of workers", "waiting for a trial", "waiting for a verdict", "at work"), 0.0)
    since = dict.fromkeys(range(lanes), (started, "start of workers"))
    for event in events:
        then, doing = since[event.lane]
        spent[doing] += event.at - then
        since[event.lane] = (event.at, AFTER[event.what])
    for then, doing in since.values():
        spent[doing] += ended - then
    ran = [s for s in stages if not s.reused]
    training = sum(s.stage_s - s.overhead_s for s in ran)
    growing = sum(s.grow_s for s in ran)
    measuring = sum(s.overhead_s - s.grow_s for s in ran)
    parts = {
        "training": training,
        "growing": growing,
        "evaluating and looking": measuring,
        "between stages (checkpoints, waiting for shared stages)": max(
            0.0, spent.pop("at work") - training - growing - measuring
        ),
    } | spent
    return [Part(what, seconds, seconds / total) for what, seconds in parts.items()]
