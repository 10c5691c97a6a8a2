"""Reading back: what was written comes back equal, and what is not there is named."""

import math
from pathlib import Path

import pytest

from growth_service.errors import UserError
from growth_service.tracking.mlflow_client import sqlite_path
from growth_service.tracking.mlflow_reader import find_run, read_points, read_study
from growth_service.tracking.mlflow_writer import MlflowTracker
from tests.factories import schedule_dict, stage_record, trial_record


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with an old study, a new one that was interrupted, and a second experiment."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    old = MlflowTracker(uri, "digits")
    old.open_study("first", job={}, job_text="")
    old.open_trial("t00", schedule=schedule_dict(), seed=11, storage="/data/first/t00")
    old.close_study([trial_record("t00")], summary={}, ok=True)

    new = MlflowTracker(uri, "digits")
    new.open_study("second", job={}, job_text="")
    for trial in ("t02", "t00", "t01", "t03", "t04"):  # not the order of their names
        new.open_trial(trial, schedule=schedule_dict(), seed=11)
    new.close_trial(trial_record("t02"))
    new.close_trial(trial_record("t00", num_stages=0, cause="failed"))
    for stage in range(2):
        new.log_stage(stage_record(stage, trial="t01", loss_val=math.inf if stage == 0 else 0.5))
    new.close_trial(trial_record("t04"))
    folder = Path(uri.removeprefix("sqlite:///")).parent / "artifacts" / new.run_id("t04") / "artifacts"
    (folder / "growth" / "events.json").write_text('{"format_version": 1, "tri')
    (folder / "growth" / "stages" / "0001.json").write_text("{")
    new.interrupt_study("Ctrl-C")

    other = MlflowTracker(uri, "cifar")
    other.open_study("third", job={}, job_text="")
    other.close_study([], summary={}, ok=False)
    return uri


def test_a_study_comes_back_as_it_was_written(uri: str) -> None:
    read = read_study(uri, experiment="digits", study="first")

    assert read.trials == [trial_record("t00")]
    assert (read.study, read.experiment, read.status) == ("first", "digits", "FINISHED")
    assert read.left_out == read.unfinished == []


def test_the_study_started_last_is_read_where_none_is_named(uri: str) -> None:
    assert read_study(uri, experiment="digits", study=None).study == "second"
    assert read_study(uri).study == "third"


def test_trials_come_in_the_order_they_were_started_failed_ones_included(uri: str) -> None:
    read = read_study(uri, study="second")

    assert [t.trial for t in read.trials] == ["t02", "t00"]
    assert read.trials[1].final is not None
    assert math.isnan(read.trials[1].final.loss_test)
    assert read.status == "KILLED"


def test_an_interrupted_trial_gives_its_stages_so_far_and_a_note(uri: str) -> None:
    read = read_study(uri, study="second")

    (partial,) = read.unfinished
    assert (partial.trial, partial.seed, partial.final) == ("t01", 11, None)
    assert partial.schedule == schedule_dict()
    assert partial.stages[1] == stage_record(1, trial="t01", loss_val=0.5)
    assert partial.stages[0].loss_val == math.inf
    note = next(line for line in read.left_out if line.startswith("t01 (KILLED"))
    assert "not ended; 2 stages so far, validation loss 0.5 nats at 501 MFLOP" in note


def test_a_trial_without_a_stage_and_one_with_a_broken_record_are_left_out_with_the_reason(uri: str) -> None:
    notes = read_study(uri, study="second").left_out

    assert len(notes) == 3
    assert any(line.startswith("t03 (KILLED") and line.endswith("no stage has ended yet") for line in notes)
    assert any(line.startswith("t04 (FINISHED") and "cannot be read (JSONDecodeError" in line for line in notes)


