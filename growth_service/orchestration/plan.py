"""From a job to what will run: resolved trials, their budgets, and whether they can fit."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from growth_service.core.policies import FixedSteps, Triggered, sight_of
from growth_service.core.schedule import GrowthSchedule
from growth_service.core.steps import AddBlock, AddChannels, AddHeads, AddUnits, Change
from growth_service.core.streams import stream_seed
from growth_service.core.units import format_flops
from growth_service.errors import UserError
from growth_service.growth import insert_block, widen
from growth_service.models import Family, build
from growth_service.spec import SUGGESTED, JobSpec, schedule_entry
from growth_service.training.augment import check_augmentable
from growth_service.training.config import TrialConfig
from growth_service.training.datasets import subset_size
from growth_service.training.expansion import expand
from growth_service.training.growing import add_channels, candidates, new_block, new_branch
from growth_service.training.ranks import Ranks
from growth_service.training.stage_loop import StageLoop
from search_spaces import listed_schedules, resolve


@dataclass(frozen=True, kw_only=True)
class PlannedTrial:
    """One trial before it runs."""

    index: int
    name: str
    schedule: GrowthSchedule
    seed: int


def planned_trials(job: JobSpec) -> list[PlannedTrial]:
    """The listed schedules times the repeats, schedule by schedule, in the order in which they start.

    Raises:
        UserError: If an entry of the job is wrong.
    """
    trials: list[PlannedTrial] = []
    for repeat in range(job.search.repeats):
        for schedule in listed_schedules(job):
            name = schedule.name if job.search.repeats == 1 else f"{schedule.name}-s{job.seed + repeat}"
            trials.append(PlannedTrial(index=len(trials), name=name, schedule=schedule, seed=job.seed + repeat))
    return trials


def suggested_name(index: int) -> str:
    """Name of a suggested trial."""
    return f"{SUGGESTED}{index:02d}"


def suggested_trial(job: JobSpec, *, index: int, arguments: dict[str, Any]) -> PlannedTrial:
    """A trial that a searcher suggested, starting from the size of the first listed schedule."""
    first = job.search.schedules[0].arguments if job.search.schedules else {}
    defaults = {
        "blocks": first.get("blocks", [1] * len(job.model.widths)),
        "hidden": first.get("hidden", [job.model.group_size] * len(job.model.widths)),
    }
    entry = schedule_entry(defaults | arguments | {"name": suggested_name(index)}, where="search.suggest")
    schedule = resolve(entry, search=job.search, where="search.suggest")
    return PlannedTrial(index=index, name=entry.name, schedule=schedule, seed=job.seed)


def base_spec(job: JobSpec, schedule: GrowthSchedule, data: dict[str, Any]) -> dict[str, Any]:
    """Specification of the initial network of a schedule on a prepared data set.

    Raises:
        UserError: If the family does not fit the data.
    """
    model, sizes = job.model, schedule.initial
    text = data.get("kind") == "tokens"
    if text != (model.family == "gpt"):
        raise UserError(
            f"model.family {model.family} does not fit data.name {job.data.name}: "
            + ("a text needs gpt" if text else "gpt needs a text; use resnet for images, or mlp")
        )
    common = {
        "family": model.family,
        "widths": list(model.widths if sizes.widths is None else sizes.widths),
        "blocks": list(sizes.blocks),
        "hidden": list(sizes.hidden),
    }
    if text:
        return common | {
            "vocab": data["num_classes"],
            "context": data["input_shape"][0],
            "heads": model.heads,
            "positions": model.positions,
            "norm": model.norm,
            "parallel": model.parallel,
        }
    return common | {
        "input_shape": data["input_shape"],
        "num_classes": data["num_classes"],
        "stem_stride": model.stem_stride,
        "group_size": model.group_size,
    }


def trial_config(job: JobSpec, trial: PlannedTrial, *, data: dict[str, Any], folder: Path) -> TrialConfig:
    """The complete input of a trial's stage loop."""
    return TrialConfig(
        trial=trial.name,
        schedule=trial.schedule.to_dict(),
        base={
            "spec": base_spec(job, trial.schedule, data),
            "seed": stream_seed(trial.seed, "weights"),
        },
        training=job.training.model_dump(mode="json"),
        probe=job.probe.model_dump(mode="json"),
        budget_flops=int(job.budget.trial),
        seed=trial.seed,
        folder=str(folder / "trials" / trial.name),
        data=str(folder / "data"),
        cache=_cache(job),
        checkpoint_s=job.resources.checkpoint_every,
    )


