"""Quantities: what people write in jobs and on the command line, and what they get to read."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth_service.core.units import UNITS, format_flops, format_seconds, parse_quantity
from growth_service.errors import UserError

DIMENSIONS = sorted(UNITS)


@pytest.mark.parametrize(
    ("text", "dimension", "amount"),
    [
        ("2e15", "flops", 2e15),  # YAML 1.1 reads this as a string
        (2e15, "flops", 2e15),
        (7, "flops", 7.0),
        ("3 PFLOP", "flops", 3e15),
        ("3PFLOP", "flops", 3e15),
        ("1.5e3 GFLOP", "flops", 1.5e12),
        ("2EFLOP", "flops", 2e18),
        ("4 ZFLOP", "flops", 4e21),
        ("5 TFLOP", "flops", 5e12),
        ("5 MFLOP", "flops", 5e6),
        ("5 kFLOP", "flops", 5e3),
        ("5 FLOP", "flops", 5.0),
        ("90 min", "seconds", 5400.0),
        ("45 s", "seconds", 45.0),
        ("1.5 h", "seconds", 5400.0),
        ("2 d", "seconds", 172800.0),
        ("64 GiB", "bytes", 64 * 2**30),
        ("64 GB", "bytes", 64e9),
        ("1 kB", "bytes", 1000.0),
        ("1 KiB", "bytes", 1024.0),
        ("3 MiB", "bytes", 3 * 2**20),
        ("2 TiB", "bytes", 2 * 2**40),
        ("0.01 nats", "nats", 0.01),
        (".5 nat", "nats", 0.5),
        ("  2. min  ", "seconds", 120.0),
        ("+3", "bytes", 3.0),
    ],
)
def test_a_quantity_is_read_in_the_base_unit_of_its_dimension(text, dimension, amount):
    assert parse_quantity(text, dimension=dimension) == pytest.approx(amount, rel=1e-15)


@pytest.mark.parametrize("value", ["0", "-3 PFLOP", "1e400", 0, 0.0, -1, math.nan, math.inf, -math.inf, "1e-400"])
def test_an_amount_must_be_finite_and_above_zero(value):
    with pytest.raises(UserError, match=r"must be a finite amount above zero \(in FLOP or one of FLOP, kFLOP"):
        parse_quantity(value, dimension="flops")


@pytest.mark.parametrize(
    "text", ["", "PFLOP", "nan", "inf", "three PFLOP", "3,5 PFLOP", "3 P FLOP", "1 h 30 min", "1e", "1_0"]
)
def test_a_text_that_is_no_quantity_is_refused_with_an_example(text):
    known = r"(is not a quantity in flops: write a number and a unit, for example '20 GFLOP'|is unknown for flops)"
    with pytest.raises(UserError, match=known):
        parse_quantity(text, dimension="flops")


def test_an_unknown_unit_is_refused_with_the_allowed_ones():
    with pytest.raises(UserError, match=r"unit 'hours' in '3 hours' is unknown for seconds: use one of s, min, h, d$"):
        parse_quantity("3 hours", dimension="seconds")


def test_a_unit_of_another_dimension_is_refused():
    with pytest.raises(UserError, match=r"unit 'GiB' in '64 GiB' is unknown for seconds"):
        parse_quantity("64 GiB", dimension="seconds")


def test_the_case_of_a_unit_matters():
    with pytest.raises(UserError, match=r"unit 'pflop' .* use one of FLOP, kFLOP, MFLOP, GFLOP, TFLOP, PFLOP"):
        parse_quantity("3 pflop", dimension="flops")


def test_a_bad_quantity_ends_the_command_line_with_exit_code_2():
    with pytest.raises(UserError) as caught:
        parse_quantity("x", dimension="bytes")
    assert caught.value.exit_code == 2


def test_an_integer_beyond_all_floats_is_the_users_error():
    with pytest.raises(UserError, match="finite amount above zero"):
        parse_quantity(10**400, dimension="flops")


@given(st.sampled_from(DIMENSIONS), st.data(), st.floats(1e-6, 1e6))
def test_each_unit_is_its_multiple_of_the_base_unit(dimension, data, number):
    unit, factor = data.draw(st.sampled_from(sorted(UNITS[dimension].items())))
    assert parse_quantity(f"{number!r} {unit}", dimension=dimension) == number * factor


@given(st.sampled_from(DIMENSIONS), st.floats(5e-324, 1.7e308))
def test_a_bare_number_and_its_text_are_the_same_quantity(dimension, number):
    assert parse_quantity(repr(number), dimension=dimension) == parse_quantity(number, dimension=dimension) == number


@given(st.sampled_from(DIMENSIONS), st.text(max_size=12))
def test_any_text_gives_a_positive_number_or_a_user_error(dimension, text):
    try:
        amount = parse_quantity(text, dimension=dimension)
    except UserError:
        return
    assert 0 < amount < math.inf


@given(st.floats(1e-3, 1e24))
def test_formatted_flops_are_read_back_to_three_digits(flops):
    # Three significant digits: the last one is off by at most half a unit in the third place.
    assert parse_quantity(format_flops(flops), dimension="flops") == pytest.approx(flops, rel=5e-3)


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (12.345e9, "12.3 GFLOP"),
        (1e15, "1 PFLOP"),
        (999, "999 FLOP"),
        (1000, "1 kFLOP"),
        (2.5e21, "2.5 ZFLOP"),
        (0, "0 FLOP"),
        (-3e6, "-3 MFLOP"),
    ],
)
def test_flops_are_written_with_the_largest_prefix_that_fits(flops, text):
    assert format_flops(flops) == text


@pytest.mark.parametrize(("flops", "text"), [(999_999_999, "1 GFLOP"), (999.6, "1 kFLOP")])
def test_flops_that_round_up_to_the_next_prefix_take_it(flops, text):
    assert format_flops(flops) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (48.2, "48 s"),
        (99, "99 s"),
        (100, "1 min 40 s"),
        (185, "3 min 05 s"),
        (3599, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7859, "2 h 10 min"),
        (360000, "100 h 00 min"),
    ],
)
def test_a_duration_is_written_in_two_units_at_most(seconds, text):
    assert format_seconds(seconds) == text
