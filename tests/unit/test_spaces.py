"""Spaces and schedules that a user writes: in words, as mappings, as functions of their own."""

import json
import sys

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth_service.core.policies import BudgetAware, FixedSteps, RandomSite, Triggered
from growth_service.core.schedule import GrowthSchedule
from growth_service.core.steps import (
    AddBlock,
    AddChannels,
    AddData,
    AddHeads,
    AddUnits,
    Deepen,
    Widen,
    change_from_words,
)
from growth_service.errors import UserError
from growth_service.orchestration.plan import check_networks, planned_trials, suggested_trial
from growth_service.orchestration.sampling import rehearse_space, sampler_of
from growth_service.orchestration.searcher import WaveSuggester
from growth_service.spec import ScheduleEntry, SearchSpec, SuggestSpec, parse_job
from search_spaces import BUILDERS, resolve, space
from tests.jobs import SMALL, job_data, small_job

SEARCH = SearchSpec.model_validate({"schedules": [{"use": "scratch", "name": "x"}], "stages": [0.1, 0.2, 0.3, 0.4]})
PATH = st.from_regex(r"\Agroups\.[0-9]\.blocks\.[0-9](\.branch)?\Z")


def built(**entry):
    return resolve(ScheduleEntry.model_validate({"name": "mine"} | SMALL | entry), search=SEARCH)


# --- steps in words ---------------------------------------------------------------------------------


@given(
    st.one_of(
        st.builds(Deepen, times=st.integers(2, 9), exact=st.booleans()),
        st.builds(Widen, times=st.integers(2, 64).map(lambda n: 1 + n / 16)),
        st.builds(AddData, share=st.integers(1, 100).map(lambda n: n / 100)),
        st.builds(AddBlock, site=PATH, inner=st.just("copy")),
        st.builds(AddUnits, block=PATH, units=st.integers(1, 999)),
        st.builds(AddHeads, block=PATH, heads=st.integers(1, 99)),
        st.builds(AddChannels, site=PATH, channels=st.integers(1, 999)),
    )
)
def test_words_are_the_inverse_of_a_step_in_words(change):
    assert change_from_words(str(change)) == change


@pytest.mark.parametrize(
    "words", ["", "depth", "depth*1", "depth*x", "width*1", "width@+8", "data@0", "data@x", "heads@a+0", "deep*2", "*2"]
)
def test_words_that_are_no_step_are_refused(words):
    with pytest.raises(UserError, match="is no step: use depth"):
        change_from_words(words)


def test_a_fixed_schedule_is_a_list_of_steps_in_words():
    schedule = built(use="fixed", steps={2: ["depth*2", "data@1.0"], 0: "width*1.5"}, data_share=0.5)
    assert schedule.policy == FixedSteps(steps=((0, (Widen(times=1.5),)), (2, (Deepen(), AddData(share=1.0)))))


def test_a_step_that_is_never_taken_is_refused():
    with pytest.raises(UserError, match="a step after stage 3 is never taken"):
        built(use="fixed", steps={3: "depth*2"})


# --- builders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(BUILDERS) - {"fixed"}))
def test_every_builder_gives_a_schedule_on_the_stages_of_the_job(name):
    schedule = built(use=name)
    assert (schedule.num_stages, schedule.shares) == (4, (0.1, 0.2, 0.3, 0.4))
    assert GrowthSchedule.from_dict(schedule.to_dict()) == schedule
    wider = built(use=name, widths=[16, 32])
    assert wider.initial.widths == (16, 32)


@pytest.mark.parametrize(
    ("name", "arguments", "stages"),
    [
        ("width_only", {"steps": 1, "until_share": 0.1}, [0]),
        ("width_only", {"steps": 2, "until_share": 0.6}, [1, 2]),
        ("stacking", {"steps": 2, "until_share": 0.25}, [0, 1]),
        ("compound", {"steps": 1, "until_share": 0.6}, [2]),
        ("one_shot_late", {"at_share": 0.9}, [2]),
        ("one_shot_late", {"at_share": 0.1}, [0]),
    ],
)
def test_steps_at_a_share_of_the_budget_are_taken_where_stages_end(name, arguments, stages):
    assert [when for when, _ in built(use=name, **arguments).policy.steps] == stages


def test_compound_growth_takes_depth_width_and_data_together():
    policy = built(use="compound", data_share=0.5).policy
    assert policy.steps[0][1] == (Widen(times=1.5), Deepen(), AddData(share=1.0))


def test_triggers_carry_their_number():
    assert built(use="tokens_per_param", threshold=157).policy == Triggered(
        trigger="tokens_per_param", threshold=157.0, changes=(Deepen(),)
    )
    assert len(built(use="plateau").policy.changes) == 2  # one block in each group
    assert isinstance(built(use="random_site", steps=1).policy, RandomSite)


def test_joint_hands_on_all_its_arguments():
    policy = built(use="joint", axes=["stream"], width_factors=[1.25], confidence=0.8, exact=False, look=False,
                   tolerance="0.1 nats", passes=2.0).policy  # fmt: skip
    assert policy == BudgetAware(
        axes=("stream",), width_factors=(1.25,), confidence=0.8, exact=False, look=False, tolerance_nats=0.1,
        passes=2.0,
    )  # fmt: skip


