"""A study of many trials: what comes in is decided fast, and what is kept stays small."""

import time
import tracemalloc
from dataclasses import replace

import pytest

from growth_service.core.judging import Rule
from growth_service.core.referee import Referee
from tests.factories import stage_record

TRIALS, STAGES = 10_000, 10
BUDGET = {"total_flops": STAGES * 1000, "spent_flops": 0, "reserved_flops": 0, "free_flops": 0}
TEMPLATES = [stage_record(stage=s, flops_total=(s + 1) * 1000, budget=BUDGET, certificates=[]) for s in range(STAGES)]


def records_of(trial):
    for record in TEMPLATES:
        loss = 2.0 + (trial * 37 % 101) / 100 - 0.1 * record.stage
        yield replace(record, trial=f"t{trial}", loss_val=loss)


def play_study(*, deterministic, num_trials):
    """All trials in waves of four; returns decisions and seconds."""
    referee = Referee(wave_size=4, deterministic=deterministic, rule=Rule())
    decisions, spent = 0, 0.0
    for trial in range(num_trials):
        referee.enlist(f"t{trial}", index=trial)
        for record in records_of(trial):
            started = time.process_time()
            decisions += len(referee.hear(record))
            spent += time.process_time() - started
        started = time.process_time()
        decisions += len(referee.hear_end(f"t{trial}"))
        spent += time.process_time() - started
    return decisions, spent


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_hundred_thousand_decisions_come_at_five_hundred_a_second_at_least(deterministic):
    decisions, seconds = play_study(deterministic=deterministic, num_trials=TRIALS)
    assert decisions == TRIALS * STAGES
    assert decisions / seconds > 500


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_is_kept_of_a_trial_is_small(deterministic):
    """A tenth of the trials, since tracing memory slows Python down: ten thousand would stay under 64 MiB."""
    tracemalloc.start()
    play_study(deterministic=deterministic, num_trials=TRIALS // 10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 10 * peak < 64 * 2**20