def _cache(job: JobSpec) -> dict[str, Any] | None:
    """Where finished stages are shared."""
    if not job.cache.enabled:
        return None
    folder = Path(job.cache.folder) if job.cache.folder is not None else Path(job.storage) / ".stages"
    return {"folder": str(folder.expanduser().resolve()), "limit_bytes": int(job.cache.limit)}


def check_networks(job: JobSpec, trials: list[PlannedTrial], data: dict[str, Any]) -> None:
    """Build each initial network once, and check batch against data: mistakes show before anything starts.

    Raises:
        UserError: If sizes do not fit together; names the schedule.
    """
    check_augmentable(job.training.augment, data["input_shape"])
    for trial in trials:
        try:
            _rehearse(build(base_spec(job, trial.schedule, data), seed=0), trial.schedule)
        except UserError as error:
            raise UserError(f"schedule {trial.name}: {error}") from None
        smallest = subset_size(data["sizes"]["train"], trial.schedule.initial.data_share)
        if job.training.batch_size > smallest:
            raise UserError(
                f"schedule {trial.name}: training.batch_size {job.training.batch_size} is larger than its first "
                f"training subset of {smallest} samples: use a smaller batch or a larger data_share"
            )


def _rehearse(model: Family, schedule: GrowthSchedule) -> None:
    """Take the steps that are known (and build all candidates of the first look) on an untrained network."""
    match schedule.policy:
        case Triggered(changes=changes):
            _rehearse_steps(model, changes, stage=0)
        case FixedSteps(steps=steps):
            for stage, changes in steps:
                _rehearse_steps(model, changes, stage=stage)
        case _:
            pass
    sight = sight_of(schedule.policy)
    if sight is not None:
        candidates(model, sight, stage=0, seed=0)


def _rehearse_steps(model: Family, changes: tuple[Change, ...], *, stage: int) -> None:
    for change in changes:
        for part in expand(model, change):
            _rehearse_step(model, part, stage)


def _rehearse_step(model: Family, change: Change, stage: int) -> None:
    generator = torch.Generator()
    match change:
        case AddBlock():
            exact = replace(change, exact=True)  # the same sizes, and nothing to compare outputs on
            insert_block(
                model, site=change.site, block=new_block(model, exact, stage=stage, seed=0), generator=generator
            )
        case AddUnits() | AddHeads():
            branch = new_branch(model, change, stage=stage, seed=0)
            widen(model, site=change.block, units=branch, generator=generator)
        case AddChannels():
            add_channels(model, change, stage=stage, seed=0)
        case _:
            pass


def fresh_loop(job: JobSpec, trial: PlannedTrial, *, data: dict[str, Any], folder: Path) -> StageLoop:
    """The stage loop of a trial at its very beginning, whatever its folder holds; it writes nothing."""
    config = replace(trial_config(job, trial, data=data, folder=folder), folder=str(folder / "nowhere"), cache=None)
    return StageLoop(config, ranks=Ranks())


def check_budgets(job: JobSpec, trials: list[PlannedTrial], data: dict[str, Any], *, folder: Path) -> dict[str, int]:
    """Global batches that the first stage of each trial pays for.

    Raises:
        UserError: If a trial could not train at all in its first stage; says how much it needs.
    """
    found: dict[str, int] = {}
    known: dict[tuple[object, ...], int] = {}
    for trial in trials:
        # What the first stage costs depends on the initial network and on who looks at what, not on the steps.
        key = (trial.schedule.initial, sight_of(trial.schedule.policy))
        if key not in known:
            loop = fresh_loop(job, trial, data=data, folder=folder)
            known[key] = loop.stage.planned_batches()
        found[trial.name] = known[key]
        if found[trial.name] < 1:
            raise UserError(
                f"schedule {trial.name}: budget.trial {format_flops(job.budget.trial)} over {job.search.num_stages} "
                "stages does not pay for one batch beside the evaluations and the probe of a stage: raise "
                "budget.trial, lower search.stages or probe.samples"
            )
    return found
