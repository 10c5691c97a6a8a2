"""What fails with the plain tools when a network changes its size, beside what works here."""

import tempfile
from pathlib import Path

import mlflow
import pytest
import torch
from mlflow.exceptions import MlflowException
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from torch import nn

from growth_service.cli.study import run_job, tracking_uri
from growth_service.core.records import TrialRecord
from growth_service.training.checkpoint import load_checkpoint
from growth_service.training.data import open_splits
from growth_service.training.evaluate import evaluate
from growth_service.training.layout import stage_folders
from growth_service.training.ranks import Ranks
from tests.jobs import SMALL, small_job


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:Consider boosting PBT")
def test_population_based_training_cannot_change_the_width(ray_session, tmp_path):
    """The weaker trial takes over the better one's checkpoint and a new width: shapes differ (ray#5788, #39673)."""

    def train_of_any_width(config):
        """A trainable as the tutorials write it: width is a hyperparameter, a checkpoint is a state dict."""
        model = nn.Sequential(nn.Linear(4, config["width"]), nn.ReLU(), nn.Linear(config["width"], 1))
        found = tune.get_checkpoint()
        if found:
            with found.as_directory() as folder:
                model.load_state_dict(torch.load(Path(folder) / "model.pt"))
        for step in range(4):
            with tempfile.TemporaryDirectory() as folder:
                torch.save(model.state_dict(), Path(folder) / "model.pt")
                checkpoint = tune.Checkpoint.from_directory(folder)
                tune.report({"loss": 100.0 / config["width"] + step}, checkpoint=checkpoint)

    scheduler = PopulationBasedTraining(
        time_attr="training_iteration", perturbation_interval=1, quantile_fraction=0.5, resample_probability=1.0,
        hyperparam_mutations={"width": [8, 16, 32, 64]}, synch=True,
    )  # fmt: skip
    results = tune.Tuner(
        tune.with_resources(train_of_any_width, {"cpu": 1}),
        param_space={"width": tune.grid_search([8, 64])},
        tune_config=tune.TuneConfig(scheduler=scheduler, metric="loss", mode="min"),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path), verbose=0, failure_config=tune.FailureConfig(fail_fast=True)
        ),
    ).fit()
    assert any("size mismatch" in str(r.error) for r in results if r.error is not None)


@pytest.mark.ray
def test_a_trial_here_changes_its_width_and_goes_on_from_the_same_weights(ray_session, tmp_path):
    schedule = {"use": "fixed", "name": "wider", **SMALL, "steps": {"0": "width*1.5", "1": "width*2"}}
    job = small_job(tmp_path, search__schedules=[schedule], budget__trial="12 GFLOP")
    (trial,) = run_job(job).trials
    assert isinstance(trial, TrialRecord)
    widths = [s.width for s in trial.stages]
    assert widths == sorted(set(widths))
    changes = [r["output_change"] for s in trial.stages for r in s.receipts]
    assert max(changes) < 1e-4  # rounding, of logits of about ten: the function went on
    folder = next(stage_folders(tmp_path / "small" / "trials" / "wider" / "stages"))
    splits = open_splits(tmp_path / "small" / "data")
    again = evaluate(load_checkpoint(folder).model, splits.val, ranks=Ranks())
    assert again.loss == pytest.approx(trial.stages[-1].loss_val, rel=1e-12)
    client = mlflow.MlflowClient(tracking_uri(job))
    (experiment,) = [e for e in client.search_experiments() if e.name == "growth"]
    (run,) = [r for r in client.search_runs([experiment.experiment_id]) if r.data.tags["growth.kind"] == "trial"]
    history = [m.value for m in client.get_metric_history(run.info.run_id, "arch/width")]
    assert history == widths  # sizes that change are metrics; the schedule is a param, once


def test_a_param_that_changes_is_refused_by_mlflow(tmp_path):
    """What callbacks that log the configuration again after each perturbation run into (ray#20473)."""
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.create_run(client.create_experiment("plain", artifact_location=str(tmp_path))).info.run_id
    client.log_param(run, "width", 8)
    with pytest.raises(MlflowException, match="Changing param values is not allowed"):
        client.log_param(run, "width", 16)
