"""A study of many trials: what comes in is decided fast, and what is kept stays small."""

import time
import tracemalloc

from growth_service.core.judging import Rule
from growth_service.core.referee import Referee
from tests.factories import stage_record

TRIALS, STAGES = 10_000, 10
BUDGET = {"total_flops": STAGES * 1000, "spent_flops": 0, "reserved_flops": 0, "free_flops": 0}


def records_of(trial):
    for stage in range(STAGES):
        loss = 2.0 + (trial * 37 % 101) / 100 - 0.1 * stage
        yield stage_record(
            trial=f"t{trial}",
            stage=stage,
            flops_total=(stage + 1) * 1000,
            loss_val=loss,
            budget=BUDGET,
            certificates=[],
        )


def play_study(*, deterministic):
    """All trials in waves of four; returns decisions, seconds and bytes at the peak."""
    referee = Referee(wave_size=4, deterministic=deterministic, rule=Rule())
    decisions, spent = 0, 0.0
    tracemalloc.start()
    for trial in range(TRIALS):
        referee.enlist(f"t{trial}", index=trial)
        for record in records_of(trial):
            started = time.process_time()
            decisions += len(referee.hear(record))
            spent += time.process_time() - started
        started = time.process_time()
        decisions += len(referee.hear_end(f"t{trial}"))
        spent += time.process_time() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return decisions, spent, peak


def test_a_hundred_thousand_decisions_come_at_five_hundred_a_second_at_least_and_in_little_memory():
    """Measured under the tracing of memory, which slows Python down several times."""
    for deterministic in (True, False):
        decisions, seconds, peak = play_study(deterministic=deterministic)
        assert decisions == TRIALS * STAGES
        assert decisions / seconds > 500
        assert peak < 64 * 2**20
