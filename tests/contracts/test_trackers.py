"""One contract for every tracker: what the driver may rely on, in memory and in MLflow alike."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from growth_service.core.records import METRICS, TrialRecord
from growth_service.tracking.base import RunTracker
from growth_service.tracking.jsontext import from_json
from growth_service.tracking.memory import MemoryRuns, MemoryTracker
from growth_service.tracking.mlflow_writer import MlflowTracker
from tests.factories import schedule_dict, stage_record, trial_record

JOB = {"name": "digits", "budget_flops": 3_000_000_000, "search": {"num_trials": 2, "seed": 7}}
JOB_TEXT = "name: digits   # as its author wrote it\n"
NUM_PER_STAGE = len(stage_record().metrics())


@dataclass(frozen=True)
class RunView:
    """A run read back from the store, not through the tracker."""

    run_id: str
    status: str
    tags: dict[str, str]
    params: dict[str, str]
    metrics: dict[str, list[tuple[int, float]]]
    """Every point ever written, in the order of steps."""
    artifact: Callable[[str], bytes | None]

    def json(self, path: str) -> Any:
        content = self.artifact(path)
        return None if content is None else from_json(content.decode())


class MemoryBench:
    """Trackers over one dict of runs."""

    def __init__(self) -> None:
        self._runs = MemoryRuns()

    def tracker(self) -> RunTracker:
        """As a new process would make it."""
        return MemoryTracker(self._runs)

    def runs(self) -> list[RunView]:
        return [
            RunView(run_id, run.status, run.tags, run.params, run.metrics, _memory_artifact(run.texts, run.figures))
            for run_id, run in self._runs.runs.items()
        ]


def _memory_artifact(texts: dict[str, str], figures: dict[str, Any]) -> Callable[[str], bytes | None]:
    return lambda path: texts[path].encode() if path in texts else (b"\x89PNG" if path in figures else None)


class MlflowBench:
    """Trackers over one experiment of a real sqlite store."""

    def __init__(self, folder: Path, experiment: str) -> None:
        self._uri, self._experiment = f"sqlite:///{folder}/mlflow.db", experiment

    def tracker(self) -> RunTracker:
        """As a new process would make it."""
        return MlflowTracker(self._uri, self._experiment)

    def runs(self) -> list[RunView]:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self._uri)
        experiment = client.get_experiment_by_name(self._experiment)
        found = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
        return [
            RunView(
                run.info.run_id,
                run.info.status,
                run.data.tags,
                run.data.params,
                {k: [(m.step, m.value) for m in _history(client, run, k)] for k in run.data.metrics},
                _mlflow_artifact(run.info.artifact_uri),
            )
            for run in found
        ]


def _history(client: Any, run: Any, key: str) -> list[Any]:
    return sorted(client.get_metric_history(run.info.run_id, key), key=lambda m: m.step)


def _mlflow_artifact(uri: str) -> Callable[[str], bytes | None]:
    folder = Path(uri.removeprefix("file://"))
    return lambda path: (folder / path).read_bytes() if (folder / path).is_file() else None


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(params=["memory", "mlflow"])
def bench(request: pytest.FixtureRequest, store_folder: Path) -> MemoryBench | MlflowBench:
    return MemoryBench() if request.param == "memory" else MlflowBench(store_folder, request.node.name)


Bench = MemoryBench | MlflowBench


def started(bench: Bench, *trials: str) -> RunTracker:
    """A tracker with the study and these trials open, as on first start and on resume."""
    tracker = bench.tracker()
    tracker.open_study("digits", job=JOB, job_text=JOB_TEXT)
    for trial in trials:
        tracker.open_trial(trial, schedule=schedule_dict(), seed=11)
    return tracker


def study_run(bench: Bench) -> RunView:
    (run,) = [r for r in bench.runs() if r.tags.get("growth.kind") == "study"]
    return run


def trial_run(bench: Bench, trial: str = "t00") -> RunView:
    (run,) = [r for r in bench.runs() if r.tags.get("growth.trial") == trial]
    return run


# The tree of runs


def test_a_trial_is_a_child_of_its_study(bench: Bench) -> None:
    tracker = started(bench, "t00", "t01")

    parent, child = study_run(bench), trial_run(bench)
    assert child.tags["mlflow.parentRunId"] == parent.run_id == tracker.run_id()
    assert child.run_id == tracker.run_id("t00")
    assert child.tags["growth.kind"] == "trial"
    assert child.tags["growth.study"] == parent.tags["growth.study"] == "digits"
    assert {r.status for r in bench.runs()} == {"RUNNING"}
    assert len(bench.runs()) == 3


def test_a_schedule_is_kept_whole_and_its_small_values_are_params(bench: Bench) -> None:
    started(bench, "t00")

    run = trial_run(bench)
    assert run.json("growth/schedule.json") == {"schedule": schedule_dict(), "seed": 11}
    assert run.params["schedule"] == "joint-grow"
    assert run.params["initial.blocks"] == "[2,2]"
    assert run.params["policy.kind"] == "signal"
    assert run.params["seed"] == "11"
    assert len(run.params["schedule_hash"]) == 12
    assert "policy.tolerance_nats" not in run.params, "None is no value"


def test_the_job_file_is_kept_as_written(bench: Bench) -> None:
    started(bench)

    assert study_run(bench).artifact("job.yaml") == JOB_TEXT.encode()
    assert study_run(bench).params["search.num_trials"] == "2"


def test_the_storage_folder_is_a_tag_where_there_is_one(bench: Bench) -> None:
    tracker = started(bench, "t00")
    tracker.open_trial("t01", schedule=schedule_dict(), seed=1, storage="/data/digits/t01")

    assert trial_run(bench, "t01").tags["growth.storage"] == "/data/digits/t01"
    assert "growth.storage" not in trial_run(bench, "t00").tags


# Stages


def test_every_metric_of_a_stage_is_written_under_a_known_name(bench: Bench) -> None:
    ledger = {"delta_r": 0.1, "delta_erm": 0.2, "gamma": -0.01}
    started(bench, "t00").log_stage(stage_record(ledger=ledger))

    written = trial_run(bench).metrics
    assert set(written) <= set(METRICS)
    assert {k: points[0][1] for k, points in written.items()} == stage_record(ledger=ledger).metrics()


def test_the_step_is_the_compute_in_megaflops_rounded_up(bench: Bench) -> None:
    tracker = started(bench, "t00")
    tracker.log_stage(stage_record(0, flops=1_000_001))
    tracker.log_stage(stage_record(1, flops=250_000_000))

    run = trial_run(bench)
    assert [step for step, _ in run.metrics["loss/val_nats"]] == [2, 250]
    assert [value for _, value in run.metrics["compute/flops_total"]] == [1_000_001, 250_000_000]


def test_steps_increase_even_where_stages_cost_next_to_nothing(bench: Bench) -> None:
    tracker = started(bench, "t00")
    for stage in range(4):
        tracker.log_stage(stage_record(stage, flops=10 + stage))

    for points in trial_run(bench).metrics.values():
        assert [step for step, _ in points] == [1, 2, 3, 4]
        assert all(isinstance(step, int) for step, _ in points)


def test_stages_of_trials_side_by_side_stay_apart_and_in_order(bench: Bench) -> None:
    tracker = started(bench, "t00", "t01")
    for stage in range(3):
        tracker.log_stage(stage_record(stage, trial="t00"))
        tracker.log_stage(stage_record(stage, trial="t01", depth=40 + stage))

    assert [value for _, value in trial_run(bench, "t00").metrics["arch/depth"]] == [2, 3, 4]
    assert [value for _, value in trial_run(bench, "t01").metrics["arch/depth"]] == [40, 41, 42]


def test_a_stage_that_is_logged_twice_is_written_once(bench: Bench) -> None:
    tracker = started(bench, "t00")
    tracker.log_stage(stage_record(0))
    tracker.log_stage(stage_record(0, attempt=1, stage_s=9.0))

    assert all(len(points) == 1 for points in trial_run(bench).metrics.values())


def test_a_stage_that_comes_after_a_later_one_is_refused(bench: Bench) -> None:
    tracker = started(bench, "t00")
    tracker.log_stage(stage_record(0))
    tracker.log_stage(stage_record(2))

    with pytest.raises(RuntimeError, match="stage 1 of trial t00 comes after a later stage"):
        tracker.log_stage(stage_record(1))
    with pytest.raises(RuntimeError, match="stage 1 of trial t00 comes after a later stage"):
        started(bench, "t00").log_stage(stage_record(1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_written_as_nan(bench: Bench, value: float) -> None:
    tracker = started(bench, "t00")
    tracker.log_stage(stage_record(0, loss_val=value))
    tracker.close_trial(trial_record(stages=(stage_record(0, loss_val=value),), cause="diverged"))

    run = trial_run(bench)
    assert math.isnan(run.metrics["loss/val_nats"][0][1])
    back = TrialRecord.from_dict(run.json("growth/events.json")).stages[0].loss_val
    assert back == value or (math.isnan(back) and math.isnan(value)), "the record keeps it exactly"


# Resume


def test_a_resumed_study_goes_on_in_the_same_runs(bench: Bench) -> None:
    started(bench, "t00").log_stage(stage_record(0))
    before = {r.run_id for r in bench.runs()}

    resumed = started(bench, "t00", "t01")

    after = [r.run_id for r in bench.runs()]
    assert len(after) == 3
    assert before < set(after)
    assert {resumed.run_id(), resumed.run_id("t00")} == before


def test_a_resumed_trial_has_the_points_of_an_undisturbed_one(bench: Bench) -> None:
    first = started(bench, "t00", "t01")
    for stage in range(4):
        first.log_stage(stage_record(stage, trial="t01", flops=7 + stage))
    for stage in range(2):
        first.log_stage(stage_record(stage, flops=7 + stage))

    second = started(bench, "t00")  # replays what it finds, then goes on
    for stage in range(4):
        second.log_stage(stage_record(stage, flops=7 + stage))

    assert trial_run(bench, "t00").metrics == trial_run(bench, "t01").metrics


def test_a_resumed_trial_that_replays_nothing_goes_on_above_its_last_step(bench: Bench) -> None:
    started(bench, "t00").log_stage(stage_record(0, flops=5_000_000))
    started(bench, "t00").log_stage(stage_record(1, flops=5_000_001))
    started(bench, "t00").log_stage(stage_record(2, flops=5_000_002))

    assert [step for step, _ in trial_run(bench).metrics["loss/val_nats"]] == [5, 6, 7]


def test_params_are_written_once_and_never_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    started(bench, "t00")
    resumed = bench.tracker()
    calls: list[str] = []
    monkeypatch.setattr(resumed._store, "log_params", lambda run_id, params: calls.append(run_id))

    resumed.open_study("digits", job=JOB, job_text=JOB_TEXT)
    for _ in range(2):
        resumed.open_trial("t00", schedule=schedule_dict(), seed=11)

    assert calls == []


def test_a_trial_that_died_before_its_params_gets_them_on_resume(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(run_id: str, params: Any) -> None:
        raise KeyboardInterrupt

    tracker = started(bench)
    monkeypatch.setattr(tracker._store, "log_params", die)
    with pytest.raises(KeyboardInterrupt):
        tracker.open_trial("t00", schedule=schedule_dict(), seed=11)
    assert trial_run(bench).params == {}
    monkeypatch.undo()

    started(bench, "t00")
    assert trial_run(bench).params["schedule"] == "joint-grow"


@pytest.mark.parametrize(("name", "seed"), [("other", 11), ("joint-grow", 12)])
def test_a_known_trial_with_another_schedule_or_seed_is_refused(bench: Bench, name: str, seed: int) -> None:
    started(bench, "t00")

    with pytest.raises(RuntimeError, match=r"t00 of study digits.*another schedule or seed"):
        started(bench).open_trial("t00", schedule=schedule_dict(name), seed=seed)


def test_the_same_trial_name_in_two_studies_is_two_runs(bench: Bench) -> None:
    started(bench, "t00").log_stage(stage_record(0))
    other = bench.tracker()
    other.open_study("digits-2", job=JOB, job_text=JOB_TEXT)
    other.open_trial("t00", schedule=schedule_dict("other"), seed=3)

    assert len(bench.runs()) == 4
    assert trial_run_of(bench, "digits-2").metrics == {}


def trial_run_of(bench: Bench, study: str) -> RunView:
    (run,) = [r for r in bench.runs() if r.tags["growth.study"] == study and "growth.trial" in r.tags]
    return run


def test_a_study_name_may_hold_quotes(bench: Bench) -> None:
    for _ in range(2):
        bench.tracker().open_study('Ann\'s "digits"', job=JOB, job_text=JOB_TEXT)

    assert len(bench.runs()) == 1


# The end of a trial


def test_a_finished_trial_has_its_record_its_picture_and_its_end(bench: Bench) -> None:
    tracker, record = started(bench, "t00"), trial_record()
    for stage in record.stages:
        tracker.log_stage(stage)
    tracker.close_trial(record)

    run = trial_run(bench)
    assert run.status == "FINISHED"
    assert TrialRecord.from_dict(run.json("growth/events.json")) == record
    assert run.artifact("growth/sites.png")[:4] == b"\x89PNG"
    assert run.tags["growth.cause"] == "schedule"
    assert run.tags["growth.reason"] == "all 3 stages are trained"
    assert run.tags["growth.verdict"] == "undetermined"
    last_step = run.metrics["loss/val_nats"][-1][0]
    assert run.metrics["loss/test_nats"] == [(last_step, record.final.loss_test)]


def test_test_numbers_stand_at_the_last_step_also_where_steps_were_forced_up(bench: Bench) -> None:
    tracker = started(bench, "t00")
    cheap = tuple(stage_record(s, flops=10 + s) for s in range(3))
    tracker.close_trial(trial_record(stages=cheap))

    assert [step for step, _ in trial_run(bench).metrics["accuracy/test"]] == [3]


def test_a_trial_without_probes_has_neither_picture_nor_verdict(bench: Bench) -> None:
    tracker = started(bench, "t00")
    bare = tuple(stage_record(s, certificates=[], verdict=None, tolerance_nats=None) for s in range(2))
    tracker.close_trial(trial_record(stages=bare))

    run = trial_run(bench)
    assert run.artifact("growth/sites.png") is None
    assert "growth.verdict" not in run.tags


def test_closing_a_trial_writes_the_stages_that_were_missed(bench: Bench) -> None:
    tracker = started(bench, "t00")
    tracker.log_stage(stage_record(0))
    tracker.close_trial(trial_record())

    assert [value for _, value in trial_run(bench).metrics["arch/depth"]] == [2, 3, 4]


def test_a_failed_trial_is_marked_failed_and_has_no_test_numbers(bench: Bench) -> None:
    tracker = started(bench, "t00")
    tracker.close_trial(trial_record(num_stages=1, cause="failed"))

    run = trial_run(bench)
    assert run.status == "FAILED"
    assert run.tags["growth.reason"] == "worker 1 died three times"
    assert "loss/test_nats" not in run.metrics


def test_a_trial_that_failed_before_its_first_stage_can_be_closed(bench: Bench) -> None:
    tracker = started(bench, "t00")
    tracker.close_trial(trial_record(num_stages=0, cause="failed"))

    assert trial_run(bench).status == "FAILED"
    assert trial_run(bench).json("growth/events.json")["stages"] == []


def test_a_reason_that_is_too_long_is_cut(bench: Bench) -> None:
    record = trial_record()
    record = replace(record, final=replace(record.final, reason="x" * 9000))
    started(bench, "t00").close_trial(record)

    assert trial_run(bench).tags["growth.reason"] == "x" * 5000
    assert trial_run(bench).json("growth/events.json")["final"]["reason"] == "x" * 9000


def test_closing_twice_in_any_process_changes_nothing(bench: Bench) -> None:
    tracker = started(bench, "t00")
    tracker.close_trial(trial_record())
    before = trial_run(bench)
    tracker.close_trial(trial_record())
    started(bench, "t00").close_trial(trial_record())

    after = trial_run(bench)
    assert (after.status, after.metrics, after.tags) == (before.status, before.metrics, before.tags)


def test_a_close_that_was_cut_short_is_finished_on_resume(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    tracker = started(bench, "t00")
    monkeypatch.setattr(tracker._store, "set_tags", die)
    with pytest.raises(KeyboardInterrupt):
        tracker.close_trial(trial_record())
    monkeypatch.undo()
    started(bench, "t00").close_trial(trial_record())

    run = trial_run(bench)
    assert run.status == "FINISHED"
    assert len(run.metrics["loss/test_nats"]) == 1
    assert len(run.metrics["loss/val_nats"]) == 3


def test_a_failed_trial_may_be_tried_again(bench: Bench) -> None:
    started(bench, "t00").close_trial(trial_record(num_stages=1, cause="failed"))
    again = started(bench, "t00")
    assert trial_run(bench).status == "RUNNING"
    again.close_trial(trial_record())

    run = trial_run(bench)
    assert (run.status, run.tags["growth.cause"]) == ("FINISHED", "schedule")
    assert len(run.metrics["loss/val_nats"]) == 3


def test_a_record_without_an_end_cannot_close_a_trial(bench: Bench) -> None:
    with pytest.raises(ValueError, match="trial t00 has no end"):
        started(bench, "t00").close_trial(trial_record(cause=None))


# What is refused


def test_new_numbers_for_a_closed_trial_are_refused(bench: Bench) -> None:
    tracker = started(bench, "t00")
    tracker.close_trial(trial_record())
    tracker.log_stage(stage_record(2))  # known: nothing to do

    with pytest.raises(RuntimeError, match=r"stage 3 of trial t00.*closed"):
        tracker.log_stage(stage_record(3))
    with pytest.raises(RuntimeError, match=r"stage 3 of trial t00.*closed"):
        started(bench, "t00").log_stage(stage_record(3))
    assert len(trial_run(bench).metrics["loss/val_nats"]) == 3


def test_numbers_for_an_unknown_trial_are_refused(bench: Bench) -> None:
    tracker = started(bench, "t00")

    with pytest.raises(RuntimeError, match="trial t09 of study digits is unknown"):
        tracker.log_stage(stage_record(0, trial="t09"))
    with pytest.raises(RuntimeError, match="trial t09 of study digits is unknown"):
        tracker.close_trial(trial_record("t09"))


def test_nothing_is_taken_while_no_study_is_open(bench: Bench) -> None:
    tracker = bench.tracker()

    with pytest.raises(RuntimeError, match="no study is open"):
        tracker.open_trial("t00", schedule={}, seed=0)
    with pytest.raises(RuntimeError, match="no study is open"):
        tracker.close_study([], summary={}, ok=True)
    tracker.interrupt_study("nothing to interrupt")


# The end of a study


def test_a_finished_study_has_its_result_its_picture_and_its_best_loss(bench: Bench) -> None:
    tracker, records = started(bench, "t00", "t01"), [trial_record("t00"), trial_record("t01", num_stages=2)]
    for record in records:
        tracker.close_trial(record)
    tracker.close_study(records, summary={"preferred": "t00", "loss": math.nan}, ok=True)

    run, best = study_run(bench), records[0].final
    assert run.status == "FINISHED"
    assert run.json("result.json")["preferred"] == "t00"
    assert run.artifact("frontier.png")[:4] == b"\x89PNG"
    total = sum(record.final.flops_total for record in records)
    assert run.metrics["loss/val_nats"] == [(-(-total // 10**6), best.loss_val)]
    assert run.metrics["compute/flops_total"][0][1] == total
    assert run.tags["growth.best"] == "t00"
    assert set(run.metrics) <= set(METRICS)


def test_closing_a_study_closes_its_trials_and_leaves_none_running(bench: Bench) -> None:
    tracker, record = started(bench, "t00", "t01"), trial_record("t00")
    tracker.close_study([record, trial_record("t01", cause=None)], summary={}, ok=False)

    assert study_run(bench).status == "FAILED"
    assert trial_run(bench, "t00").status == "FINISHED"
    assert trial_run(bench, "t01").status == "KILLED"
    with pytest.raises(RuntimeError, match="no study is open"):
        tracker.log_stage(stage_record(0))


def test_closing_a_study_again_adds_no_points(bench: Bench) -> None:
    for _ in range(2):
        started(bench, "t00").close_study([trial_record("t00")], summary={}, ok=True)

    assert study_run(bench).status == "FINISHED"
    assert {len(points) for points in study_run(bench).metrics.values()} == {1}


def test_a_study_that_goes_on_and_ends_again_has_two_points_in_order(bench: Bench) -> None:
    first, second = trial_record("t00"), trial_record("t01", num_stages=5)
    started(bench, "t00").close_study([first], summary={}, ok=True)
    started(bench, "t00", "t01").close_study([first, second], summary={}, ok=True)

    steps = [step for step, _ in study_run(bench).metrics["loss/val_nats"]]
    assert len(steps) == 2
    assert steps[0] < steps[1]


def test_a_study_where_every_trial_failed_ends_without_a_best_loss(bench: Bench) -> None:
    tracker = started(bench, "t00")
    tracker.close_study([trial_record("t00", num_stages=0, cause="failed")], summary={}, ok=False)

    run = study_run(bench)
    assert run.status == "FAILED"
    assert "loss/val_nats" not in run.metrics
    assert run.artifact("frontier.png") is None


def test_an_interrupted_study_is_killed_with_what_ran_and_can_go_on(bench: Bench) -> None:
    tracker = started(bench, "t00", "t01")
    tracker.close_trial(trial_record("t00"))
    tracker.log_stage(stage_record(0, trial="t01"))
    tracker.interrupt_study("interrupted by Ctrl-C")

    assert study_run(bench).status == "KILLED"
    assert study_run(bench).tags["growth.reason"] == "interrupted by Ctrl-C"
    assert trial_run(bench, "t00").status == "FINISHED"
    assert trial_run(bench, "t01").status == "KILLED"

    resumed = started(bench, "t00", "t01")
    assert study_run(bench).status == "RUNNING"
    assert trial_run(bench, "t00").status == "FINISHED"
    assert trial_run(bench, "t01").status == "RUNNING"
    resumed.close_trial(trial_record("t01"))
    assert len(trial_run(bench, "t01").metrics["loss/val_nats"]) == 3


# MLflow alone


def test_a_sqlite_store_is_made_with_its_folder_and_keeps_artifacts_beside_it(tmp_path: Path) -> None:
    bench = MlflowBench(tmp_path / "deep" / "runs", "exp")
    (tmp_path / "deep").mkdir()
    started(bench, "t00").close_trial(trial_record())

    assert (tmp_path / "deep" / "runs" / "mlflow.db").is_file()
    assert len(list((tmp_path / "deep" / "runs" / "artifacts").rglob("events.json"))) == 1


def test_an_active_run_of_somebody_else_has_no_influence(
    store_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0123456789abcdef0123456789abcdef")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "4711")
    bench = MlflowBench(store_folder, "somebody-else")
    tracker = started(bench, "t00")
    tracker.close_trial(trial_record())
    tracker.close_study([trial_record()], summary={}, ok=True)

    assert {r.status for r in bench.runs()} == {"FINISHED"}
    assert "0123456789abcdef0123456789abcdef" not in {r.run_id for r in bench.runs()}
    assert capfd.readouterr() == ("", "")


def test_a_new_store_is_made_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    started(MlflowBench(tmp_path, "quiet"), "t00")

    assert capfd.readouterr() == ("", "")
