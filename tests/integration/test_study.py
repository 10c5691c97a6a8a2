"""One small study on the shared Ray, looked at from all sides."""

import json
import re
import shlex
from pathlib import Path

import mlflow
import pytest
import ray
import ray.util
import yaml
from mlflow.tracking import MlflowClient

from growth_service.cli.main import app
from growth_service.cli.study import run_job, tracking_uri
from growth_service.core.records import METRICS
from growth_service.errors import UserError, WorkFailedError
from growth_service.orchestration.exchange import NAMESPACE
from growth_service.spec import parse_job
from tests.jobs import JOINT, REPOSITORY, SMALL, alone, job_data, recorded, small_job

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("growth-runs")


@pytest.fixture(scope="module")
def study(ray_session, storage):
    return run_job(small_job(storage))


@pytest.fixture(scope="module")
def client(study, storage):
    return MlflowClient(tracking_uri(small_job(storage)))


@pytest.fixture(scope="module")
def runs(study, client):
    (experiment,) = [e for e in client.search_experiments() if e.name == "growth"]
    found = client.search_runs([experiment.experiment_id])
    kinds = {r.data.tags["growth.kind"] for r in found}
    assert kinds == {"study", "trial"}
    return found


def test_every_trial_ends_well(study):
    assert [t.trial for t in study.trials] == ["scratch", "joint", "late"]
    assert study.failed == []


def test_trials_on_ray_leave_the_records_of_trials_that_run_alone(study, storage, tmp_path):
    assert recorded(study.to_dict()) == alone(small_job(storage), tmp_path)


def test_a_study_without_the_cache_leaves_the_same_records(study, tmp_path):
    job = small_job(tmp_path, cache={"enabled": False})
    other = run_job(job)
    assert recorded(other.to_dict()) == recorded(study.to_dict())
    assert other.saved_flops == 0
    assert not (tmp_path / ".stages").exists()


def test_another_study_takes_over_what_was_run(study, storage, tmp_path):
    again = run_job(small_job(tmp_path, cache={"folder": str(storage / ".stages")}))
    assert recorded(again.to_dict()) == recorded(study.to_dict())
    assert all(s.reused for t in again.trials for s in t.stages)
    tests_only = sum(t.final.flops_total - t.stages[-1].flops_total for t in again.trials)
    assert again.budget.spent_flops == tests_only  # the evaluations on test are done again


def test_insertions_and_widenings_changed_no_output(study):
    receipts = [r for t in study.trials for s in t.stages for r in s.receipts if r["kind"] in ("insert", "widen")]
    assert {r["kind"] for r in receipts} == {"insert", "widen"}
    assert {r["output_change"] for r in receipts} == {0.0}
    streams = [r for t in study.trials for s in t.stages for r in s.receipts if r["kind"] == "stream"]
    assert streams
    assert all(r["output_change"] < 1e-4 for r in streams)  # rounding, of logits of about ten


def test_the_budget_of_study_and_trials_balances(study):
    for budget in [study.budget.to_dict(), *(s.budget for t in study.trials for s in t.stages)]:
        assert budget["spent_flops"] + budget["reserved_flops"] + budget["free_flops"] == budget["total_flops"]
    assert study.budget.spent_flops + study.saved_flops == sum(t.final.flops_total for t in study.trials)
    assert study.saved_flops > 0  # the first stage of two schedules is the same


def test_mlflow_has_one_parent_and_a_nested_child_a_trial(runs):
    (parent,) = [r for r in runs if r.data.tags["growth.kind"] == "study"]
    children = [r for r in runs if r.data.tags["growth.kind"] == "trial"]
    assert {c.data.tags["mlflow.parentRunId"] for c in children} == {parent.info.run_id}
    assert len(children) == 3
    assert {r.info.status for r in runs} == {"FINISHED"}


