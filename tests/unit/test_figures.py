"""What the two pictures show: computed values first, then that drawing them hides nothing."""

import io
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from growth_service.core.records import TrialRecord
from growth_service.tracking.figures import (
    VERDICT_COLOURS,
    draw_frontier,
    draw_sites,
    frontier_points,
    series_of_report,
    site_series,
)
from growth_service.tracking.placing import Box, Name, place_names
from tests.factories import SITES, certificate, final_record, stage_record, study_records, trial_record


def texts(figure: Any) -> list[str]:
    """Every text that the figure shows."""
    found = [t.get_text() for t in figure.findobj(lambda a: hasattr(a, "get_text") and a.get_visible())]
    return list(dict.fromkeys(text for text in found if text))


def rendered(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def trial(name: str, *points: tuple[int, float], cause: str = "schedule") -> TrialRecord:
    """A trial with these (FLOPs, validation loss)."""
    stages = tuple(
        stage_record(s, trial=name, flops=flops, loss_val=loss, step=["data@0.50", "depth@x"] if s else [])
        for s, (flops, loss) in enumerate(points)
    )
    return replace(trial_record(name, stages=stages), final=final_record(stages, trial=name, cause=cause))


# Sites


def test_the_series_has_every_certificate_in_order() -> None:
    found = site_series(trial_record(num_stages=2))

    assert [p.stage for p in found] == [0] * 4 + [1] * 4
    assert [p.label for p in found[:4]] == [f"{site} (depth)" for site in SITES]
    assert found[0][2:7] == ("useful", 0.3, 0.3 - 0.02, 0.3 + 0.02, 0.02)


def test_a_certificate_that_lacks_figures_has_nan_where_they_are_missing() -> None:
    bare = {"site": "blocks.3", "kind": "width", "predicted_gain": 0.5}
    stages = (stage_record(certificates=[certificate()], tolerance_nats=None),)
    stages = (replace(stages[0], certificates=[bare, {"site": "blocks.4"}]),)
    first, second = site_series(trial_record(stages=stages))

    assert (first.label, first.lower, first.upper, first.verdict) == ("blocks.3 (width)", 0.5, 0.5, "undetermined")
    assert math.isnan(first.tolerance)
    assert math.isnan(second.gain)
    assert rendered(draw_sites([first, second]))


def test_a_trial_that_was_not_probed_gives_a_figure_that_says_so() -> None:
    bare = trial_record(stages=(stage_record(certificates=[]),))

    assert site_series(bare) == []
    assert "no site was probed" in texts(draw_sites(site_series(bare)))


def test_there_is_a_panel_for_each_stage_and_it_states_the_verdict() -> None:
    figure = draw_sites(site_series(trial_record(num_stages=5)))

    assert [axes.get_title(loc="left") for axes in figure.axes] == [f"stage {s}: undetermined" for s in range(5)]


def test_of_many_stages_twelve_are_shown_first_and_last_among_them() -> None:
    figure = draw_sites(site_series(trial_record(num_stages=30)), title="t00")

    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert (len(titles), titles[0], titles[-1]) == (12, "stage 0: undetermined", "stage 29: undetermined")
    assert "t00 (12 of 30 stages)" in texts(figure)


@pytest.mark.parametrize(("gains", "scale"), [((0.1, 0.02), "linear"), ((0.9, 0.001), "log")])
def test_the_gain_axis_is_logarithmic_only_over_a_wide_range(gains: tuple[float, ...], scale: str) -> None:
    found = [certificate(s, gain=g, half_width=g / 10) for s, g in zip(SITES, gains, strict=False)]
    figure = draw_sites(site_series(trial_record(stages=(stage_record(certificates=found),))))

    assert figure.axes[0].get_xscale() == scale


@pytest.mark.parametrize("gain", [-0.004, 0.0, math.inf, -math.inf, math.nan])
def test_every_gain_can_be_drawn_on_either_axis(gain: float) -> None:
    for others in (0.01, 5.0):
        found = [certificate(gain=gain), certificate(SITES[1], gain=others), certificate(SITES[2], gain=0.01)]
        assert rendered(draw_sites(site_series(trial_record(stages=(stage_record(certificates=found),)))))


def test_bars_have_the_colour_of_their_verdict_and_reach_their_gain() -> None:
    from matplotlib.colors import to_hex

    found = [certificate(s, gain=g) for s, g in zip(SITES, (0.2, 0.03, 0.01), strict=False)]
    found[2] |= {"gain_lcl": 0.005, "predicted_gain_ucl": 0.015, "verdict": "saturated"}
    figure = draw_sites(site_series(trial_record(stages=(stage_record(certificates=found),))))

    bars = figure.axes[0].patches
    assert [bar.get_width() for bar in bars] == pytest.approx([0.2, 0.03, 0.01])
    wanted = [VERDICT_COLOURS[v].lower() for v in ("useful", "undetermined", "saturated")]
    assert [to_hex(bar.get_facecolor()) for bar in bars] == wanted
    assert {"useful", "undetermined", "saturated", "tolerance"} <= set(texts(figure))


def test_a_path_that_is_too_long_keeps_both_ends() -> None:
    path = "backbone.encoder.layers.11.attention.output.dense.grown.4"
    (point,) = site_series(trial_record(stages=(stage_record(certificates=[certificate(path)]),)))

    assert point.label.startswith("backbone")
    assert point.label.endswith("grown.4 (depth)")
    assert len(point.label) < 45


# Frontier


def test_the_unbeaten_ends_are_those_of_the_frontier() -> None:
    trials = [
        trial("cheap", (10, 2.0), (20, 1.0)),
        trial("beaten", (10, 2.0), (40, 1.1)),
        trial("good", (30, 0.9), (90, 0.5)),
    ]
    points = frontier_points(trials)

    assert {p.trial for p in points if p.is_unbeaten} == {"cheap", "good"}
    assert all(p.is_end for p in points if p.is_unbeaten)
    assert [(p.flops, p.loss) for p in points if p.trial == "good"] == [(30, 0.9), (90, 0.5)]


def test_what_grew_is_marked_where_the_stage_before_ended() -> None:
    points = frontier_points([trial("t", (10, 2.0), (20, 1.0), (30, 0.8))])

    assert [p.axes for p in points] == [("data", "depth"), ("data", "depth"), ()]


def test_a_failed_trial_is_drawn_but_beats_nobody() -> None:
    trials = [trial("failed", (10, 0.1), cause="failed"), trial("sound", (20, 0.5))]

    assert {p.trial for p in frontier_points(trials) if p.is_unbeaten} == {"sound"}
    shown = texts(draw_frontier(frontier_points(trials)))
    assert any(text.startswith("failed: 0.1 at 10 FLOP (failed)") for text in shown)


def test_a_trial_that_still_runs_counts_with_its_last_stage() -> None:
    points = frontier_points([trial_record(cause=None), trial_record("t01", num_stages=0, cause=None)])

    assert [p.is_unbeaten for p in points] == [False, False, True]
    assert points[-1].cause == "running"


@pytest.mark.parametrize("losses", [(math.nan,), (1.0, math.nan), (math.inf, 1.0), (0.0,), (-0.5, 3.0)])
def test_losses_of_every_kind_can_be_drawn(losses: tuple[float, ...]) -> None:
    points = [(10 * (i + 1), loss) for i, loss in enumerate(losses)]

    assert rendered(draw_frontier(frontier_points([trial("t", *points)])))


def test_nothing_finite_gives_a_figure_that_says_so() -> None:
    assert "no stage has a finite loss yet" in texts(draw_frontier([]))
    assert "no stage has a finite loss yet" in texts(draw_frontier(frontier_points([trial("t", (1, math.nan))])))


def test_every_unbeaten_end_is_named_beside_it_and_every_trial_in_the_legend() -> None:
    trials = study_records()
    points = frontier_points(trials)
    shown = texts(draw_frontier(points))

    for p in points:
        assert not p.is_unbeaten or p.trial in shown
    assert all(any(text.startswith(f"{t.trial}: ") for text in shown) for t in trials)
    assert {"depth grew", "width grew", "data grew", "unbeaten", "failed"} <= set(shown)


def test_of_many_trials_only_the_unbeaten_are_named() -> None:
    points = frontier_points(study_records(num_trials=30))
    num_unbeaten = len({p.trial for p in points if p.is_unbeaten})
    shown = texts(draw_frontier(points))

    assert sum(text.startswith("t") and ": 0." in text for text in shown) == num_unbeaten
    assert f"{30 - num_unbeaten} others" in shown


def test_names_of_unbeaten_ends_do_not_cover_each_other() -> None:
    trials = [trial(f"schedule-{i}", (10_000_000 + i * 200_000, 1.0 - i * 0.004)) for i in range(5)]
    trials.append(trial("start", (1_000_000, 3.0)))
    figure = draw_frontier(frontier_points(trials))
    rendered(figure)

    renderer = FigureCanvasAgg(figure).get_renderer()
    labels = [a for a in figure.axes[0].texts if a.get_text().startswith("schedule")]
    boxes = [Text.get_window_extent(label, renderer) for label in labels]  # without the leader line
    assert len(boxes) == 5
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_name_goes_below_its_point_where_nothing_is_in_the_way() -> None:
    frame = Box(0, 0, 200, 200)

    assert place_names([Name(100, 100, 40, 12)], marks=[], frame=frame) == [(0, -15)]
    assert place_names([Name(100, 8, 40, 12)], marks=[], frame=frame) == [(-28, 0)], "no room below"
    assert place_names([Name(5, 8, 40, 12)], marks=[], frame=frame) == [(28, 0)], "nor to the left"
    blocked = [Box(90, 80, 110, 90)]
    assert place_names([Name(100, 100, 40, 12)], marks=blocked, frame=frame) == [(-28, 0)]


def test_names_keep_apart_however_close_their_points_are() -> None:
    names = [Name(100 + i, 100, 60, 12) for i in range(12)]
    spots = place_names(names, marks=[], frame=Box(0, 0, 200, 200))

    boxes = [Box.around(n.x + dx, n.y + dy, width=60, height=12) for n, (dx, dy) in zip(names, spots, strict=True)]
    assert not any(box.hits(boxes[:i]) for i, box in enumerate(boxes))
    assert all(box.is_inside(Box(0, 0, 200, 200)) for box in boxes)


@pytest.mark.parametrize(("last", "scale"), [(400_000, "linear"), (60_000_000, "log")])
def test_the_compute_axis_is_logarithmic_only_over_a_wide_range(last: int, scale: str) -> None:
    figure = draw_frontier(frontier_points([trial("t", (100_000, 1.0), (last, 0.5))]))

    assert figure.axes[0].get_xscale() == scale


def test_the_package_loads_neither_mlflow_nor_matplotlib() -> None:
    code = (
        "import sys, growth_service.tracking.figures, growth_service.tracking.memory, "
        "growth_service.tracking.mlflow_reader, growth_service.tracking.mlflow_writer\n"
        "sys.exit(str({'mlflow', 'matplotlib'} & set(sys.modules)) if {'mlflow', 'matplotlib'} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")


def test_figures_leave_the_global_state_of_matplotlib_alone() -> None:
    rendered(draw_frontier(frontier_points([trial_record()])))

    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_the_picture_of_a_probe_shows_the_noise_floor_of_every_candidate_and_tells_several_apart():
    site = {
        "site": "layer1.0", "kind": "depth", "verdict": "useful", "predicted_gain": 0.5, "gain_lcl": 0.3,
        "predicted_gain_ucl": 0.7, "noise_gain": 0.1,
    }  # fmt: skip
    report = {
        "sites": [site | {"name": "copy"}, site | {"name": "random", "noise_gain": 0.2}], "tolerance_nats": 0.05,
        "verdict": "useful",
    }  # fmt: skip
    points = series_of_report(report)
    assert [p.label for p in points] == ["layer1.0 (depth copy)", "layer1.0 (depth random)"]
    figure = draw_sites(points)
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "network: useful"
    upright = [line for line in axes.lines if len(set(line.get_xdata())) == 1 and line.get_linestyle() == "--"]
    floors = [line.get_xdata()[0] for line in upright]
    assert floors == [0.1, 0.2, 0.05]  # and the tolerance
    assert "noise floor" in [text.get_text() for text in figure.legends[0].get_texts()]
