import itertools

from growth_service.core.decisions import Stop, TrainOn
from growth_service.core.judging import Rule
from growth_service.core.referee import Referee
from tests.factories import stage_record


def referee(*, deterministic: bool = True, wave_size: int = 2) -> Referee:
    judge = Referee(wave_size=wave_size, deterministic=deterministic, rule=Rule(name="ratio", prune_ratio=2.0))
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


def test_a_wave_is_closed_only_when_all_its_trials_are_known():
    """A searcher may name the second trial of a wave after the first has ended, on a machine with few cores."""
    judge = Referee(wave_size=2, deterministic=True, rule=Rule(name="ratio", prune_ratio=2.0))
    judge.enlist("a", index=0)
    judge.hear(record("a", loss=1.0))
    judge.hear_end("a")
    judge.enlist("b", index=1)
    (verdict,) = judge.hear(record("b", loss=9.0))
    assert isinstance(verdict.decision, TrainOn)  # not compared with its own wave


def test_a_trial_is_judged_by_all_its_records():
    judge = Referee(wave_size=1, deterministic=True, rule=Rule(optimism=1.0, margin=0.0))
    for index, trial in enumerate("ab"):
        judge.enlist(trial, index=index)
    for stage, loss in enumerate((2.0, 1.0, 0.9)):
        judge.hear(record("a", loss=loss, stage=stage))
    judge.hear_end("a")
    decisions = [judge.hear(record("b", loss=loss, stage=s))[0].decision for s, loss in enumerate((2.0, 1.9))]
    assert isinstance(decisions[0], TrainOn)  # one record has no slope: nothing is known
    assert "could at best become" in decisions[1].reason
