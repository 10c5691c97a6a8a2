from pathlib import Path

import pytest
import yaml

import search_spaces
from growth_service.core.policies import FixedSteps, SignalGuided
from growth_service.core.steps import AddBlock, AddChannels, AddData, AddUnits
from growth_service.errors import JobFileError, UserError
from growth_service.models import FAMILIES
from growth_service.spec import DataSpec, ModelSpec, load_job
from growth_service.training.datasets import LOADERS
from tests.jobs import DIGITS, FASHION, TEXT, job_data, small_job


@pytest.mark.parametrize("path", [DIGITS, FASHION, TEXT])
def test_every_shipped_job_is_valid_and_its_schedules_resolve(path):
    job = load_job(path)
    assert len(search_spaces.listed_schedules(job)) >= 6


def test_the_shipped_digits_job_shows_every_key_of_a_job():
    def keys(data, prefix=""):
        for key, value in data.items():
            yield prefix + key
            if isinstance(value, dict):
                yield from keys(value, f"{prefix}{key}.")

    shown = set(keys(yaml.safe_load(DIGITS.read_text())))
    known = set(keys(load_job(DIGITS).model_dump(mode="json")))
    assert known <= shown


def test_a_job_survives_its_own_json():
    job = load_job(DIGITS)
    assert type(job).model_validate_json(job.model_dump_json()) == job


def test_families_and_data_sets_of_the_job_file_are_those_that_exist():
    assert set(ModelSpec.model_fields["family"].annotation.__args__) == set(FAMILIES)
    assert set(DataSpec.model_fields["name"].annotation.__args__) == set(LOADERS)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "budget.trail=3",
            r"budget\.trail: unknown key; did you mean 'trial'\? allowed here: money, price_per_hour, study, time,",
        ),
        ("budget.trial=-3", r"budget\.trial: -3 must be a finite amount above zero"),
        ("budget.trial=3 parsec", r"budget\.trial: unit 'parsec' in '3 parsec' is unknown for flops: use one of FLOP"),
        ("budget.trial=true", r"budget\.trial: true is not a quantity"),
        ("model.family=resnext", r"model\.family: input should be 'mlp', 'resnet' or 'gpt', got 'resnext'"),
        ("data.name=mnist", r"data\.name: input should be 'digits', 'fashion_mnist', .*, got 'mnist'"),
        ("training.shards=5", r"training: batch_size 64 must be a multiple of shards 5"),
        ("resources.workers=3", r"resources\.workers 3 must divide training\.shards 1"),
        ("training.learning_rate=fast", r"training\.learning_rate: .*got 'fast'"),
        ("version=2", r"version: input should be 1, got 2"),
        ("name=../up", r"name: string should match pattern"),
        ("search.schedules.1.name=scratch-small", r"search: schedule names must differ, scratch-small occurs more"),
        ("scheduler.prune_ratio=1", r"scheduler\.prune_ratio: .*greater than 1"),
        ("storage=s3://bucket", r"storage: 's3://bucket' must be a folder"),
    ],
)
def test_a_wrong_value_is_refused_with_place_value_and_what_is_allowed(override, message):
    with pytest.raises(JobFileError, match=message):
        load_job(DIGITS, overrides=[override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("search.schedules.0.use=scrach", r"search\.schedules\.0: unknown schedule builder 'scrach'; did you mean 'scratch'"),
        ("search.schedules.0.blcks=[1]", r"search\.schedules\.0 \(scratch\): blcks: unknown key; did you mean 'blocks'"),
        ("search.schedules.0.blocks=[-1, 1]", r"search\.schedules\.0 \(scratch\): blocks\.0: .*greater than or equal to 0"),
        ("search.schedules.5.tolerance=-1 nats", r"'-1 nats' must be a finite amount above zero"),
        ("search.schedules.5.axes=[hight]", r"search\.schedules\.5 \(certified\): axes\.0: input should be 'depth', 'width' or 'data'"),
    ],
)  # fmt: skip
def test_a_wrong_schedule_is_refused_with_its_place(override, message):
    with pytest.raises(UserError, match=message):
        search_spaces.listed_schedules(load_job(DIGITS, overrides=[override]))


def test_a_missing_key_is_named(tmp_path):
    data = job_data(tmp_path)
    del data["budget"]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(JobFileError, match=r"job\.yaml is not a valid growth job:\n  budget: required, but missing"):
        load_job(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a: [1", r"is not valid YAML at line \d+, column \d+"),
        ("name: 2024-13-01", "is not valid YAML"),
        ("- 1\n- 2\n", "must hold keys and values at the top, not a list"),
        ("name: !!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("[" * 3000, "is not valid YAML"),
        ("x" * (1 << 21), "at most 1048576 are read"),
    ],
)
def test_what_is_no_job_file_is_refused(tmp_path, text, message):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobFileError, match=message):
        load_job(path)


def test_a_job_file_that_does_not_exist_is_refused():
    with pytest.raises(JobFileError, match=r"nope\.yaml does not exist"):
        load_job(Path("nope.yaml"))


@pytest.mark.parametrize("override", ["budget", "=3", "search.schedules.99.name=x", "name.deeper=1"])
def test_an_override_that_names_no_place_is_refused(override):
    with pytest.raises(JobFileError, match="--set"):
        load_job(DIGITS, overrides=[override])


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path):
    job = small_job(tmp_path, training__learning_rate="1e-3", budget__trial="2e9")
    assert job.training.learning_rate == 1e-3
    assert job.budget.trial == 2e9


def test_the_late_growth_grows_everything_at_once(tmp_path):
    late = search_spaces.listed_schedules(small_job(tmp_path))[2]
    assert late.policy == FixedSteps(
        steps=(
            (
                1,
                (
                    AddUnits(block="groups.0.blocks.0.branch", units=4),
                    AddUnits(block="groups.1.blocks.0.branch", units=4),
                    AddChannels(site="groups.0.entry", channels=4),
                    AddChannels(site="groups.1.entry", channels=4),
                    AddBlock(site="groups.0.blocks.0", inner="copy"),
                    AddBlock(site="groups.1.blocks.0", inner="copy"),
                ),
            ),
        )
    )


def test_the_data_schedule_doubles_until_all_is_in_use(tmp_path):
    entry = {"use": "data_only", "name": "data", "blocks": [1, 1], "hidden": [8, 8], "data_share": 0.2}
    job = small_job(tmp_path, search__schedules=[entry], search__stages=6)
    (schedule,) = search_spaces.listed_schedules(job)
    shares = [changes[0].share for _, changes in schedule.policy.steps]
    assert shares == pytest.approx([0.4, 0.8, 1.0])
    assert all(isinstance(changes[0], AddData) for _, changes in schedule.policy.steps)


def test_a_joint_schedule_carries_its_tolerance_in_nats(tmp_path):
    joint = search_spaces.listed_schedules(small_job(tmp_path))[1]
    assert isinstance(joint.policy, SignalGuided)
    assert joint.policy.tolerance_nats == pytest.approx(0.1)
