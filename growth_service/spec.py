"""The job file: read once, checked once, then trusted.

``load_job`` turns YAML into a frozen :class:`JobSpec`; everything that can be wrong about a file
ends in one :class:`JobFileError` with a line a mistake: where, which value, what is allowed.
"""

import difflib
import math
import types
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from growth_service.core.judging import Rule, RuleName
from growth_service.core.rates import Rewarm, Shape
from growth_service.core.units import Dimension, parse_quantity
from growth_service.errors import JobFileError, UserError

MAX_JOB_BYTES = 1 << 20
SUGGESTED = "suggested-"
"""How names of suggested schedules begin."""


def _quantity(dimension: Dimension) -> BeforeValidator:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"{value!r} is not a quantity in {dimension}")
        return parse_quantity(value, dimension=dimension)

    return BeforeValidator(parse)


def _number(value: Any) -> Any:
    """YAML 1.1 reads ``1e-3`` as text; take it for the number it is."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Flops = Annotated[float, _quantity("flops")]
Bytes = Annotated[float, _quantity("bytes")]
Seconds = Annotated[float, _quantity("seconds")]
Nats = Annotated[float, _quantity("nats")]
Number = Annotated[float, BeforeValidator(_number)]
Share = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class DataSpec(_Spec):
    """Which data set, and how much of it."""

    name: Literal["digits", "fashion_mnist", "cifar10", "cifar100", "image_folder", "text", "python"]
    """A data set that the service can load."""
    folder: str | None = None
    """Folder with its files (text: the .txt or .bin file; python: package.module:factory); null: the usual places."""
    context: Count = 64
    """Tokens of a sequence, for texts."""
    image_size: Count = 32
    """Height and width to which the images of an image_folder are scaled and cut."""
    limits: dict[Literal["train", "probe", "val", "test"], Count] = {}
    """Most samples of a split, for quick jobs."""


class ModelSpec(_Spec):
    """What no schedule changes about the architecture."""

    family: Literal["mlp", "resnet", "gpt"]
    """``resnet`` for images, ``mlp`` with one width, ``gpt`` for texts."""
    widths: Annotated[tuple[Count, ...], Field(min_length=1, max_length=8)]
    """Channels of the residual stream in each group; each later group halves the resolution."""
    stem_stride: Annotated[int, Field(ge=1, le=4)] = 1
    """Stride of the first convolution."""
    group_size: Count = 4
    """Channels in a group of GroupNorm; widths and hidden units are multiples of it."""
    heads: Count = 4
    """Attention heads of a block (gpt)."""
    positions: Literal["learned", "rotary"] = "learned"
    """How tokens know where they are (gpt)."""
    norm: Literal["layer", "rms"] = "layer"
    """Kind of norm (gpt)."""
    parallel: bool = False
    """Whether attention and feed-forward part of a block read the same stream (gpt)."""


class TrainingSpec(_Spec):
    """How a stage trains."""

    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: Annotated[Number, Field(gt=0, le=10)] = 0.005
    """Peak rate."""
    momentum: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    """Of SGD."""
    weight_decay: Annotated[Number, Field(ge=0, le=1)] = 0.01
    batch_size: Count = 64
    """Samples in a global batch, whatever the number of workers."""
    shards: Count = 4
    """Pieces of a batch, one after the other in a worker, whose gradients are summed in one fixed tree: 1, 2 and 4
    workers agree bit for bit, and a worker needs memory for one piece only."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the passes of training; weights, updates, evaluations and certificates stay in fp32."""
    rates: Shape = "restarts"
    """Shape of the learning rate over a trial: ``restarts`` (each stage warms up and decays), ``wsd`` (steady, then
    one decay at the end of the budget) or ``cosine`` (one over the whole budget)."""
    warmup_share: Annotated[Number, Field(ge=0, lt=1)] = 0.1
    """Share of a stage over which it warms up, where it does."""
    decay_share: Annotated[Number, Field(gt=0, le=1)] = 0.2
    """Share of the budget over which ``wsd`` decays."""
    floor_share: Annotated[Number, Field(ge=0, le=1)] = 0.02
    """Lowest rate as a share of the peak."""
    rewarm: Rewarm = "whole"
    """What warms up again in later stages: everything, what is new in the stage, or nothing."""
    evaluate_samples: Count = 4096
    """Most training samples on which the training loss is measured after a stage."""
    augment: Literal["none", "crop_flip"] = "none"
    """Random shifts and flips of training images; probes and evaluations see images as they are."""

    @model_validator(mode="after")
    def _shards_divide_the_batch(self) -> Self:
        if self.batch_size % self.shards:
            raise ValueError(f"batch_size {self.batch_size} must be a multiple of shards {self.shards}")
        return self