def test_mlflow_metrics_have_the_agreed_names_and_steps_of_compute(runs, client, study):
    by_name = {t.trial: t for t in study.trials}
    for run in runs:
        if run.data.tags["growth.kind"] != "trial":
            continue
        assert set(run.data.metrics) <= set(METRICS)
        history = client.get_metric_history(run.info.run_id, "compute/flops_total")
        steps = [m.step for m in history]
        assert steps == sorted(set(steps))
        trial = by_name[run.data.tags["growth.trial"]]
        assert steps == [-(-s.flops_total // 1_000_000) for s in trial.stages]
        assert [m.value for m in history] == [float(s.flops_total) for s in trial.stages]


def test_mlflow_artifacts_can_be_read(runs, client, study, storage, tmp_path):
    uri = tracking_uri(small_job(storage))
    for run in runs:
        names = {f.path for f in client.list_artifacts(run.info.run_id)}
        if run.data.tags["growth.kind"] == "study":
            assert {"frontier.png", "job.yaml"} <= names
            continue
        path = mlflow.artifacts.download_artifacts(
            run_id=run.info.run_id, artifact_path="growth/events.json", dst_path=str(tmp_path), tracking_uri=uri
        )
        events = json.loads(Path(path).read_text(encoding="utf-8"))
        assert all(s["decision"]["reason"] for s in events["stages"])
        inside = {f.path for f in client.list_artifacts(run.info.run_id, "growth")}
        assert ("growth/sites.png" in inside) == (run.data.tags["growth.trial"] == "joint")


def test_compare_reads_the_same_study_back(study, storage, capsys):
    run_cli(f"compare small --storage {storage} --json")
    found = json.loads(capsys.readouterr().out)
    assert recorded(found) == recorded(study.to_dict())
    assert found["frontier"] == [o._asdict() for o in study.frontier]
    assert found["prefer"] == study.preference._asdict()


def test_compare_prints_a_table_with_reasons(study, storage, capsys):
    run_cli(f"compare small --storage {storage}")
    shown = capsys.readouterr().out
    for words in ("Pareto frontier", "Prefer:", "scratch", "joint", "late", "after stage 1:"):
        assert words in shown


@pytest.mark.parametrize("by_run_id", [False, True])
def test_probe_certifies_a_trial_of_the_study(by_run_id, study, runs, storage, tmp_path, capsys):
    (run,) = [r for r in runs if r.data.tags.get("growth.trial") == "joint"]
    model = run.info.run_id if by_run_id else "small/joint"
    picture = tmp_path / "sites.png"
    run_cli(f"probe {model} --storage {storage} --json --tolerance '0.05 nats' --plot {picture}")
    report = json.loads(capsys.readouterr().out)
    kinds = {s["kind"] for s in report["sites"]}
    assert kinds == {"depth", "width"}
    assert report["verdict"] in {"useful", "saturated", "no_transferable_gain", "undetermined"}
    assert report["tolerance_nats"] == 0.05
    assert report["advice"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_growth_commands_of_the_readme_run(study, storage, tmp_path, monkeypatch, capsys):
    """As printed, but with the small job's numbers in place of the demo's."""
    (tmp_path / "search_spaces").symlink_to(REPOSITORY / "search_spaces")
    monkeypatch.chdir(tmp_path)
    shrink = (
        "--set budget.trial='6 GFLOP' --set search.stages=2 --set probe.samples=100 --set model.widths='[8, 16]' "
        "--set search.schedules='[{use: certified, name: certified, blocks: [1, 1], hidden: [8, 8]}]'"
    )
    lines = [line.split("#")[0].strip() for line in (REPOSITORY / "README.md").read_text().splitlines()]
    commands = [line for line in lines if line.startswith("growth ")]
    foreign = [c for c in commands if re.search("torchvision:|hf:|python:", c)]  # need a network of the reader's own
    assert len(foreign) == 3
    commands = [c for c in commands if c not in foreign]
    assert [c.split()[1] for c in commands] == ["check", "run", "compare", "probe", "export"]
    for command in foreign:
        with pytest.raises(UserError):  # they say what is missing; tests of the command line run them on stand-ins
            run_cli(command.removeprefix("growth "))
    for command in commands:
        extra = shrink if command.split()[1] in ("check", "run") else ""
        run_cli(f"{command.removeprefix('growth ')} {extra}")
    assert (tmp_path / "sites.png").is_file()
    assert (tmp_path / "grown" / "network.onnx").is_file()


def test_two_workers_leave_the_records_of_one(storage, tmp_path):
    job = small_job(storage, name="two-workers", search__schedules=[JOINT], resources__workers=2)
    assert recorded(run_job(job).to_dict()) == alone(job, tmp_path)


def test_pruned_and_failed_trials_never_block_the_next(storage):
    schedules = [
        {"use": "scratch", "name": "good", **SMALL},
        {"use": "scratch", "name": "poor", **SMALL, "data_share": 0.05},
        {"use": "scratch", "name": "broken", **SMALL},
        {"use": "scratch", "name": "after", **SMALL},
    ]
    job = small_job(
        storage,
        name="ends",
        search__schedules=schedules,
        search__concurrent_trials=1,
        budget__trial="12 GFLOP",
        resources__max_worker_restarts=0,
        scheduler={"rule": "ratio", "prune_ratio": 1.5, "grace_share": 0.0},
    )
    blocked = storage / "ends" / "trials" / "broken" / "stages"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("in the way of the trial's checkpoints")
    result = run_job(job)
    causes = {t.trial: t.final.cause for t in result.trials}
    assert causes == {"good": "schedule", "poor": "pruned", "broken": "failed", "after": "schedule"}
    (broken,) = result.failed
    assert "Error" in broken.final.reason
    poor = next(t for t in result.trials if t.trial == "poor")
    assert "times as high" in poor.final.reason
    assert poor.final.num_stages < 3


def test_optuna_suggests_schedules_beside_the_listed_ones(storage):
    data = job_data(storage, name="suggested", search__schedules=[{"use": "scratch", "name": "scratch", **SMALL}])
    data["search"] |= {"suggest": {"space": "certified_space", "trials": 2, "seed": 1}, "stages": 2}
    result = run_job(parse_job(data, source="test"))
    assert [t.trial for t in result.trials] == ["scratch", "suggested-01", "suggested-02"]
    assert result.failed == []


def test_a_study_whose_time_is_up_at_once_says_so(storage, tmp_path, capfd):
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(job_data(storage, name="no-time", budget={"trial": "6 GFLOP", "time": "1 s"})))
    with pytest.raises(SystemExit) as exit_:
        app(["run", str(job)], standalone_mode=False)
    assert exit_.value.code == 1
    assert "no trial could start within the limits of the study" in capfd.readouterr().err


class KillsTheExchange:
    """An observer that ends the exchange when it hears of the first stage."""

    def __init__(self):
        self.killed = 0

    def trial_started(self, trial):
        pass

    def stage_done(self, record):
        if not self.killed:
            names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
            for name in names:
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))
            self.killed = len(names)

    def trial_done(self, record):
        pass