# --- spaces ------------------------------------------------------------------------------------------


def draws(asked, num=12):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [space(asked)(study.ask()) for _ in range(num)]


def test_a_mapping_is_a_space():
    asked = {
        "use": "joint",
        "confidence": {"low": 0.3, "high": 0.9},
        "inner": ["copy", "random"],
        "axes": [["depth"], ["depth", "stream"]],
        "passes": 2.0,
    }
    found = draws(asked)
    assert all(0.3 <= f["confidence"] <= 0.9 and f["use"] == "joint" and f["passes"] == 2.0 for f in found)
    assert {f["inner"] for f in found} == {"copy", "random"}
    assert {len(f["axes"]) for f in found} == {1, 2}
    for arguments in found:
        assert isinstance(built(**arguments).policy, BudgetAware)


def test_a_range_of_whole_numbers_stays_whole():
    found = draws({"use": "stacking", "steps": {"low": 1, "high": 3}})
    assert {type(f["steps"]) for f in found} == {int}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"inner": ["copy"]}, "needs use"),
        ({"use": "joint", "confidence": {"low": 1.0, "high": 0.5}}, "low below high"),
        ({"use": "joint", "confidence": {"low": 0.1}}, "low below high"),
        ({"use": "joint", "confidence": {"low": 0.1, "high": 0.5, "lgo": True}}, "low below high"),
        ({"use": "joint", "inner": []}, "at least one value"),
        ("joint_spac", "did you mean 'joint_space'"),
        ("no_such_module_here:f", "cannot be imported"),
        ("json:no_such", "has no function 'no_such'"),
    ],
)
def test_a_space_that_is_none_is_refused(asked, words):
    with pytest.raises(UserError, match=words):
        space(asked)


def test_a_function_of_ones_own_is_found_in_the_present_folder(tmp_path, monkeypatch):
    (tmp_path / "my_schedules.py").write_text(
        "from search_spaces.start import Start\n"
        "from growth_service.core.policies import FixedSteps\n"
        "from growth_service.core.steps import Deepen\n"
        "def mine(start: Start, *, after: int):\n"
        "    return start.schedule(FixedSteps(steps=((after, (Deepen(),)),)))\n"
        "def number(start): return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert built(use="my_schedules:mine", after=1).policy == FixedSteps(steps=((1, (Deepen(),)),))
    with pytest.raises(UserError, match="must return a GrowthSchedule, got a int"):
        built(use="my_schedules:number")


def suggesting(tmp_path, schedules=None, **suggest):
    job = job_data(tmp_path)
    job["search"] |= {"suggest": {"trials": 4} | suggest} | ({"schedules": schedules} if schedules else {})
    return parse_job(job, source="test job")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"use": "joint", "confidence": {"low": 0.5, "high": 2.0}}, "confidence: .*less than 1"),
        ({"use": "joint", "confidnce": [0.5]}, "confidnce: unknown key"),
        ({"use": "jiont"}, "did you mean 'joint'"),
    ],
)
def test_a_space_that_yields_an_illegal_schedule_is_refused_before_anything_starts(asked, words, tmp_path):
    with pytest.raises(UserError, match=words):
        rehearse_space(suggesting(tmp_path, space=asked))


