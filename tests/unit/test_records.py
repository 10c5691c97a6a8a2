"""Records: the same after a trip through JSON, comparable over interruptions, named for the tracker."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth_service.core.receipts import Receipt
from growth_service.core.records import (
    FORMAT_VERSION,
    METRICS,
    FinalRecord,
    StageRecord,
    TrialRecord,
    compute_step,
    flops_reused,
)

FLOATS = st.floats(allow_nan=False)  # inf is legal for Python's JSON; NaN is unequal to itself
COUNTS = st.integers(0, 2**62)
WORDS = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(WORDS, JSON, max_size=3)
ACCOUNTS = st.fixed_dictionaries(dict.fromkeys(["total_flops", "spent_flops", "reserved_flops", "free_flops"], COUNTS))

STAGES = st.builds(
    StageRecord,
    trial=WORDS,
    stage=COUNTS,
    depth=COUNTS,
    width=COUNTS,
    params=COUNTS,
    train_samples=COUNTS,
    data_share=FLOATS,
    loss_train=FLOATS,
    loss_val=FLOATS,
    accuracy_val=FLOATS,
    flops_total=COUNTS,
    flops_probe=COUNTS,
    budget=ACCOUNTS,
    decision=OBJECTS,
    verdict=st.none() | WORDS,
    tolerance_nats=st.none() | FLOATS,
    certificates=st.lists(OBJECTS, max_size=2),
    receipts=st.lists(OBJECTS, max_size=2),
    step=st.lists(WORDS, max_size=2),
    fallback=st.booleans(),
    ledger=st.none() | OBJECTS,
    protocol=st.none() | WORDS,
    digest=WORDS,
    stage_s=FLOATS,
    overhead_s=FLOATS,
    grow_s=FLOATS,
    flops_wasted=COUNTS,
    attempt=COUNTS,
)
FINALS = st.builds(
    FinalRecord,
    trial=WORDS,
    cause=WORDS,
    reason=WORDS,
    num_stages=COUNTS,
    loss_val=FLOATS,
    accuracy_val=FLOATS,
    loss_test=FLOATS,
    accuracy_test=FLOATS,
    flops_total=COUNTS,
    budget=ACCOUNTS,
    digest=WORDS,
    flops_wasted=COUNTS,
)
TRIALS = st.builds(
    TrialRecord,
    trial=WORDS,
    schedule=OBJECTS,
    seed=COUNTS,
    stages=st.lists(STAGES, max_size=2).map(tuple),
    final=st.none() | FINALS,
)
RECEIPTS = st.builds(
    Receipt,
    kind=st.sampled_from(["insert", "widen", "jumpboard"]),
    path=WORDS,
    block=OBJECTS,
    parameters=st.lists(WORDS, max_size=3).map(tuple),
    parameters_added=COUNTS,
    output_change=st.none() | FLOATS,
)


def through_json(data):
    return json.loads(json.dumps(data))


def stage_record(**changes):
    plain = StageRecord(
        trial="t0",
        stage=1,
        depth=3,
        width=24,
        params=1234,
        train_samples=418,
        data_share=0.5,
        loss_train=0.25,
        loss_val=0.5,
        accuracy_val=0.75,
        flops_total=2_500_000,
        flops_probe=400_000,
        budget={"total_flops": 10, "spent_flops": 4, "reserved_flops": 0, "free_flops": 6},
        decision={"kind": "train_on", "reason": "as asked"},
        stage_s=1.5,
        overhead_s=0.5,
        grow_s=0.25,
        flops_wasted=7,
        attempt=2,
    )
    return replace(plain, **changes)


def final_record(**changes):
    plain = FinalRecord(
        trial="t0",
        cause="schedule",
        reason="all 2 stages are trained",
        num_stages=2,
        loss_val=0.5,
        accuracy_val=0.75,
        loss_test=0.625,
        accuracy_test=0.7,
        flops_total=2_500_000,
        budget={"total_flops": 10, "spent_flops": 4, "reserved_flops": 0, "free_flops": 6},
        digest="ab",
        flops_wasted=7,
    )
    return replace(plain, **changes)


def certificate(**changes):
    return {
        "kappa": 1.0,
        "kappa_ucl": 2.0,
        "s": 0.1,
        "ag_max": 3.0,
        "realizable_share": 0.2,
        "eta": 0.4,
        "verdict": "undetermined",
    } | changes


@given(STAGES)
def test_a_stage_record_survives_json(record):
    assert StageRecord.from_dict(through_json(record.to_dict())) == record


@given(FINALS)
def test_a_final_record_survives_json(record):
    assert FinalRecord.from_dict(through_json(record.to_dict())) == record


@given(TRIALS)
def test_a_trial_record_survives_json(record):
    assert TrialRecord.from_dict(through_json(record.to_dict())) == record


@given(RECEIPTS)
def test_a_receipt_survives_json(receipt):
    assert Receipt.from_dict(through_json(receipt.to_dict())) == receipt


@given(TRIALS)
def test_the_dict_of_a_trial_record_is_plain_json(record):
    assert through_json(record.to_dict()) == record.to_dict()


@given(RECEIPTS)
def test_the_dict_of_a_receipt_is_plain_json(receipt):
    assert through_json(receipt.to_dict()) == receipt.to_dict()


def test_a_dict_of_a_record_shares_nothing_with_it():
    record = stage_record(certificates=[certificate()])
    record.to_dict()["certificates"][0]["kappa"] = -1.0
    assert record.certificates == [certificate()]


def test_a_stored_trial_names_its_format():
    assert (
        TrialRecord(trial="t", schedule={}, seed=0, stages=(), final=None).to_dict()["format_version"] == FORMAT_VERSION
    )


def test_a_trial_of_an_unknown_format_is_refused():
    stored = TrialRecord(trial="t", schedule={}, seed=0, stages=(), final=None).to_dict()
    with pytest.raises(Exception, match="format"):
        TrialRecord.from_dict(stored | {"format_version": FORMAT_VERSION + 1})


@pytest.mark.parametrize(
    "changes", [{"stage_s": 9.0}, {"overhead_s": 9.0}, {"grow_s": 9.0}, {"flops_wasted": 9}, {"attempt": 9}]
)
def test_time_waste_and_attempts_do_not_make_stage_records_unequal(changes):
    assert stage_record(**changes).comparable() == stage_record().comparable()


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_val": 0.1},
        {"flops_total": 1},
        {"digest": "x"},
        {"decision": {}},
        {"budget": {}},
        {"protocol": "p"},
        {"fallback": True},
    ],
)
def test_any_other_difference_makes_stage_records_unequal(changes):
    assert stage_record(**changes).comparable() != stage_record().comparable()


def test_waste_does_not_make_final_records_unequal():
    assert final_record(flops_wasted=0).comparable() == final_record().comparable()


@pytest.mark.parametrize("changes", [{"loss_test": 0.1}, {"cause": "budget"}, {"digest": "x"}, {"flops_total": 1}])
def test_any_other_difference_makes_final_records_unequal(changes):
    assert final_record(**changes).comparable() != final_record().comparable()


def test_a_stage_without_a_probe_has_the_metrics_of_training_alone():
    assert stage_record().metrics() == {
        "loss/train_nats": 0.25,
        "loss/val_nats": 0.5,
        "accuracy/val": 0.75,
        "arch/depth": 3.0,
        "arch/width": 24.0,
        "arch/params": 1234.0,
        "data/train_samples": 418.0,
        "compute/flops_total": 2_500_000.0,
        "compute/flops_probe": 400_000.0,
        "compute/flops_wasted": 7.0,
        "time/stage_s": 1.5,
        "time/overhead_s": 0.5,
        "time/grow_s": 0.25,
    }


def test_signal_metrics_are_the_largest_over_the_candidates():
    sites = [
        certificate(),
        certificate(kappa=5.0, s=-0.1, realizable_share=0.9, verdict="useful"),
        certificate(kappa_ucl=7.0, ag_max=1.0, eta=0.5),
    ]
    found = {k: v for k, v in stage_record(certificates=sites).metrics().items() if k.startswith("signal/")}
    assert found == {
        "signal/kappa_max": 5.0,
        "signal/kappa_ucl": 7.0,
        "signal/s_max": 0.1,
        "signal/ag_max": 3.0,
        "signal/realizable_share": 0.9,
        "signal/eta": 0.5,
        "signal/undetermined_sites": 2.0,
    }


def test_a_ledger_gives_its_three_terms_as_metrics():
    ledger = {"delta_r": 1.0, "delta_erm": 2.0, "gamma": 3.0, "residual": 0.0}
    found = stage_record(ledger=ledger).metrics()
    assert {k: v for k, v in found.items() if k.startswith("ledger/")} == {
        "ledger/delta_r": 1.0,
        "ledger/delta_erm": 2.0,
        "ledger/gamma": 3.0,
    }


def test_a_full_trial_writes_exactly_the_listed_metrics():
    full = stage_record(certificates=[certificate()], ledger={"delta_r": 1.0, "delta_erm": 2.0, "gamma": 3.0})
    assert set(full.metrics()) | set(final_record().metrics()) == set(METRICS)


def test_metrics_are_floats_for_the_tracker():
    assert all(type(value) is float for value in stage_record(certificates=[certificate()]).metrics().values())


def test_the_end_of_a_trial_has_the_two_test_metrics():
    assert final_record().metrics() == {"loss/test_nats": 0.625, "accuracy/test": 0.7}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_test_metrics_of_a_failed_trial_are_left_out(value):
    assert final_record(loss_test=value, accuracy_test=value).metrics() == {}


def test_events_are_the_grow_steps_of_all_stages_in_order():
    stages = (stage_record(), stage_record(step=["depth@a", "data@0.50"]), stage_record(step=["width@b+8"]))
    trial = TrialRecord(trial="t", schedule={}, seed=0, stages=stages, final=None)
    assert trial.events == ["depth@a", "data@0.50", "width@b+8"]


@pytest.mark.parametrize(
    ("flops", "previous", "step"),
    [(0, -1, 0), (1, -1, 1), (1_000_000, 0, 1), (1_000_001, 0, 2), (1_000_001, 2, 3), (5_000_000, 9, 10)],
)
def test_a_step_is_megaflops_rounded_up_and_above_the_one_before(flops, previous, step):
    assert compute_step(flops, previous) == step


@given(st.lists(COUNTS, min_size=1, max_size=20))
def test_steps_are_strictly_increasing_and_never_below_the_compute(spent):
    steps, previous = [], -1
    for flops in sorted(spent):
        previous = compute_step(flops, previous)
        assert previous * 1_000_000 >= flops
        steps.append(previous)
    assert steps == sorted(set(steps))


def test_reused_compute_is_that_of_the_stages_that_were_taken_over():
    spent = (100, 250, 700)
    stages = [stage_record(stage=i, flops_total=f, reused=i != 1) for i, f in enumerate(spent)]
    assert flops_reused(stages) == 100 + 450
    assert flops_reused([]) == 0