def test_a_study_without_its_exchange_is_interrupted_and_goes_on_with_resume(study, storage):
    """No trial has failed by that; lanes end by themselves, so that the next study has the machine."""
    job, observer = small_job(storage, name="cut", cache={"enabled": False}), KillsTheExchange()
    with pytest.raises(WorkFailedError, match="the exchange between trials and workers is gone.*--resume"):
        run_job(job, observer=observer)
    assert observer.killed == 1
    result = run_job(job, resume=True)
    assert recorded(result.to_dict()) == recorded(study.to_dict())


def test_a_search_starts_from_what_another_one_found(storage):
    def searching(name, **suggest):
        data = job_data(storage, name=name, search__schedules=[{"use": "scratch", "name": "scratch", **SMALL}])
        plain = {"space": {"use": "certified", "units": [8, 16]}, "trials": 2, "seed": 1}
        data["search"] |= {"suggest": plain | suggest, "stages": 2}
        return parse_job(data, source="test")

    run_job(searching("first-search"))
    result = run_job(searching("second-search", warm_start=["first-search"]))
    assert result.failed == []
    known = json.loads((storage / "second-search" / "warm_start.json").read_text())
    assert [p["trial"] for p in known] == ["suggested-01", "suggested-02"]
    other = {"use": "certified", "units": [8, 16], "data_share": [0.5, 1.0]}
    with pytest.raises(UserError, match="of 2 suggestions in first-search none fits the space"):
        run_job(searching("third-search", warm_start=["first-search"], space=other))


def run_cli(line: str) -> None:
    try:
        code = app(shlex.split(line), standalone_mode=False)
    except SystemExit as exit_:
        code = exit_.code
    assert not code, f"growth {line}: exit {code}"
