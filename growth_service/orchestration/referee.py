"""Verdicts across trials in an order that does not depend on who reports first.

Trials form waves of as many as run at once. A trial is compared with the finished trials of
earlier waves only, and its verdict waits until those are all finished: the same study gives
the same verdicts however fast its trials run. Knows no Ray.
"""

from typing import NamedTuple

from growth_service.core.decisions import Decision, TrainOn
from growth_service.core.judging import Standing, judge
from growth_service.core.records import StageRecord


class Verdict(NamedTuple):
    """The answer that a trial waits for after a stage."""

    trial: str
    stage: int
    decision: Decision


class Referee:
    """Collects records; hands out each verdict once it can be given."""

    def __init__(self, *, wave_size: int, deterministic: bool, prune_ratio: float, grace_flops: int) -> None:
        self._wave_size, self._deterministic = wave_size, deterministic
        self._prune_ratio, self._grace_flops = prune_ratio, grace_flops
        self._index: dict[str, int] = {}
        self._standings: dict[str, dict[int, Standing]] = {}
        self._ended: set[str] = set()
        self._waiting: list[StageRecord] = []

    def enlist(self, trial: str, *, index: int) -> None:
        """Make a trial known before it starts; its index gives its wave."""
        self._index[trial] = index
        self._standings.setdefault(trial, {})

    def hear(self, record: StageRecord) -> list[Verdict]:
        """Take in a record; returns the verdicts that can be given now."""
        standing = Standing(trial=record.trial, flops=record.flops_total, loss_val=record.loss_val)
        self._standings[record.trial][record.stage] = standing
        self._waiting.append(record)
        return self._settle()

    def hear_end(self, trial: str) -> list[Verdict]:
        """A trial ended, well or badly; returns the verdicts that waited for it."""
        self._ended.add(trial)
        return self._settle()

    def _settle(self) -> list[Verdict]:
        given = []
        for record in list(self._waiting):
            rivals = self._rivals(record.trial)
            if rivals is None:
                continue
            self._waiting.remove(record)
            given.append(Verdict(record.trial, record.stage, self._judge(record, rivals)))
        return given

    def _judge(self, record: StageRecord, rivals: list[str]) -> Decision:
        standing = self._standings[record.trial][record.stage]
        finished = [s for rival in rivals for s in self._standings[rival].values()]
        if not finished:
            return TrainOn(reason="no trial of an earlier wave has finished to compare with")
        return judge(standing, finished, prune_ratio=self._prune_ratio, grace_flops=self._grace_flops)

    def _rivals(self, trial: str) -> list[str] | None:
        """Trials to compare with; None while one of them still has to finish."""
        if not self._deterministic:
            return sorted(self._ended - {trial})
        wave = self._index[trial] // self._wave_size
        earlier = [t for t, index in self._index.items() if index // self._wave_size < wave]
        return earlier if all(t in self._ended for t in earlier) else None
