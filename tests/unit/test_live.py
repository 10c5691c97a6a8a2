import json

import pytest

from growth_service.core.decisions import Stop, TrainOn
from growth_service.core.records import FinalRecord
from growth_service.errors import UserError, WorkFailedError
from growth_service.orchestration import plan, resources, storage
from growth_service.orchestration.live import UNEXPLAINED, LiveStudy
from growth_service.orchestration.sampling import Known, fitting
from growth_service.orchestration.searcher import WaveSuggester
from growth_service.tracking.memory import MemoryTracker
from growth_service.training.datasets import prepare
from tests.factories import stage_record
from tests.jobs import small_job

SUGGEST = {"space": "certified_space", "trials": 5, "seed": 3}


class Seen:
    def __init__(self):
        self.started, self.stages, self.ended = [], [], []

    def trial_started(self, trial):
        self.started.append(trial)

    def stage_done(self, record):
        self.stages.append((record.trial, record.stage))

    def trial_done(self, record):
        self.ended.append(record.trial)


class Study:
    """A live study without Ray, fed by hand."""

    def __init__(self, job, *, resume=False):
        self.ran_s, self.gone, self.abandoned = 0.0, None, []
        self.folder = storage.open_study(job, resume=resume)
        data = prepare("digits", seed=0, target=self.folder.data)
        self.verdicts, self.seen = [], Seen()
        self.tracker = tracker = MemoryTracker()
        tracker.open_study(self.folder.name, job={}, job_text="")
        self.live = LiveStudy(
            job,
            folder=self.folder,
            data=data,
            listed=plan.planned_trials(job),
            suggester=WaveSuggester(job, wave_size=2) if job.search.suggest else None,
            budget=resources.study_budget(job),
            wave_size=2,
            tracker=tracker,
            observer=self.seen,
            post=self.verdicts.append,
            abandon=self.abandoned.append,
            gone=lambda: self.gone,
            exchange="none",
            ran_s=lambda: self.ran_s,
        )

    def finish(self, trial, *, loss=0.5, flops=1000):
        record = stage_record(trial=trial, stage=0, flops_total=flops, loss_val=loss)
        self.live.hear_stage(record)
        self.live.hear_final(end_of(trial, loss=loss, flops=flops))


def end_of(trial, *, loss=0.5, flops=1000):
    return FinalRecord(
        trial=trial, cause="schedule", reason="all stages are trained", num_stages=1, loss_val=loss, accuracy_val=0.9,
        loss_test=loss, accuracy_test=0.9, flops_total=flops, budget={},
    )  # fmt: skip


def test_listed_trials_start_in_their_order(tmp_path):
    study = Study(small_job(tmp_path))
    names = [study.live.next_trial()[0] for _ in range(3)]
    assert names == ["scratch", "joint", "late"]
    assert study.live.next_trial() is None
    assert study.live.all_started


def test_a_repeated_record_is_heard_once_and_answered_again(tmp_path):
    study = Study(small_job(tmp_path))
    study.live.next_trial()
    record = stage_record(trial="scratch", stage=0)
    study.live.hear_stage(record)
    study.live.hear_stage(record)
    assert study.seen.stages == [("scratch", 0)]
    assert [v.stage for v in study.verdicts] == [0, 0]
    assert study.verdicts[0].decision == study.verdicts[1].decision


def test_the_budget_of_the_study_balances_at_every_moment(tmp_path):
    study = Study(small_job(tmp_path))
    total = study.live.budget.total_flops

    def balanced():
        b = study.live.budget
        return b.spent_flops + b.reserved_flops + b.free_flops == total

    for name in ("scratch", "joint", "late"):
        study.live.next_trial()
        assert balanced()
        study.finish(name, flops=123)
        assert balanced()
    assert study.live.budget.spent_flops == 369
    assert study.live.budget.reserved_flops == 0


def test_a_study_that_runs_out_of_budget_starts_no_further_trial(tmp_path):
    study = Study(small_job(tmp_path, budget__study="13 GFLOP"))
    assert study.live.next_trial() is not None
    assert study.live.next_trial() is not None
    assert study.live.next_trial() is None
    assert not study.live.all_started  # what the two do not spend may still pay for the third
    study.finish("scratch", flops=6_000_000_000)
    study.finish("joint", flops=5_000_000_000)
    assert study.live.next_trial() is None
    assert study.live.all_started
    assert study.live.not_started == 1


