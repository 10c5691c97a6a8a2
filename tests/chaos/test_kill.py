"""A trial that is killed at a random moment, and run again by another process, as if nothing had been.

The moment is drawn by seed as a share of the time that an undisturbed trial takes; where in the
trial that is depends on the machine, and must not matter.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch_helpers import comparable, prepared_digits, run_to_end, trial_config

from growth_service.core.records import FinalRecord, StageRecord
from growth_service.training.ranks import Ranks
from growth_service.training.stage_loop import run_trial

pytestmark = pytest.mark.chaos

TRIAL = """
import json, sys
from pathlib import Path
import os, signal
from torch.optim.optimizer import register_optimizer_step_pre_hook
from growth_service.training import stage, stage_loop
from growth_service.training.config import TrialConfig
from growth_service.training.ranks import Ranks, one_thread

steps_to_live = int(sys.argv[2])

def count(*_):
    global steps_to_live
    steps_to_live -= 1
    if steps_to_live == -1:
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_pre_hook(count)
one_thread()
stage.HEARTBEAT_S = 0.0  # say how far the stage is after every step: these stages take half a second
list(stage_loop.run_trial(TrialConfig.from_dict(json.loads(Path(sys.argv[1]).read_text())), ranks=Ranks()))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of the prepared digits."""
    return prepared_digits(tmp_path_factory.mktemp("data"))


def configured(folder, data):
    """A trial with several optimiser steps in each stage."""
    return trial_config(folder, data=data, budget_flops=3_000_000_000)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data):
    """A trial that nobody killed."""
    run_to_end(configured(tmp_path_factory.mktemp("warm") / "trial", data))  # first use loads half of torch
    records, steps, seconds = [], [0], -time.perf_counter()
    handle = register_optimizer_step_pre_hook(lambda *_: steps.append(steps.pop() + 1))
    for record in run_trial(configured(tmp_path_factory.mktemp("whole") / "trial", data), ranks=Ranks()):
        records.append(record)
        steps.append(0)
    handle.remove()
    assert min(steps[:-2]) >= 3, "a stage is killed in its midst"
    return Whole(records, steps[:-2], seconds + time.perf_counter())


class Whole(NamedTuple):
    records: list[StageRecord | FinalRecord]
    steps: list[int]
    """Optimiser steps of each stage."""
    seconds: float


def start(config, script, *, steps_to_live=10**9):
    """The trial in a process of its own, which kills itself before the step after its last one."""
    script.write_text(json.dumps(config.to_dict()))
    return subprocess.Popen([sys.executable, "-W", "error", "-c", TRIAL, str(script), str(steps_to_live)])


def stage_manifests(folder):
    """Finished stages of a trial, and when they were written."""
    return {p.parent.name: p.stat().st_mtime_ns for p in sorted(Path(folder, "stages").glob("[0-9]*/manifest.json"))
            if p.parent.name.isdigit()}  # fmt: skip


def lost_work(folder, *, stage):
    """FLOPs of the stage under way that the killed process has told of; None where no stage was under way."""
    beat = Path(folder, "progress.json")
    told = json.loads(beat.read_text()) if beat.exists() else {}
    return told["flops"] if told.get("stage") == stage else None


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_killed_trial_ends_as_if_it_had_not_been(undisturbed, data, tmp_path, seed):
    folder = tmp_path / "trial"
    config = configured(folder, data)
    process = start(config, tmp_path / "config.json")
    try:
        while not (folder / "progress.json").exists():
            assert process.poll() is None, "the trial ended before it began"
            time.sleep(0.002)
        time.sleep(float(np.random.default_rng(seed).uniform(0, 0.9)) * undisturbed.seconds)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = stage_manifests(folder)
    lost = lost_work(folder, stage=len(finished))

    again = run_to_end(config)

    assert comparable(again) == comparable(undisturbed.records)
    # at most the stage under way is done twice: those that were finished are not written again
    assert {k: v for k, v in stage_manifests(folder).items() if k in finished} == finished
    # and what was lost of it is told, outside the budget
    assert again[-1].flops_wasted == (lost or 0)
    assert again[-2].attempt == (0 if lost is None else 1)


def test_a_trial_that_is_killed_once_in_each_stage_ends_as_if_it_had_not_been(undisturbed, data, tmp_path):
    folder = tmp_path / "trial"
    config = configured(folder, data)
    lost = 0
    for stage in range(3):
        before = undisturbed.steps[stage - 1] if stage else 0  # the stage that the process before had left undone
        process = start(config, tmp_path / "config.json", steps_to_live=before + 1)
        assert process.wait() == -signal.SIGKILL
        assert len(stage_manifests(folder)) == stage
        lost += lost_work(folder, stage=stage)

    again = run_to_end(config)

    assert comparable(again) == comparable(undisturbed.records)
    assert [r.attempt for r in again[:-1]] == [1, 2, 3]
    assert again[-1].flops_wasted == lost > 0
