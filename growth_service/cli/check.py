"""``growth check``: what a job is and will cost, without starting it."""

import tempfile
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.table import Table

from growth_service.cli.console import emit_json, out
from growth_service.core.units import format_flops, format_seconds
from growth_service.spec import JobSpec, load_job


def check_command(path: Path, *, overrides: list[str], as_json: bool) -> None:
    """Validate, cost, print."""
    from growth_service.cli.study import check_light

    job = load_job(path, overrides=overrides)
    check_light(job)
    cost = _cost(job)
    if as_json:
        emit_json({"job": job.model_dump(mode="json"), "plan": cost})
        return
    console = out()
    console.print(f"{path} is a valid growth job. Resolved, with all defaults:", style="bold")
    console.print(yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False).rstrip(), style="dim")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("schedule", "starts with", "FLOPs per sample", "batches in the first stage", "rate measured here"):
        table.add_column(name, no_wrap=True)
    for trial in cost["trials"]:
        table.add_row(
            trial["name"],
            f"{trial['depth']} blocks, {trial['params']} parameters, {trial['train_samples']} samples",
            format_flops(trial["flops_per_sample"]),
            str(trial["first_stage_batches"]),
            f"{format_flops(trial['flops_per_s'])}/s",
        )
    console.print(table)
    console.print(
        f"{cost['num_trials']} trials of {job.search.num_stages} stages, {cost['at_once']} at a time; at most "
        f"{format_flops(cost['study_flops'])} in all; about {format_seconds(cost['expected_s'])} here "
        f"(training at the measured rates, and {cost['start_s']:g} s to start workers); "
        f"about {cost['disk_bytes'] / 2**20:.0f} MiB of checkpoints."
    )


def _cost(job: JobSpec) -> dict[str, Any]:
    """Sizes, measured rates, expected time and disk of a job."""
    from growth_service.orchestration import costing

    with tempfile.TemporaryDirectory(prefix="growth-check-") as scratch:
        return costing.cost_of(job, folder=Path(scratch))
