import json
import os
import re
import resource
import subprocess
import sys

import pytest
import yaml

from growth_service.cli.main import guarded
from growth_service.errors import WorkFailedError
from growth_service.training import datasets
from tests.jobs import DIGITS, REPOSITORY, job_data


def growth(*arguments: str, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "growth_service", *arguments],
        capture_output=True, text=True, check=False, cwd=cwd, timeout=120, env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip


def write(folder, **changes):
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job_data(folder / "runs", **changes)))
    return path


WRONG = {
    "missing key": (lambda d: d.pop("budget"), "budget: required, but missing"),
    "misspelt key": (lambda d: d["training"].update(learning_rat=1), "did you mean 'learning_rate'?"),
    "bad unit": (lambda d: d["budget"].update(trial="3 PFLIP"), "unit 'PFLIP' in '3 PFLIP' is unknown"),
    "negative": (lambda d: d["budget"].update(trial=-1), "must be a finite amount above zero"),
    "study budget below one trial": (lambda d: d["budget"].update(study="1 GFLOP"), "not one trial could run"),
    "tracking server down": (
        lambda d: d.update(mlflow={"tracking_uri": "http://127.0.0.1:9"}),
        "no MLflow server answers at http://127.0.0.1:9",
    ),
    "unknown family": (lambda d: d["model"].update(family="vgg"), "should be 'mlp', 'resnet' or 'gpt', got 'vgg'"),
    "unknown builder": (lambda d: d["search"]["schedules"][0].update(use="grid"), "unknown schedule builder 'grid'"),
    "unknown space": (lambda d: d["search"].update(suggest={"space": "x", "trials": 1}), "unknown space 'x'"),
    "unknown objective": (
        lambda d: d["search"].update(suggest={"space": "joint_space", "trials": 1, "objectives": ["accuracy"]}),
        "should be 'loss' or 'flops', got 'accuracy'",
    ),
    "a builder that cannot be imported": (
        lambda d: d["search"]["schedules"][0].update(use="no_such_module:grow"),
        "schedule builder 'no_such_module:grow' cannot be imported",
    ),
    "a range that is none": (
        lambda d: d["search"].update(suggest={"space": {"use": "joint", "confidence": {"low": 1}}, "trials": 1}),
        "low below high",
    ),
    "impossible resources": (
        lambda d: (d.update(resources={"workers": 64}), d["training"].update(batch_size=64, shards=64)),
        "a trial needs 64 CPUs",
    ),
    "data not found": (
        lambda d: d.update(data={"name": "fashion_mnist", "folder": "/no/such"}),
        "it needs train-images",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_job_is_exit_2_with_one_clear_message_and_leaves_nothing(case, tmp_path):
    spoil, message = WRONG[case]
    data = job_data(tmp_path / "runs")
    spoil(data)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(data))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = growth("run", str(path))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (found.returncode, found.stdout) == (2, "")
    assert message in found.stderr
    assert "Traceback" not in found.stderr
    assert not list((tmp_path / "runs").rglob("study.json"))
    # The bar is 3 s on an idle machine, where wall and CPU time agree; CPU time holds on a busy one too.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


WRONG_IN_DETAIL = {
    "a space that yields an illegal schedule": (
        lambda d: d["search"].update(
            suggest={"space": {"use": "joint", "confidence": {"low": 0.9, "high": 3.0}}, "trials": 1}
        ),
        "search.suggest (joint): confidence: input should be less than 1",
    ),
    "a budget smaller than one stage": (
        lambda d: d["budget"].update(trial="1 MFLOP"),
        "does not pay for one batch beside the evaluations and the probe of a stage",
    ),
    "a step at a place that is not there": (
        lambda d: d["search"]["schedules"].append(
            {"use": "fixed", "name": "x", "blocks": [1, 1], "hidden": [8, 8], "steps": {0: "depth@groups.7.entry"}}
        ),
        "schedule x: no module at path 'groups.7.entry': use one of",
    ),
}


@pytest.mark.parametrize("case", WRONG_IN_DETAIL)
def test_what_only_the_networks_show_is_exit_2_too_and_starts_nothing(case, tmp_path):
    spoil, message = WRONG_IN_DETAIL[case]
    data = job_data(tmp_path / "runs")
    spoil(data)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(data))
    found = growth("run", str(tmp_path / "job.yaml"))
    assert (found.returncode, found.stdout) == (2, "")
    assert message in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr
    assert not list((tmp_path / "runs").rglob("study.json"))


def test_a_study_of_another_job_is_not_gone_on_with(tmp_path):
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps({"status": "running", "job": "another", "attempt": 1}))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_data(tmp_path / "runs")))
    for flags, message in (([], "is unfinished"), (["--resume"], "was started with another job")):
        found = growth("run", str(tmp_path / "job.yaml"), *flags)
        assert found.returncode == 2
        assert message in found.stderr


def test_storage_that_cannot_be_written_is_exit_2(tmp_path):
    (tmp_path / "taken").write_text("a file where the folder of studies should be")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_data(tmp_path / "taken")))
    found = growth("run", str(tmp_path / "job.yaml"))
    assert found.returncode == 2
    assert "cannot be written" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(("text", "message"), [("", "is empty"), ("a: [1", "is not valid YAML at line")])
def test_a_file_that_is_no_job_is_exit_2(text, message, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    found = growth("run", str(path))
    assert found.returncode == 2
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def test_wrong_flags_are_exit_2_and_name_the_nearest_command():
    found = growth("comparee")
    assert found.returncode == 2
    assert "compare" in found.stderr


def test_help_says_for_whom_and_where_to_start():
    found = growth("--help")
    assert found.returncode == 0
    for words in ("compute budget", "deeper, wider, more data - or stop?", "growth run search_spaces/jobs/digits.yaml"):
        assert words in " ".join(found.stdout.split())


@pytest.mark.parametrize("verb", ["run", "check", "compare", "probe"])
def test_every_verb_has_help_with_an_example(verb):
    found = growth(verb, "--help")
    assert found.returncode == 0
    assert f"growth {verb} " in found.stdout


def test_check_prints_the_plan_of_cost_and_starts_nothing(tmp_path):
    path = write(tmp_path)
    found = growth("check", str(path), "--json")
    assert found.returncode == 0, found.stderr
    plan = json.loads(found.stdout)["plan"]
    assert plan["num_trials"] == 3
    assert plan["study_flops"] == 18_000_000_000
    assert plan["expected_s"] > 0
    assert all(t["first_stage_batches"] >= 1 for t in plan["trials"])
    assert not (tmp_path / "runs").exists()


def test_check_prints_all_defaults(tmp_path):
    found = growth("check", str(write(tmp_path)))
    assert "ridge: 0.001" in found.stdout
    assert "3 trials of 3 stages" in found.stdout


def test_compare_without_a_store_says_what_to_do(tmp_path):
    found = growth("compare", "--storage", str(tmp_path))
    assert found.returncode == 2
    assert "Traceback" not in found.stderr


def test_probe_of_nothing_known_is_exit_2(tmp_path):
    found = growth("probe", "digits/none", "--storage", str(tmp_path))
    assert found.returncode == 2
    assert "Traceback" not in found.stderr


def test_an_interruption_is_exit_130_and_says_how_to_go_on(capsys):
    def interrupt():
        raise KeyboardInterrupt

    assert guarded(interrupt) == 130
    assert "--resume" in capsys.readouterr().err


def test_failed_work_is_exit_1(capsys):
    def fail():
        raise WorkFailedError("the server is gone")

    assert guarded(fail) == 1
    assert capsys.readouterr().err == "error: the server is gone\n"


def test_importing_the_package_loads_neither_torch_nor_ray():
    code = (
        "import sys, growth_service, search_spaces; print([m for m in ('torch', 'ray', 'mlflow') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_public_name_resolves():
    import growth_service

    for name in growth_service.__all__:
        assert callable(getattr(growth_service, name))


def test_every_link_of_the_readme_leads_somewhere():
    readme = (REPOSITORY / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if "://" not in link]
    assert len(links) > 8
    assert [link for link in links if not (REPOSITORY / link).is_file()] == []


def test_the_commands_of_the_readme_exist():
    readme = (REPOSITORY / "README.md").read_text()
    makefile = (REPOSITORY / "Makefile").read_text()
    for line in readme.splitlines():
        if line.startswith("make "):
            assert f"\n{line.split()[1]}: " in makefile, line
    assert str(DIGITS.relative_to(REPOSITORY)) in readme
    for name in datasets.LOADERS:
        assert f"`{name}`" in readme, name