class BudgetSpec(_Spec):
    """What a trial and a study may cost. FLOPs are 2 per multiply-accumulate, probes and evaluations included.

    A study ends with whichever of its limits comes first: no further trial starts, and where its time or money is used
    up, running trials end after the stage that they are in.
    """

    trial: Flops
    """What one trial may spend, for example ``"80 GFLOP"``."""
    study: Flops | None = None
    """What all trials together may spend; null: trials times ``trial``."""
    trials: Count | None = None
    """Most trials, listed and suggested; null: all."""
    time: Seconds | None = None
    """Most wall time of a study, resumed or not, for example ``"2 h"``; null: no limit."""
    money: Annotated[Number, Field(gt=0)] | None = None
    """Most that it may cost, in the currency of ``price_per_hour``; null: no limit."""
    price_per_hour: Annotated[Number, Field(gt=0)] | None = None
    """What an hour of the machines costs."""

    @model_validator(mode="after")
    def _priced(self) -> Self:
        if self.money is not None and self.price_per_hour is None:
            raise ValueError("budget.money needs budget.price_per_hour: what an hour of the machines costs")
        return self

    @property
    def seconds(self) -> float:
        """Wall seconds that time and money allow; infinite without either."""
        of_money = math.inf
        if self.money is not None and self.price_per_hour is not None:
            of_money = self.money / self.price_per_hour * 3600
        return min(math.inf if self.time is None else float(self.time), of_money)


class ProbeSpec(_Spec):
    """What a probe looks at."""

    samples: Annotated[int, Field(ge=16)] = 1000
    """Most samples of the probe split (independent of training) per look."""
    train_samples: Annotated[int, Field(ge=16)] = 2000
    """Most training samples for directions and second moments."""
    ridge: Annotated[Number, Field(ge=0, le=1)] = 1e-3
    """Share of the mean diagonal added to a second moment."""


class ScheduleEntry(_Spec):
    """One growth schedule: a builder of a search space and its arguments."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    use: str
    """Builder, for example ``scratch`` or ``joint``."""
    name: Name
    """Name of the trial."""

    @property
    def arguments(self) -> dict[str, Any]:
        """All other keys: arguments of the builder."""
        return dict(self.model_extra or {})


class SuggestSpec(_Spec):
    """Further schedules, suggested by Optuna from a space."""

    space: str | dict[str, Any]
    """A space of ``search_spaces`` (``joint_space``), ``package.module:function`` (an Optuna trial in, a schedule entry
    out), or a mapping: ``{use: joint, confidence: {low: 0.3, high: 0.9}, inner: [copy, random]}``."""
    trials: Count
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the sampler."""
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    """``grid`` takes all combinations of a mapping of choices, in a shuffled order."""
    objectives: Annotated[tuple[Literal["loss", "flops"], ...], Field(min_length=1, max_length=2)] = ("loss",)
    """What is searched for: a low loss, or a low loss and little compute."""
    warm_start: tuple[Name, ...] = ()
    """Earlier studies in the same MLflow store, of the same data and budget, whose suggestions the sampler (``tpe``)
    knows from the start."""

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if self.warm_start and self.sampler != "tpe":
            raise ValueError(f"warm_start needs sampler tpe: {self.sampler} learns nothing from results")
        return self