def test_a_space_that_fails_is_refused_with_its_cause(tmp_path, monkeypatch):
    (tmp_path / "broken_space.py").write_text("def broken(trial):\n    return 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UserError, match="broken_space:broken failed .ZeroDivisionError"):
        rehearse_space(suggesting(tmp_path, space="broken_space:broken"))


def test_a_grid_takes_each_combination_once(tmp_path):
    mapping = {"use": "joint", "inner": ["copy", "random"], "passes": [1.0, 2.0]}
    suggester = WaveSuggester(suggesting(tmp_path, space=mapping, sampler="grid"), wave_size=4)
    found = {(a["inner"], a["passes"]) for a in (suggester.ask(n) for n in range(4))}
    assert found == {(i, p) for i in ("copy", "random") for p in (1.0, 2.0)}


@pytest.mark.parametrize(
    ("mapping", "trials", "words"),
    [
        ({"use": "joint", "passes": [1.0, 2.0]}, 3, "more than the 2 points"),
        ({"use": "joint", "confidence": {"low": 0.1, "high": 0.5}}, 1, "confidence is a range"),
        ("joint_space", 1, "not a function"),
    ],
)
def test_a_grid_that_is_none_is_refused(mapping, trials, words):
    with pytest.raises(UserError, match=words):
        sampler_of(SuggestSpec(space=mapping, trials=trials, sampler="grid"), wave_size=1)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
@pytest.mark.parametrize("objectives", [["loss"], ["loss", "flops"]])
def test_suggestions_repeat_with_their_seed(sampler, objectives, tmp_path):
    def suggested():
        job = suggesting(tmp_path, space="joint_space", sampler=sampler, objectives=objectives, seed=5)
        suggester, found = WaveSuggester(job, wave_size=2), []
        for number in range(6):
            found.append(suggester.ask(number))
            suggester.tell(number, 1.0 / (number + 1), 1e9 * number)
        return found

    assert suggested() == suggested()
    assert all(a["use"] == "joint" for a in suggested())


def test_a_space_may_name_its_draws_as_it_likes(tmp_path):
    """Ray adds draws to what a space returns; a schedule is made of the latter alone."""
    suggester = WaveSuggester(suggesting(tmp_path, space="joint_space", trials=8), wave_size=8)
    found = [suggester.ask(number) for number in range(8)]
    assert any("width_factors" in a for a in found)
    for arguments in found:
        assert "width_factor" not in arguments
        suggested_trial(suggesting(tmp_path, space="joint_space"), index=0, arguments=arguments)


def test_suggestions_are_what_the_journal_gives_back(tmp_path):
    mapping = {"use": "fixed", "steps": [{0: "width*2"}, {1: "depth*2"}]}
    arguments = WaveSuggester(suggesting(tmp_path, space=mapping), wave_size=1).ask(0)
    assert json.loads(json.dumps(arguments)) == arguments
    suggested_trial(suggesting(tmp_path, space=mapping), index=0, arguments=arguments)


def test_a_suggestion_cannot_name_its_trial(tmp_path):
    job = suggesting(tmp_path, space="joint_space")
    assert suggested_trial(job, index=3, arguments={"use": "scratch", "name": "a"}).name == "suggested-03"
    with pytest.raises(UserError, match="is one that suggested schedules get"):
        suggesting(tmp_path, space="joint_space", schedules=[{"use": "scratch", "name": "suggested-00", **SMALL}])


DIGITS = {"kind": "samples", "input_shape": [1, 8, 8], "num_classes": 10, "sizes": {"train": 837}}


@pytest.mark.parametrize("name", sorted(set(BUILDERS) - {"fixed"}))
def test_every_builder_passes_the_rehearsal_of_its_networks(name, tmp_path):
    job = small_job(tmp_path, search__schedules=[{"use": name, "name": "x", **SMALL}])
    check_networks(job, planned_trials(job), DIGITS)


def test_stacking_in_words_passes_too_but_not_with_data(tmp_path):
    job = small_job(tmp_path, search__schedules=[{"use": "fixed", "name": "x", **SMALL, "steps": {"0": "stack*2"}}])
    check_networks(job, planned_trials(job), DIGITS)
    with pytest.raises(UserError, match="plain stacking. and a data step are both due after stage 0"):
        built(use="fixed", steps={0: ["stack*2", "data@1.0"]})


BUILDERS_OF_A_USER = {
    "untyped": ("def grow(start, *, speed=1): ...", "argument 'speed' of grow has no type"),
    "variadic": ("def grow(start, **kwargs: int): ...", "argument 'kwargs' of grow has no type"),
    "by position": ("def grow(start, speed: int = 1): ...", "'speed' of grow .* cannot be given by its name"),
    "without a start": ("def grow(*, speed: int = 1): ...", "first argument of grow must be the start"),
    "failing": ("def grow(start): return {}['x']", "it failed .KeyError"),
    "another annotation": ("def grow(start, *, speed: 'Nope' = 1): ...", "cannot be read"),
    "other stages": (
        "from dataclasses import replace\n"
        "from search_spaces import scratch\n"
        "def grow(start): return replace(scratch(start), num_stages=8, shares=None)",
        "its schedule has 8 stages, search.stages says 4",
    ),
}


@pytest.mark.parametrize("case", BUILDERS_OF_A_USER)
def test_what_is_wrong_with_a_builder_of_ones_own_is_said_in_one_line(case, tmp_path, monkeypatch):
    code, message = BUILDERS_OF_A_USER[case]
    module = f"builder_{case.replace(' ', '_')}"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(UserError, match=message):
        built(use=f"{module}:grow")


def test_a_schedule_has_the_name_of_its_entry_whatever_its_builder_says(tmp_path, monkeypatch):
    (tmp_path / "renaming_builder.py").write_text(
        "from dataclasses import replace\n"
        "from search_spaces import scratch\n"
        "def grow(start): return replace(scratch(start), name='zzz')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert built(use="renaming_builder:grow").name == "mine"


def test_every_schedule_may_start_on_a_part_of_the_data():
    assert built(use="stacking", data_share=0.5).initial.data_share == 0.5
    assert built(use="stacking").initial.data_share == 1.0
    assert built(use="data_only").initial.data_share == 0.25
    assert built(use="data_only", data_share=0.5).policy.after(0) == (AddData(share=1.0),)


@pytest.mark.parametrize("stages", [0, 101, True, "x", [], [0.5, 0.6], [1.5, -0.5]])
def test_stages_are_a_number_or_shares(stages):
    with pytest.raises(ValueError, match="stages"):
        SearchSpec.model_validate({"schedules": [{"use": "scratch", "name": "x"}], "stages": stages})
