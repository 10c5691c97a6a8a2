"""The split of a validation-loss change is exact, and each term is what it is named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth_service.core.ledger import Ledger

LOSSES = st.floats(0.0, 20.0)
LEDGERS = st.builds(
    Ledger,
    step=st.text(max_size=10),
    old_train=LOSSES,
    old_val=LOSSES,
    jumpboard_train=LOSSES,
    jumpboard_val=LOSSES,
    new_train=LOSSES,
    new_val=LOSSES,
    fallback=st.booleans(),
)
# Losses in eighths, so that all terms are exact.
STEP = Ledger(
    step="depth@stem",
    old_train=2.0,
    old_val=2.5,
    jumpboard_train=1.75,
    jumpboard_val=2.375,
    new_train=1.0,
    new_val=2.125,
    fallback=False,
)


@given(LEDGERS)
def test_the_three_terms_add_up_to_the_change_of_validation_loss(ledger):
    # Ten operations on numbers below 40: rounding is below 10 * 40 * 2^-53.
    change = ledger.old_val - ledger.new_val
    assert ledger.delta_r + ledger.delta_erm - ledger.gamma == pytest.approx(change, abs=1e-13)


@given(LEDGERS)
def test_the_residual_is_rounding(ledger):
    assert abs(ledger.residual) < 1e-13


def test_the_margin_is_what_the_jumpboard_gained_on_validation():
    assert STEP.delta_r == 0.125


def test_the_training_term_is_what_training_gained_from_the_jumpboard_on():
    assert STEP.delta_erm == 0.75


def test_gamma_is_the_growth_of_the_gap_from_the_jumpboard_on():
    assert STEP.gamma == (2.125 - 1.0) - (2.375 - 1.75) == 0.5


def test_exact_losses_leave_no_residual():
    assert STEP.residual == 0.0


@given(LEDGERS, st.floats(-1.0, 1.0))
def test_the_terms_do_not_depend_on_the_old_training_loss(ledger, shift):
    moved = Ledger.from_dict(ledger.to_dict() | {"old_train": ledger.old_train + shift})
    assert (moved.delta_r, moved.delta_erm, moved.gamma) == (ledger.delta_r, ledger.delta_erm, ledger.gamma)


@given(LOSSES, LOSSES)
def test_a_step_that_was_taken_back_has_terms_of_zero(train, val):
    same = {
        f"{net}_{split}": loss
        for net in ("old", "jumpboard", "new")
        for split, loss in (("train", train), ("val", val))
    }
    ledger = Ledger(step="s", fallback=True, **same)
    assert (ledger.delta_r, ledger.delta_erm, ledger.gamma, ledger.residual) == (0.0, 0.0, 0.0, 0.0)


@given(LEDGERS)
def test_a_ledger_survives_json(ledger):
    assert Ledger.from_dict(json.loads(json.dumps(ledger.to_dict()))) == ledger


def test_the_dict_of_a_ledger_holds_losses_terms_and_residual():
    assert STEP.to_dict() == {
        "step": "depth@stem",
        "old_train": 2.0,
        "old_val": 2.5,
        "jumpboard_train": 1.75,
        "jumpboard_val": 2.375,
        "new_train": 1.0,
        "new_val": 2.125,
        "fallback": False,
        "delta_r": 0.125,
        "delta_erm": 0.75,
        "gamma": 0.5,
        "residual": 0.0,
    }