def test_a_failed_trial_that_is_tried_again_has_not_ended(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = MlflowTracker(uri, "digits")
    tracker.open_study("first", job={}, job_text="")
    tracker.open_trial("t00", schedule=schedule_dict(), seed=11)
    tracker.close_trial(trial_record(num_stages=1, cause="failed"))
    assert [t.trial for t in read_study(uri).trials] == ["t00"]

    tracker.open_trial("t00", schedule=schedule_dict(), seed=11)
    tracker.log_stage(stage_record(1))
    read = read_study(uri)

    assert read.trials == []
    assert [len(t.stages) for t in read.unfinished] == [2]


def test_an_unknown_experiment_is_an_error_that_names_those_there_are(uri: str) -> None:
    with pytest.raises(UserError, match=r"no experiment 'imagenet' in .*digits"):
        read_study(uri, experiment="imagenet")


def test_an_unknown_study_is_an_error_that_names_those_there_are_newest_first(uri: str) -> None:
    with pytest.raises(UserError, match=r"no study 'fifth' in experiment 'digits' of .*: there is second, first$"):
        read_study(uri, experiment="digits", study="fifth")


def test_a_store_without_studies_says_how_to_start_one(uri: str) -> None:
    with pytest.raises(UserError, match=r"no growth study in experiment 'Default'.*growth run JOB.yaml"):
        read_study(uri, experiment="Default")


def test_a_store_that_is_not_there_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no MLflow store at .*absent\.db"):
        read_study(f"sqlite:///{tmp_path}/absent.db")
    with pytest.raises(UserError, match=r"no MLflow store at .*absent\.db"):
        find_run(f"sqlite:///{tmp_path}/absent.db", "t00")
    assert list(tmp_path.iterdir()) == []


def test_a_store_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(UserError, match="cannot open the MLflow store at ftp://nowhere"):
        read_study("ftp://nowhere")


def test_a_run_is_found_by_id_by_name_and_by_study_and_name(uri: str) -> None:
    found = find_run(uri, "first/t00")

    assert (found.trial, found.study, found.experiment, found.status) == ("t00", "first", "digits", "FINISHED")
    assert found.storage == "/data/first/t00"
    assert find_run(uri, found.run_id) == found
    assert find_run(uri, "t02").study == "second"
    assert find_run(uri, "t02").storage is None


def test_a_name_that_two_studies_share_is_an_error_that_names_both(uri: str) -> None:
    with pytest.raises(UserError, match=r"'t00' names 2 trials: .*second/t00 \(run .*first/t00 \(run "):
        find_run(uri, "t00")


def test_a_study_is_no_trial_and_the_error_names_its_trials(uri: str) -> None:
    with pytest.raises(UserError, match=r"'first' is a study: name one of its trials, first/t00$"):
        find_run(uri, "first")
    with pytest.raises(UserError, match=r"is a study: name one of its trials, first/t00$"):
        find_run(uri, read_study(uri, study="first").run_id)


def test_an_unknown_run_is_an_error_that_names_what_there_is(uri: str) -> None:
    with pytest.raises(UserError, match=r"no run or trial 't99' in .*second/t04.*first/t00"):
        find_run(uri, "t99")


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("sqlite:////data/mlflow.db", Path("/data/mlflow.db")),
        ("sqlite+pysqlite:////data/mlflow.db?timeout=30", Path("/data/mlflow.db")),
        ("sqlite:///growth-runs/mlflow.db", Path.cwd() / "growth-runs" / "mlflow.db"),
        ("sqlite:///:memory:", None),
        ("sqlite://", None),
        ("https://mlflow.example/sqlite:///x.db", None),
        ("postgresql:///runs", None),
    ],
)
def test_only_a_sqlite_file_has_a_path(uri: str, path: Path | None) -> None:
    assert sqlite_path(uri) == path


def test_what_a_sampler_drew_comes_back_with_what_came_of_it(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = MlflowTracker(uri, "digits")
    tracker.open_study("searched", job={}, job_text="")
    tracker.open_trial("scratch", schedule=schedule_dict(), seed=11)
    for number in range(3):
        tracker.open_trial(
            f"suggested-{number}", schedule=schedule_dict(), seed=11, drawn={"confidence": 0.5 + 0.1 * number}
        )
    failed = trial_record("suggested-2", num_stages=2, cause="failed")
    tracker.close_study(
        [trial_record("scratch"), trial_record("suggested-0"), trial_record("suggested-1"), failed], summary={}, ok=True
    )

    points = read_points(uri, study="searched")

    final = trial_record("suggested-0").final
    assert [(p.trial, p.drawn) for p in points] == [
        ("suggested-0", {"confidence": 0.5}), ("suggested-1", {"confidence": 0.6}),
    ]  # fmt: skip
    assert final is not None
    assert (points[0].loss, points[0].flops) == (final.loss_val, final.flops_total)
    with pytest.raises(UserError, match="no study 'other'"):
        read_points(uri, study="other")