class SearchSpec(_Spec):
    """Which schedules run, and in what order."""

    schedules: tuple[ScheduleEntry, ...] = ()
    """Run as listed."""
    suggest: SuggestSpec | None = None
    """Suggested after the listed ones."""
    stages: Annotated[int, Field(ge=1, le=100)] | tuple[Share, ...] = 5
    """Stages of a trial: a number (equal shares of its budget), or the share of each."""
    repeats: Annotated[int, Field(ge=1, le=100)] = 1
    """Trials of each listed schedule, with seeds seed, seed + 1, ..."""
    concurrent_trials: Count = 1
    deterministic: bool = True
    """Decide across trials in a fixed order (waves of ``concurrent_trials``), so that the study repeats exactly."""

    @field_validator("stages", mode="before")
    @classmethod
    def _number_or_shares(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 100:
            return value
        if isinstance(value, list | tuple) and 1 <= len(value) <= 100:
            return value
        raise ValueError(f"must be a number of stages from 1 to 100, or the share of each, got {value!r}")

    @field_validator("stages")
    @classmethod
    def _shares_sum_to_one(cls, value: int | tuple[float, ...]) -> int | tuple[float, ...]:
        if not isinstance(value, int) and abs(sum(value) - 1) > 1e-6:
            raise ValueError(f"the shares of the stages sum to {sum(value):g}: they must sum to 1")
        return value

    @property
    def num_stages(self) -> int:
        """Stages of a trial."""
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @property
    def shares(self) -> tuple[float, ...] | None:
        """Share of the budget of each stage; None: equal ones."""
        return None if isinstance(self.stages, int) else tuple(s / sum(self.stages) for s in self.stages)

    @model_validator(mode="after")
    def _something_to_run(self) -> Self:
        if not self.schedules and self.suggest is None:
            raise ValueError("needs at least one entry in schedules, or suggest")
        names = [s.name for s in self.schedules]
        doubled = sorted({n for n in names if names.count(n) > 1})
        if doubled:
            raise ValueError(f"schedule names must differ, {', '.join(doubled)} occurs more than once")
        taken = [n for n in names if self.suggest is not None and n.startswith(SUGGESTED)]
        if taken:
            raise ValueError(f"schedule name {taken[0]!r} is one that suggested schedules get: choose another")
        return self


class SchedulerSpec(_Spec):
    """When a trial is pruned in favour of others."""

    rule: RuleName = "law"
    """``law``: even an optimistic learning curve would not reach what a finished trial reached. ``ratio``: a loss many
    times the best at no more compute. ``median``, ``asha``: the well-known ones. ``none``."""
    optimism: Annotated[Number, Field(ge=1, le=10)] = 1.5
    """Power by which improvements still to come may exceed the best that was seen (``law``)."""
    margin: Annotated[Number, Field(ge=0, le=1)] = 0.02
    """Share by which the optimistic loss must miss the best (``law``)."""
    prune_ratio: Annotated[Number, Field(gt=1)] = 3.0
    """Prune when the validation loss is more than this many times the best at no more compute (``ratio``)."""
    reduction: Annotated[int, Field(ge=2, le=16)] = 3
    """One trial of so many goes on at each rung (``asha``)."""
    grace_share: Annotated[Number, Field(ge=0, le=1)] = 0.1
    """Share of a trial's budget before which it is never pruned."""

    def of_budget(self, flops: float) -> Rule:
        """The rule for trials of this budget."""
        return Rule(
            name=self.rule,
            optimism=self.optimism,
            margin=self.margin,
            prune_ratio=self.prune_ratio,
            reduction=self.reduction,
            grace_flops=int(self.grace_share * flops),
        )


class ResourcesSpec(_Spec):
    """What a trial's workers take."""

    workers: Count = 1
    """Data-parallel workers of a trial; must divide ``training.shards``."""
    cpus_per_worker: Count = 1
    max_worker_restarts: Annotated[int, Field(ge=0, le=100)] = 3
    """Restarts of a trial's workers after a fault, each from the last checkpoint."""
    checkpoint_every: Seconds = 600.0
    """How often a stage that is under way is kept; every finished stage is."""


class CacheSpec(_Spec):
    """Finished stages that trials share: schedules that begin alike run their common beginning once."""

    enabled: bool = True
    """Records are the same with it and without. What is not spent again is free for further trials, where
    ``budget.study`` limits how many run."""
    folder: str | None = None
    """Where finished stages are; null: ``.stages`` in ``storage``, for all its studies."""
    limit: Bytes = 10 * 2.0**30
    """The stages that were not used for longest are dropped beyond this size."""


class TrackingSpec(_Spec):
    """Where records go."""

    tracking_uri: str | None = None
    """MLflow server or ``sqlite:///`` file; null: a file in ``storage``."""
    experiment: str = "growth"


class JobSpec(_Spec):
    """A growth study: data, architecture, budget, schedules, resources."""

    version: Literal[1]
    name: Name
    """Name of the study and of its folder in ``storage``."""
    seed: Annotated[int, Field(ge=0)] = 0
    data: DataSpec
    model: ModelSpec
    training: TrainingSpec = TrainingSpec()
    budget: BudgetSpec
    probe: ProbeSpec = ProbeSpec()
    search: SearchSpec
    scheduler: SchedulerSpec = SchedulerSpec()
    resources: ResourcesSpec = ResourcesSpec()
    cache: CacheSpec = CacheSpec()
    storage: str = "growth-runs"
    """Folder of studies; everything a study writes is in it."""
    mlflow: TrackingSpec = TrackingSpec()

    @field_validator("storage")
    @classmethod
    def _storage_is_a_folder(cls, value: str) -> str:
        if "://" in value or not value.strip():
            raise ValueError(f"{value!r} must be a folder on this machine")
        return value

    @model_validator(mode="after")
    def _workers_divide_shards(self) -> Self:
        if self.training.shards % self.resources.workers:
            raise ValueError(
                f"resources.workers {self.resources.workers} must divide training.shards {self.training.shards}"
            )
        return self


def load_job(path: str | Path, *, overrides: list[str] | None = None) -> JobSpec:
    """Read and check a job file.

    Args:
        path: YAML file.
        overrides: ``a.b=value`` changes, as of ``--set``; values are read as YAML.

    Returns:
        The job with all defaults.

    Raises:
        JobFileError: If anything about the file or an override is wrong; one line a mistake.
    """
    data = _read_yaml(Path(path))
    for override in overrides or ():
        _apply_override(data, override)
    return parse_job(data, source=str(path))


def parse_job(data: dict[str, Any], *, source: str) -> JobSpec:
    """Check a job given as plain data; ``source`` names it in errors."""
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        lines = "\n".join(f"  {line}" for line in _explain(error, JobSpec))
        raise JobFileError(f"{source} is not a valid growth job:\n{lines}") from None


def call_checked(
    function: Callable[..., Any], arguments: dict[str, Any], *, first: Callable[..., Any], where: str
) -> Any:
    """Call ``function(first(...), ...)`` with arguments from a job file, checked against both signatures.

    Args:
        function: Takes what ``first`` makes, then keyword arguments, all annotated.
        arguments: From YAML; lists become tuples where the annotation says so.
        first: Makes the first argument from the keys that all entries have.
        where: Names the place in errors, for example ``search.schedules.2 (joint)``.

    Raises:
        UserError: If an argument is missing, unknown, or of the wrong type or range.
    """
    common, own = _fields(first, where=where), _fields(function, where=where, skip=1)
    model = create_model("Arguments", __base__=_Spec, **common | own)
    try:
        checked = model.model_validate(arguments)
    except ValidationError as error:
        raise UserError("\n".join(f"{where}: {line}" for line in _explain(error, model))) from None
    made = first(**{name: getattr(checked, name) for name in common})
    return function(made, **{name: getattr(checked, name) for name in own})


def _fields(function: Callable[..., Any], *, where: str, skip: int = 0) -> dict[str, Any]:
    """Type and default of what a function takes, after its first ``skip`` arguments.

    Raises:
        UserError: If that cannot be told from its signature.
    """
    try:
        found = list(signature(function, eval_str=True).parameters.values())
    except (NameError, TypeError, ValueError) as error:
        raise UserError(f"{where}: the signature of {function.__name__} cannot be read ({error})") from error
    if any(p.kind is not Parameter.POSITIONAL_OR_KEYWORD for p in found[:skip]) or len(found) < skip:
        raise UserError(f"{where}: the first argument of {function.__name__} must be the start of the schedule")
    for parameter in found[skip:]:
        if parameter.kind is not Parameter.KEYWORD_ONLY or parameter.annotation is Parameter.empty:
            raise UserError(
                f"{where}: argument {parameter.name!r} of {function.__name__} has no type to check a job against, or "
                "cannot be given by its name: a builder names all its arguments after a *, with annotations"
            )
    return {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in found[skip:]}


def schedule_entry(data: dict[str, Any], *, where: str) -> ScheduleEntry:
    """An entry that did not come from the job file, checked.

    Raises:
        UserError: If it is none.
    """
    try:
        return ScheduleEntry.model_validate(data)
    except ValidationError as error:
        raise UserError("\n".join(f"{where}: {line}" for line in _explain(error, ScheduleEntry))) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8") if size <= MAX_JOB_BYTES else ""
    except FileNotFoundError:
        raise JobFileError(f"job file {path} does not exist: pass the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobFileError(f"job file {path} cannot be read as UTF-8 text: {error}") from None
    if size > MAX_JOB_BYTES:
        raise JobFileError(f"job file {path} has {size} bytes, at most {MAX_JOB_BYTES} are read: is it the right file?")
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise JobFileError(f"job file {path} is not valid YAML{place}: {problem}") from None
    if data is None:
        raise JobFileError(f"job file {path} is empty: copy search_spaces/jobs/digits.yaml and change it")
    if not isinstance(data, dict):
        raise JobFileError(f"job file {path} must hold keys and values at the top, not a {type(data).__name__}")
    return data


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    if not found or not key:
        raise JobFileError(f"--set {override!r} must read a.b=value, for example --set budget.trial='40 GFLOP'")
    *parents, last = key.split(".")
    place: Any = data
    for part in parents:
        place = _step_into(place, part, override, create=True)
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise JobFileError(
            f"--set {override!r}: the value is not valid YAML ({getattr(error, 'problem', error)})"
        ) from None
    if isinstance(place, list):
        index = _list_index(place, last, override)
        place[index] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise JobFileError(f"--set {override!r}: {'.'.join(parents)} is a value, it has no key {last!r}")


def _step_into(place: Any, part: str, override: str, *, create: bool) -> Any:
    if isinstance(place, list):
        return place[_list_index(place, part, override)]
    if isinstance(place, dict):
        return place.setdefault(part, {}) if create else place[part]
    raise JobFileError(f"--set {override!r}: there is nothing below {part!r}")


def _list_index(place: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(place):
        raise JobFileError(f"--set {override!r}: {part!r} must be a number from 0 to {len(place) - 1}")
    return int(part)


def _explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line a mistake: place, what, allowed. Errors that only follow from deeper ones are dropped."""
    found = error.errors(include_url=False)
    places = [e["loc"] for e in found]
    lines = []
    for e in found:
        loc = e["loc"]
        if any(other != loc and other[: len(loc)] == loc for other in places):
            continue
        where = ".".join(map(str, loc)) or "the job"
        match e["type"]:
            case "missing":
                lines.append(f"{where}: required, but missing")
            case "extra_forbidden":
                allowed = sorted(_keys_at(model, loc[:-1]))
                near = difflib.get_close_matches(str(loc[-1]), allowed, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                lines.append(f"{where}: unknown key; {hint}allowed here: {', '.join(allowed)}")
            case _:
                message = e["msg"].removeprefix("Value error, ")
                lines.append(f"{where}: {message[0].lower()}{message[1:]}" + _got(e, message))
    return lines


def _got(error: Any, message: str) -> str:
    value = error.get("input")
    if isinstance(value, dict | list) or repr(value) in message:
        return ""
    return f", got {value!r}"


def _keys_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Keys that the model at a place of an error allows."""
    current: Any = model
    for part in loc:
        if isinstance(current, type) and issubclass(current, BaseModel) and str(part) in current.model_fields:
            current = current.model_fields[str(part)].annotation
        while get_origin(current) in (tuple, list, Annotated, types.UnionType):
            current = next((a for a in get_args(current) if a not in (type(None), Ellipsis)), None)
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []
