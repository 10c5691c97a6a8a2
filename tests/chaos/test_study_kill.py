"""Kill the driver, or a worker, of a real study; what is recorded in the end must not show it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from tests.jobs import JOINT, SMALL, alone, job_data, recorded, small_job

pytestmark = pytest.mark.chaos

LIMIT_S = 240


class Driver:
    """``growth run`` in a process of its own."""

    def __init__(self, job: Path, log: Path, *options: str) -> None:
        self._log = log.open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "growth_service", "run", str(job), *options],
            stdout=subprocess.DEVNULL, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        self.tree = psutil.Process(self.process.pid)
        self._path = log

    def wait_for_text(self, text: str, *, times: int = 1) -> None:
        """Until the log holds ``text`` so often, or the driver ended."""
        deadline = time.monotonic() + LIMIT_S
        while self._path.read_text().count(text) < times:
            assert self.process.poll() is None, self._path.read_text()
            assert time.monotonic() < deadline, self._path.read_text()
            time.sleep(0.05)

    def finish(self) -> int:
        code = self.process.wait(timeout=LIMIT_S)
        self._log.close()
        return code

    def kill(self, number: int) -> None:
        """End the driver and wait until what it started has ended too; clear away what does not."""
        started = self.tree.children(recursive=True)
        os.kill(self.process.pid, number)
        self.process.wait(timeout=LIMIT_S)
        _, alive = psutil.wait_procs(started, timeout=30)
        for process in alive:
            process.kill()
        self._log.close()


@pytest.fixture
def job_file(tmp_path):
    def write(**changes):
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job_data(tmp_path / "runs", **changes)))
        return path

    return write


def result_of(tmp_path):
    return json.loads((tmp_path / "runs" / "small" / "result.json").read_text())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_study_that_is_resumed_has_the_records_of_an_undisturbed_one(number, job_file, tmp_path):
    path, log = job_file(), tmp_path / "log"
    first = Driver(path, log)
    first.wait_for_text(" stage ", times=3)
    first.kill(number)
    assert not (tmp_path / "runs" / "small" / "result.json").exists()
    assert Driver(path, log).finish() == 2  # unfinished, and --resume was not asked for
    assert "is unfinished: go on with --resume" in log.read_text()
    assert Driver(path, log, "--resume").finish() == 0, log.read_text()
    assert recorded(result_of(tmp_path)) == alone(small_job(tmp_path / "runs"), tmp_path / "alone")
    (study, *_) = mlflow_runs(tmp_path, "study")
    assert study.info.status == "FINISHED"
    assert {r.info.status for r in mlflow_runs(tmp_path, "trial")} == {"FINISHED"}
    assert len(mlflow_runs(tmp_path, "trial")) == 3


def test_a_study_that_is_killed_at_three_random_moments_has_the_records_of_an_undisturbed_one(job_file, tmp_path):
    path, log = job_file(), tmp_path / "log"
    moments, killed = np.random.default_rng(5), 0
    while killed < 3:
        driver = Driver(path, log, *resuming(tmp_path))
        deadline = time.monotonic() + moments.uniform(6, 20)  # while workers start, or within any stage
        while time.monotonic() < deadline and driver.process.poll() is None:
            time.sleep(0.05)
        if driver.process.poll() is not None:  # it was faster than the moment
            break
        driver.kill(signal.SIGKILL)
        killed += 1
    else:
        driver = Driver(path, log, *resuming(tmp_path))
    assert killed > 0
    assert driver.finish() == 0, log.read_text()
    assert recorded(result_of(tmp_path)) == alone(small_job(tmp_path / "runs"), tmp_path / "alone")
    assert [r.info.status for r in mlflow_runs(tmp_path, "trial")] == ["FINISHED"] * 3


def resuming(tmp_path):
    """The option of a study that was begun."""
    return ["--resume"] if (tmp_path / "runs" / "small" / "study.json").exists() else []


def test_a_killed_worker_changes_no_record(job_file, tmp_path):
    changes = {
        "search__schedules": [JOINT, {"use": "scratch", "name": "scratch", **SMALL}],
        "search__concurrent_trials": 1,
        "resources__workers": 2,
    }
    path, log = job_file(**changes), tmp_path / "log"
    driver = Driver(path, log)
    driver.wait_for_text(" stage ", times=1)
    victim = train_workers(driver.tree)[0]
    victim.send_signal(signal.SIGKILL)
    assert driver.finish() == 0, log.read_text()
    result = result_of(tmp_path)
    assert recorded(result) == alone(small_job(tmp_path / "runs", **changes), tmp_path / "alone")


def train_workers(tree: psutil.Process) -> list[psutil.Process]:
    """Train workers below a driver, by their title."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = []
        for process in tree.children(recursive=True):
            try:
                if "RayTrainWorker" in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("no Train worker was seen")


def mlflow_runs(tmp_path, kind):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiments = [e.experiment_id for e in client.search_experiments()]
    return [r for r in client.search_runs(experiments) if r.data.tags.get("growth.kind") == kind]
