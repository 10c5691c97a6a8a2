"""The learning rate over a trial: shapes, warm-ups, and what of a budget it depends on."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth_service.core.rates import Window, decaying_window, rate_share
from growth_service.errors import UserError

WHOLE = Window(0.0, 1.0)


def share(progress, *, shape="wsd", window=WHOLE, warmup=0.0, floor=0.1, decay=0.2, warm=False):
    return rate_share(
        progress, shape=shape, window=window, warmup_share=warmup, floor_share=floor, decay_share=decay, warm=warm
    )


@pytest.mark.parametrize(
    ("progress", "rate"),
    [
        (0.0, 0.1),  # the floor
        (0.1, 0.55),  # half way up: (0.1 + 1) / 2
        (0.2, 1.0),  # the peak, where the warm-up ends
        (0.4, 0.1 + 0.9 * (2 + math.sqrt(2)) / 4),  # a quarter down: (1 + cos(pi / 4)) / 2
        (0.6, 0.55),  # half way down
        (1.0, 0.1),  # the floor again
    ],
)
def test_a_restart_warms_up_in_a_line_and_comes_down_in_half_a_cosine(progress, rate):
    found = share(progress, shape="restarts", warmup=0.2, warm=True)
    assert found == pytest.approx(rate, rel=1e-12)


def test_a_restart_without_warm_up_begins_at_its_peak():
    assert share(0.0, shape="restarts", warmup=0.2, warm=False) == 1.0


@pytest.mark.parametrize(
    ("progress", "rate"), [(0.0, 1.0), (0.5, 1.0), (0.8, 1.0), (0.9, 0.55), (0.95, 0.325), (1.0, 0.1)]
)
def test_a_steady_rate_decays_in_a_line_over_the_last_share_of_the_budget(progress, rate):
    assert share(progress) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(("progress", "rate"), [(0.0, 1.0), (0.5, 0.55), (1.0, 0.1)])
def test_one_cosine_covers_the_whole_budget(progress, rate):
    assert share(progress, shape="cosine") == pytest.approx(rate, rel=1e-12)


@given(st.sampled_from(["wsd", "cosine"]), st.lists(st.floats(0.01, 1), min_size=1, max_size=6), st.floats(0, 1))
def test_stages_cut_the_rate_of_a_trial_and_do_not_change_it(shape, parts, at):
    """The same moment of the budget has the same rate, however the budget is cut into stages."""
    total, start = sum(parts), 0.0
    for part in parts:
        window = Window(start, start + part / total)
        moment = window.start + at * (window.end - window.start)
        assert share(at, shape=shape, window=window) == pytest.approx(share(moment, shape=shape), rel=1e-9)
        start = window.end


@pytest.mark.parametrize("shape", ["restarts", "wsd", "cosine"])
@given(st.floats(0, 1), st.booleans())
def test_a_rate_is_between_its_floor_and_its_peak(shape, progress, warm):
    assert 0.1 - 1e-12 <= share(progress, shape=shape, warmup=0.3, warm=warm) <= 1 + 1e-12


def test_a_warm_up_starts_at_the_floor():
    assert share(0.0, warmup=0.3, warm=True) == pytest.approx(0.1)
    assert share(0.15, warmup=0.3, warm=True) == pytest.approx(0.55)


def test_stages_before_the_decay_do_not_depend_on_the_budget():
    assert decaying_window("wsd", Window(0.3, 0.8), decay_share=0.2) == []
    assert decaying_window("wsd", Window(0.3, 0.81), decay_share=0.2) == [0.3, 0.81]
    assert decaying_window("restarts", WHOLE, decay_share=0.2) == []
    assert decaying_window("cosine", Window(0.0, 0.1), decay_share=0.2) == [0.0, 0.1]


def test_an_unknown_shape_is_refused():
    with pytest.raises(UserError, match="restarts, wsd or cosine"):
        share(0.5, shape="linear")
