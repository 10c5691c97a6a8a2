"""Verdicts across trials in an order that does not depend on who reports first.

Trials form waves of as many as run at once. A trial is compared with the finished trials of
earlier waves only, and its verdict waits until those are all finished: the same study gives
the same verdicts however fast its trials run. Knows no Ray.
"""

from collections import defaultdict
from typing import NamedTuple

from growth_service.core.decisions import CandidateReading, Decision, TrainOn
from growth_service.core.judging import Incumbents, Rule, Standing, judge
from growth_service.core.records import StageRecord


class Verdict(NamedTuple):
    """The answer that a trial waits for after a stage."""

    trial: str
    stage: int
    decision: Decision


class Referee:
    """Collects records; hands out each verdict once it can be given.

    Args:
        wave_size: Trials that run at once.
        deterministic: Whether a trial is compared with earlier waves only, and waits for them.
        rule: When to prune.
    """

    def __init__(self, *, wave_size: int, deterministic: bool, rule: Rule) -> None:
        self._wave_size, self._deterministic, self._rule = wave_size, deterministic, rule
        self._index: dict[str, int] = {}
        self._waves: dict[int, dict[int, str]] = defaultdict(dict)
        """Trials of each wave by index."""
        self._settled = 0
        """Waves that have ended, and are among the incumbents."""
        self._standings: dict[str, list[Standing]] = defaultdict(list)
        self._ended: set[str] = set()
        self._incumbents = Incumbents()
        self._waiting: list[StageRecord] = []

    def enlist(self, trial: str, *, index: int) -> None:
        """Make a trial known before it starts; its index gives its wave."""
        self._index[trial] = index
        self._waves[index // self._wave_size][index] = trial

    def hear(self, record: StageRecord) -> list[Verdict]:
        """Take in a record; returns the verdicts that can be given now."""
        self._standings[record.trial].append(_standing(record))
        self._waiting.append(record)
        return self._settle()

    def hear_end(self, trial: str) -> list[Verdict]:
        """A trial ended, well or badly; returns the verdicts that waited for it."""
        if trial not in self._ended:
            self._ended.add(trial)
            if not self._deterministic:
                self._incumbents.add(self._standings.pop(trial, []))
        return self._settle()

    def _settle(self) -> list[Verdict]:
        given: list[Verdict] = []
        while True:
            ready = [r for r in self._waiting if not self._deterministic or self._wave_of(r.trial) <= self._settled]
            given += [Verdict(r.trial, r.stage, self._judge(r)) for r in ready]
            self._waiting = [r for r in self._waiting if r not in ready]
            if not self._close_wave():
                return given

    def _close_wave(self) -> bool:
        """Put the oldest open wave among the incumbents once it is full and all of it has ended."""
        members = self._waves[self._settled]
        full = len(members) == self._wave_size and self._ended.issuperset(members.values())
        if not self._deterministic or not full:
            return False
        for index in sorted(members):
            self._incumbents.add(self._standings.pop(members[index], []))
        del self._waves[self._settled]
        self._settled += 1
        return True

    def _wave_of(self, trial: str) -> int:
        return self._index[trial] // self._wave_size

    def _judge(self, record: StageRecord) -> Decision:
        if self._incumbents.num_trials == 0 and self._deterministic:
            return TrainOn(reason="no trial of an earlier wave has finished to compare with")
        history = [s for s in self._standings[record.trial] if s.stage <= record.stage]
        until = record.budget.get("total_flops", record.flops_total)
        return judge(history, self._incumbents, rule=self._rule, until_flops=until)


def _standing(record: StageRecord) -> Standing:
    """What a record says to the other trials."""
    open_ = [CandidateReading.from_certificate(c) for c in record.certificates]
    return Standing(
        trial=record.trial,
        stage=record.stage,
        flops=record.flops_total,
        loss_val=record.loss_val,
        reachable_nats=max((c.gain_upper for c in open_), default=0.0),
    )
