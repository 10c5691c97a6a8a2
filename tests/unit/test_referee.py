import itertools

from growth_service.core.decisions import Stop, TrainOn
from growth_service.orchestration.referee import Referee
from tests.factories import stage_record


def referee(*, deterministic: bool = True, wave_size: int = 2) -> Referee:
    judge = Referee(wave_size=wave_size, deterministic=deterministic, prune_ratio=2.0, grace_flops=0)
    for index, trial in enumerate("abcd"):
        judge.enlist(trial, index=index)
    return judge


def record(trial: str, *, loss: float, stage: int = 0):
    return stage_record(trial=trial, stage=stage, flops_total=(stage + 1) * 1000, loss_val=loss)


def test_trials_of_the_first_wave_go_on_at_once():
    judge = referee()
    (verdict,) = judge.hear(record("a", loss=9.0))
    assert isinstance(verdict.decision, TrainOn)
    (verdict,) = judge.hear(record("b", loss=1.0))
    assert isinstance(verdict.decision, TrainOn)


def test_a_verdict_waits_until_every_trial_of_earlier_waves_has_ended():
    judge = referee()
    judge.hear(record("a", loss=1.0))
    judge.hear(record("b", loss=1.0))
    judge.hear_end("a")
    assert judge.hear(record("c", loss=9.0)) == []
    (verdict,) = judge.hear_end("b")
    assert (verdict.trial, verdict.stage) == ("c", 0)
    assert isinstance(verdict.decision, Stop)
    assert verdict.decision.cause == "pruned"


def test_verdicts_do_not_depend_on_the_order_of_arrival():
    records = [record("a", loss=1.0), record("b", loss=3.0), record("c", loss=2.5), record("d", loss=1.5)]
    seen = set()
    for order in itertools.permutations(range(4)):
        judge = referee()
        given = [v for i in order for v in judge.hear(records[i])]
        given += [v for t in "ab" for v in judge.hear_end(t)]
        seen.add(tuple(sorted((v.trial, v.decision.reason) for v in given)))
    assert len(seen) == 1


def test_without_determinism_any_finished_trial_counts_at_once():
    judge = referee(deterministic=False)
    judge.hear(record("d", loss=1.0))
    judge.hear_end("d")
    (verdict,) = judge.hear(record("a", loss=9.0))
    assert isinstance(verdict.decision, Stop)


def test_a_failed_trial_still_lets_the_next_wave_be_judged():
    judge = referee()
    judge.hear_end("a")
    judge.hear_end("b")
    (verdict,) = judge.hear(record("c", loss=9.0))
    assert isinstance(verdict.decision, TrainOn)