def test_what_a_trial_does_not_spend_pays_for_a_later_one(tmp_path):
    study = Study(small_job(tmp_path, budget__study="13 GFLOP"))
    study.live.next_trial()
    study.live.next_trial()
    study.finish("joint", flops=1_000_000_000)
    assert study.live.next_trial() is not None


def test_a_study_is_run_by_one_process_at_a_time(tmp_path):
    folder = storage.open_study(small_job(tmp_path), resume=False)
    with folder.locked(), pytest.raises(UserError, match="is being run by another process"), folder.locked():
        pass
    with folder.locked():
        pass


def test_resuming_never_starts_a_new_study(tmp_path):
    job = small_job(tmp_path)
    for _ in range(2):
        storage.open_study(job, resume=False).write_state(status="finished")
    with pytest.raises(UserError, match="there is no unfinished study"):
        storage.open_study(job, resume=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["small", "small-2"]


def test_a_journal_line_that_a_kill_cut_short_does_not_swallow_the_next(tmp_path):
    folder = storage.open_study(small_job(tmp_path), resume=False)
    folder.append_journal({"number": 0})
    with (folder.path / "suggestions.jsonl").open("a") as file:
        file.write('{"number": 1, "argu')
    folder.append_journal({"number": 1})
    assert folder.journal() == [{"number": 0}, {"number": 1}]


def test_a_cause_that_is_known_later_explains_only_what_was_unexplained(tmp_path):
    study = Study(small_job(tmp_path))
    study.live.next_trial()
    study.live.next_trial()
    study.live.hear_failure("scratch", UNEXPLAINED)
    study.live.hear_failure("joint", "out of memory")
    study.live.explain_failures({"scratch": "OSError: disk full", "joint": "another", "late": "never started"})
    reasons = {name: record.final.reason for name, record in study.live.done.items()}
    assert reasons == {"scratch": "OSError: disk full", "joint": "out of memory"}


def test_a_journal_of_other_suggestions_is_refused(tmp_path):
    study = Study(small_job(tmp_path, search__suggest=SUGGEST))
    study.folder.append_journal({"number": 0, "arguments": {"use": "certified", "data_share": 0.123}})
    for name in ("scratch", "joint", "late"):
        study.live.next_trial()
        study.finish(name)
    with pytest.raises(WorkFailedError, match="where the study's journal has"):
        study.live.next_trial()


def test_a_failed_trial_ends_with_its_reason_and_the_others_go_on(tmp_path):
    study = Study(small_job(tmp_path))
    study.live.next_trial()
    study.live.next_trial()
    study.live.hear_failure("scratch", "out of memory")
    study.finish("joint")
    assert study.live.done["scratch"].final.cause == "failed"
    assert study.live.done["scratch"].final.reason == "out of memory"
    assert study.live.done["joint"].final.cause == "schedule"


def test_suggestions_wait_for_whole_waves_and_do_not_depend_on_arrival(tmp_path):
    def run(order, folder):
        job = small_job(folder, search__suggest=SUGGEST)
        study = Study(job)
        for name in ("scratch", "joint", "late"):
            study.live.next_trial()
            study.finish(name)
        for wave in ((3, 4), (5, 6)):
            names = [study.live.next_trial()[0] for _ in wave]
            assert study.live.next_trial() is None
            assert not study.live.all_started
            for i in order:
                study.finish(names[i], loss=0.1 * wave[i])
        return [e["arguments"] for e in study.folder.journal()]

    assert run((0, 1), tmp_path / "one") == run((1, 0), tmp_path / "two")


def test_a_resumed_study_asks_the_sampler_the_same_and_keeps_its_journal(tmp_path):
    job = small_job(tmp_path, search__suggest=SUGGEST)
    first = Study(job)
    for name in ("scratch", "joint", "late"):
        first.live.next_trial()
        first.finish(name)
        keep(first, name)
    for _ in range(2):
        name, _ = first.live.next_trial()
        first.finish(name, loss=0.4)
        keep(first, name, loss=0.4)
    third, config = first.live.next_trial()
    before = first.folder.journal()

    again = Study(job, resume=True)
    name, found = again.live.next_trial()
    assert (name, found["trial"]["schedule"]) == (third, config["trial"]["schedule"])
    assert again.folder.journal() == before
    assert set(again.live.done) == set(first.live.done)


def keep(study, trial, *, loss=0.5):
    """Leave in the trial's folder what its workers would have left."""
    folder = study.folder.trials / trial
    stage = folder / "stages" / "000"
    stage.mkdir(parents=True)
    (stage / "history.json").write_text(json.dumps([study.live.stages[trial][0].to_dict()]))
    (folder / "trial.json").write_text("{}")
    (folder / "final.json").write_text(json.dumps(end_of(trial, loss=loss).to_dict()))


def test_a_finished_study_gets_a_new_folder_and_an_unfinished_one_is_refused(tmp_path):
    job = small_job(tmp_path)
    folder = storage.open_study(job, resume=False)
    with pytest.raises(UserError, match="study 'small'.*is unfinished: go on with --resume"):
        storage.open_study(job, resume=False)
    folder.write_state(status="finished")
    assert storage.open_study(job, resume=False).name == "small-2"


def test_resuming_needs_an_unfinished_study_of_the_same_job(tmp_path):
    with pytest.raises(UserError, match="there is no unfinished study 'small'.*run it without --resume"):
        storage.open_study(small_job(tmp_path), resume=True)
    storage.open_study(small_job(tmp_path), resume=False)
    with pytest.raises(UserError, match="was started with another job"):
        storage.open_study(small_job(tmp_path, budget__trial="7 GFLOP"), resume=True)


def test_resuming_continues_the_newest_unfinished_study(tmp_path):
    job = small_job(tmp_path)
    storage.open_study(job, resume=False).write_state(status="finished")
    second = storage.open_study(job, resume=False)
    assert storage.open_study(job, resume=True).path == second.path


def test_a_trial_that_can_never_fit_is_refused_with_the_numbers(tmp_path):
    job = small_job(tmp_path, resources__workers=4)
    with pytest.raises(UserError, match=r"needs 4 CPUs.*but there are 2"):
        resources.check_resources(job, cpus=2)
    assert resources.concurrent(small_job(tmp_path, resources__workers=2), cpus=2) == 1


def test_a_budget_below_one_batch_is_refused_before_anything_starts(tmp_path):
    job = small_job(tmp_path, budget__trial="100 MFLOP")
    data = prepare("digits", seed=0, target=tmp_path / "data")
    with pytest.raises(UserError, match=r"schedule scratch: budget\.trial 100 MFLOP over 3 stages does not pay"):
        plan.check_budgets(job, plan.planned_trials(job), data, folder=tmp_path)


def test_a_study_budget_below_one_trial_is_refused(tmp_path):
    with pytest.raises(UserError, match="not one trial could run"):
        resources.study_budget(small_job(tmp_path, budget__study="1 GFLOP"))


@pytest.mark.parametrize("grow", [{"use": "one_shot_late", "add_units": 3}, {"use": "certified", "units": 3}])
def test_steps_that_could_not_be_taken_are_refused_before_anything_starts(tmp_path, grow):
    job = small_job(tmp_path, search__schedules=[grow | {"name": "odd", "blocks": [1, 1], "hidden": [8, 8]}])
    data = prepare("digits", seed=0, target=tmp_path / "data")
    with pytest.raises(UserError, match=r"schedule odd: hidden 3 .* multiple of its group size 4"):
        plan.check_networks(job, plan.planned_trials(job), data)


def test_networks_that_do_not_fit_together_are_refused_with_the_schedule(tmp_path):
    entry = {"use": "scratch", "name": "odd", "blocks": [1], "hidden": [8, 8]}
    job = small_job(tmp_path, search__schedules=[entry])
    data = prepare("digits", seed=0, target=tmp_path / "data")
    with pytest.raises(UserError, match=r"schedule odd: .*must have 2 entries each"):
        plan.check_networks(job, plan.planned_trials(job), data)


# --- limits of a study ------------------------------------------------------------------------------


def test_no_more_trials_start_than_the_budget_names(tmp_path):
    study = Study(small_job(tmp_path, budget={"trial": "6 GFLOP", "trials": 2}))
    assert [study.live.next_trial()[0] for _ in range(2)] == ["scratch", "joint"]
    assert study.live.next_trial() is None
    assert (study.live.all_started, study.live.not_started) == (True, 1)


@pytest.mark.parametrize(
    "limit", [{"time": "1 h"}, {"money": 3, "price_per_hour": 3.0}, {"time": "2 h", "money": 1, "price_per_hour": 1}]
)
def test_a_study_out_of_time_or_money_starts_nothing_and_ends_what_runs(limit, tmp_path):
    study = Study(small_job(tmp_path, budget={"trial": "6 GFLOP"} | limit))
    study.live.next_trial()
    study.live.hear_stage(stage_record(trial="scratch", stage=0))
    study.ran_s = 3600.0
    assert study.live.all_started
    assert study.live.next_trial() is None
    study.live.hear_stage(stage_record(trial="scratch", stage=1))
    first, second = (v.decision for v in study.verdicts)
    assert (type(first), type(second), second.cause) == (TrainOn, Stop, "budget")
    assert "the 1 h 00 min" in second.reason


def test_a_verdict_that_was_given_before_the_time_was_up_stands(tmp_path):
    study = Study(small_job(tmp_path, budget={"trial": "6 GFLOP", "time": "1 h"}))
    study.live.next_trial()
    record = stage_record(trial="scratch", stage=0)
    study.live.hear_stage(record)
    study.ran_s = 3601.0
    study.live.hear_stage(record)
    assert study.verdicts[0] == study.verdicts[1]


def test_the_time_of_a_study_is_kept_for_those_who_resume_it(tmp_path):
    study = Study(small_job(tmp_path))
    study.live.next_trial()
    study.ran_s = 77.0
    study.finish("scratch")
    assert study.folder.state()["ran_s"] == 77.0


def test_what_was_begun_is_ended_and_heard_also_when_the_time_is_up(tmp_path):
    """Else a study that is resumed too late would lose what it had."""
    job = small_job(tmp_path, budget={"trial": "6 GFLOP", "time": "1 h"})
    first = Study(job)
    for name in ("scratch", "joint"):
        first.live.next_trial()
        first.finish(name)
    keep(first, "scratch")
    begun = first.folder.trials / "joint"
    begun.mkdir()
    (begun / "trial.json").write_text("{}")

    again = Study(job, resume=True)
    again.ran_s = 4000.0
    name, _ = again.live.next_trial()
    assert (name, set(again.live.done)) == ("joint", {"scratch"})
    assert again.live.next_trial() is None  # late was never begun
    assert (again.live.all_started, again.live.not_started) == (True, 1)
    assert isinstance(again.verdicts[0].decision, TrainOn)  # of a trial that had ended by itself
    again.live.hear_stage(stage_record(trial="joint", stage=0))
    assert again.verdicts[-1].decision.cause == "budget"


def test_the_last_stage_of_a_trial_is_not_called_a_victim_of_time(tmp_path):
    study = Study(small_job(tmp_path, budget={"trial": "6 GFLOP", "time": "1 h"}))
    study.live.next_trial()
    study.ran_s = 4000.0
    last = {"kind": "stop", "cause": "schedule", "reason": "all stages are trained"}
    study.live.hear_stage(stage_record(trial="scratch", stage=0, decision=last))
    assert isinstance(study.verdicts[0].decision, TrainOn)


def test_a_trial_that_failed_is_not_followed_any_more(tmp_path):
    study = Study(small_job(tmp_path))
    study.live.next_trial()
    study.live.hear_failure("scratch", "OSError: disk full")
    assert study.abandoned == ["scratch"]
    assert study.live.interrupted is None


def test_where_no_trial_can_run_the_study_is_interrupted_and_no_trial_has_failed(tmp_path):
    study = Study(small_job(tmp_path))
    study.live.next_trial()
    study.gone = "no lane is left"
    study.live.hear_failure("scratch", UNEXPLAINED)
    assert (study.live.interrupted, study.live.done) == ("no lane is left", {})
    assert study.live.all_started


def test_stages_of_an_earlier_process_are_none_of_this_ones_time(tmp_path):
    study = Study(small_job(tmp_path))
    folder = study.folder.trials / "scratch" / "stages" / "000"
    folder.mkdir(parents=True)
    (folder / "history.json").write_text(json.dumps([stage_record(trial="scratch", stage=0).to_dict()]))
    study.live.next_trial()
    for stage in (0, 1):
        study.live.hear_stage(stage_record(trial="scratch", stage=stage))
    assert [s.stage for s in study.live.heard_stages] == [1]


def test_money_needs_a_price(tmp_path):
    with pytest.raises(UserError, match=r"budget\.money needs budget\.price_per_hour"):
        small_job(tmp_path, budget={"trial": "6 GFLOP", "money": 3})


# --- starting from earlier studies --------------------------------------------------------------------


MAPPING = {"use": "joint", "confidence": {"low": 0.3, "high": 0.9}, "inner": ["copy", "random"]}


def suggested(known=(), *, number=8):
    """The first suggestions of a sampler, and the sampler."""
    job = small_job("nowhere", search__suggest={"space": MAPPING, "trials": number, "seed": 3})
    found = WaveSuggester(job, wave_size=number, known=known)
    return [found.ask(k)["confidence"] for k in range(number)], found


def test_a_sampler_that_knows_earlier_points_searches_near_the_good_ones():
    tried = [0.3 + 0.006 * k for k in range(100)]
    known = [known_point([abs(x - 0.8)], confidence=x) for x in tried]
    fresh, _ = suggested()
    warm, suggester = suggested(known)
    assert sum(abs(x - 0.8) for x in warm) < 0.6 * sum(abs(x - 0.8) for x in fresh)
    assert [suggester.drawn(k)["params"]["confidence"] for k in range(8)] == warm
    assert suggested(known)[0] == warm  # the same again for those who resume


def known_point(values, *, params=None, **arguments):
    """A point of the mapping, which draws the place of a choice in its list."""
    entry = {"use": "joint", "confidence": 0.5, "inner": "copy"} | arguments
    places = {"copy": 0, "random": 1}
    drawn = {"confidence": entry["confidence"], "inner": places.get(entry["inner"], 2)} if params is None else params
    return Known({"params": drawn, "arguments": entry}, values)


@pytest.mark.parametrize(
    "point",
    [
        known_point([0.1], confidence=0.95),  # outside
        known_point([0.1], inner="spline"),
        known_point([0.1], params={"inner": 0}),  # the space draws more now
        known_point([0.1], params={}),
        known_point([0.1], params={"confidence": 0.5, "inner": 1}),  # the same draw gives another schedule now
        known_point([0.1], blocks=[2, 2]),  # a setting that the space does not give any more
    ],
)
def test_points_that_do_not_fit_the_space_any_more_are_left_out(point):
    suggest = small_job("nowhere", search__suggest={"space": MAPPING, "trials": 1}).search.suggest
    good = known_point([0.1], inner="random")
    (trial,) = fitting(suggest, [point, good])
    assert (trial.params, trial.values) == ({"confidence": 0.5, "inner": 1}, [0.1])


def test_what_was_drawn_is_recorded_with_the_trial(tmp_path):
    study = Study(small_job(tmp_path, search__suggest=SUGGEST))
    for name in ("scratch", "joint", "late"):
        study.live.next_trial()
        study.finish(name)
    name, _ = study.live.next_trial()
    (run,) = [r for r in study.tracker.memory.runs.values() if r.tags.get("growth.trial") == name]
    drawn = json.loads(run.tags["growth.drawn"])
    assert {"data_share", "tolerance", "inner", "units"} <= set(drawn["params"])
    assert drawn["arguments"] == study.folder.journal()[0]["arguments"]
    assert not any("growth.drawn" in r.tags for r in study.tracker.memory.runs.values() if r is not run)
