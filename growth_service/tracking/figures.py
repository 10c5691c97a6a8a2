"""Two pictures of records: gains by site and stage, and loss against compute.

What is shown is computed by :func:`site_series` and :func:`frontier_points`; the ``draw_``
functions only draw. Figures belong to their caller: nothing goes through pyplot.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from growth_service.core.frontier import SAME_COMPUTE_SHARE, frontier, outcomes
from growth_service.core.records import TrialRecord
from growth_service.core.units import format_flops
from growth_service.tracking.placing import Box, Name, elided, place_names

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

INK, QUIET, GRID = "#222222", "#777777", "#E6E6E6"
VERDICT_COLOURS = {
    "useful": "#117733",
    "undetermined": "#DDAA33",
    "no_transferable_gain": "#CC6677",
    "saturated": "#8899AA",
}
"""Colours that stay apart for people who see red and green alike (after Paul Tol's palettes)."""
TRIAL_COLOURS = (
    "#332288", "#CC6677", "#117733", "#56B4E9", "#AA4499", "#DDAA33", "#44AA99", "#882255", "#7A7A1F", "#A0522D",
)  # fmt: skip
EVENT_MARKERS = {"depth": "^", "width": "s", "stream": "P", "data": "D"}
WIDE_RANGE = 50.0
"""Ratio of largest to smallest positive value above which an axis is logarithmic."""

_MAX_PANELS = 12
_MAX_LABEL = 34
_MAX_NAMED = 12


class SitePoint(NamedTuple):
    """One candidate after one stage; gains in nats, NaN where a certificate lacks them."""

    stage: int
    label: str
    """Site or block, and whether it would grow depth or width."""
    verdict: str
    gain: float
    """Predicted; below zero where noise outweighs the signal."""
    lower: float
    upper: float
    tolerance: float
    network_verdict: str
    noise: float = math.nan
    """Gain of a score one noise standard deviation above zero: what chance alone shows."""
    is_single: bool = False
    """A probe of its own, not one stage of several."""


class FrontierPoint(NamedTuple):
    """One trial after one stage."""

    trial: str
    stage: int
    flops: float
    loss: float
    """Validation loss, nats; NaN where it was not finite."""
    axes: tuple[str, ...]
    """What grew right after the stage: ``depth``, ``width``, ``data``; nothing after the last."""
    is_end: bool
    """The trial's last stage."""
    is_unbeaten: bool
    """An end that no other end beats on loss or compute without being worse on the other."""
    cause: str
    """Why the trial ended; ``running`` where it has not."""


def site_series(record: TrialRecord) -> list[SitePoint]:
    """Every certificate of a trial, by stage, in the order of its sites.

    Empty for a trial that was not probed.
    """
    return [
        point
        for stage in record.stages
        for point in _points(
            stage.certificates, stage=stage.stage, tolerance=stage.tolerance_nats, verdict=stage.verdict or ""
        )
    ]


def series_of_report(report: dict[str, Any]) -> list[SitePoint]:
    """The certificates of one probe (``SaturationReport.to_dict()``) as one panel."""
    points = _points(report["sites"], stage=0, tolerance=report["tolerance_nats"], verdict=report["verdict"])
    return [p._replace(is_single=True) for p in points]


def _points(found: list[dict[str, Any]], *, stage: int, tolerance: float | None, verdict: str) -> list[SitePoint]:
    return [
        SitePoint(
            stage=stage,
            label=_site_label(str(c.get("site", "?")), " ".join(filter(None, (c.get("kind", "depth"), c.get("name"))))),
            verdict=str(c.get("verdict", "undetermined")),
            gain=_number(c.get("predicted_gain")),
            lower=_number(c.get("gain_lcl", c.get("predicted_gain"))),
            upper=_number(c.get("predicted_gain_ucl", c.get("predicted_gain"))),
            tolerance=_number(tolerance),
            network_verdict=verdict,
            noise=_number(c.get("noise_gain")),
        )
        for c in found
    ]


def frontier_points(trials: list[TrialRecord]) -> list[FrontierPoint]:
    """Every stage of every trial as a point, with the ends on the Pareto frontier marked.

    Failed trials are drawn but never unbeaten; trials that still run count with their last stage.
    """
    unbeaten = {o.trial for o in frontier(outcomes(trials), same_share=SAME_COMPUTE_SHARE)}
    return [
        FrontierPoint(
            trial=t.trial,
            stage=stage.stage,
            flops=float(stage.flops_total),
            loss=_number(stage.loss_val),
            axes=tuple(dict.fromkeys(step.partition("@")[0] for step in steps)),
            is_end=stage is t.stages[-1],
            is_unbeaten=stage is t.stages[-1] and t.trial in unbeaten,
            cause=t.final.cause if t.final is not None else "running",
        )
        for t in trials
        # A record names the steps at the start of its stage: where the stage before has ended.
        for stage, steps in zip(t.stages, [*(s.step for s in t.stages[1:]), []], strict=False)
    ]


def draw_sites(series: Sequence[SitePoint], *, title: str = "Predicted gain by site and stage") -> "Figure":
    """Draw one panel a stage: bars of the predicted gain, whiskers to its limits.

    Args:
        series: From :func:`site_series`; empty gives a figure that says so.
        title: Above all panels.

    Returns:
        A figure of its own. The axis is logarithmic where the gains span more than a factor of
        50; gains of zero or less are then a stub at the edge with the whisker to their upper limit. Of
        more than 12 stages, 12 are shown, the first and the last among them.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    if not series:
        return _empty(title, "no site was probed")
    stages = sorted({point.stage for point in series})
    shown = _spread(stages, _MAX_PANELS)
    if len(shown) < len(stages):
        title = f"{title} ({len(shown)} of {len(stages)} stages)"
    labels = list(dict.fromkeys(point.label for point in series))
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    width = 2.0 + 0.065 * max(map(len, labels)) + 2.6 * columns
    figure = Figure(figsize=(width, 1.3 + rows * (0.75 + 0.3 * len(labels))), dpi=120, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    limits, is_log = _gain_limits(series)
    for axes, stage in zip(grid.flat, shown, strict=False):
        _draw_panel(axes, [p for p in series if p.stage == stage], labels=labels, left=limits[0], is_log=is_log)
    first: Axes = grid.flat[0]
    if is_log:
        first.set_xscale("log")
        first.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    first.set_xlim(*limits)
    first.set_ylim(len(labels) - 0.4, -0.6)
    for axes in list(grid.flat)[len(shown) :]:
        axes.remove()
    for column in range(columns):
        lowest: Axes = grid[(len(shown) - 1 - column) // columns, column]
        lowest.tick_params(labelbottom=True)
        lowest.set_xlabel("predicted gain, nats", fontsize=9)
    figure.suptitle(title, fontsize=12, fontweight="bold", color=INK)
    beside = max(2, int(width / 1.7))
    figure.legend(handles=_site_legend(series), loc="outside lower center", ncols=beside, frameon=False, fontsize=9)
    return figure


def draw_frontier(points: Sequence[FrontierPoint], *, title: str = "Validation loss against compute") -> "Figure":
    """Draw every trial as a staircase; ring and name the ends on the Pareto frontier.

    Args:
        points: From :func:`frontier_points`; empty gives a figure that says so.
        title: Above the axes; what marks mean is added below it.

    Returns:
        A figure of its own. With more than 12 trials only those on the frontier have a colour.
    """
    from matplotlib.figure import Figure

    points = [p for p in points if p.flops > 0 and math.isfinite(p.loss)]
    if not points:
        return _empty(title, "no stage has a finite loss yet")
    figure = Figure(figsize=(10, 5.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    ends = {p.trial: p for p in points}
    unbeaten = {trial for trial, p in ends.items() if p.is_unbeaten}
    named = sorted((t for t in ends if len(ends) <= _MAX_NAMED or t in unbeaten), key=lambda t: ends[t].loss)
    colours = {t: TRIAL_COLOURS[i % len(TRIAL_COLOURS)] for i, t in enumerate(sorted(named))}
    handles = {}
    for trial, group in groupby(points, key=lambda p: p.trial):
        handles[trial] = _draw_staircase(
            axes, list(group), colour=colours.get(trial, "#BBBBBB"), is_unbeaten=trial in unbeaten
        )
    _frame_loss_axes(axes, points)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=24)
    note = f"ringed: unbeaten on loss and compute together ({len(unbeaten)} of {len(ends)} trials)"
    axes.text(0, 1.025, note, transform=axes.transAxes, fontsize=9, color=QUIET)
    figure.legend(
        *_trial_legend(named, handles, ends),
        loc="outside right upper", title="trial: loss at its compute", alignment="left", frameon=False, fontsize=9,
    )  # fmt: skip
    figure.legend(handles=_event_legend(points), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    _label_ends(figure, axes, points, colours)
    return figure


def _draw_panel(axes: "Axes", found: list[SitePoint], *, labels: list[str], left: float, is_log: bool) -> None:
    """One stage: its candidates as bars, its tolerance as a line."""
    for point in found:
        y = labels.index(point.label)
        colour = VERDICT_COLOURS.get(point.verdict, QUIET)
        start = left if is_log else 0.0
        if math.isfinite(point.gain) and (point.gain > left or not is_log):
            axes.barh(y, point.gain - start, left=start, height=0.62, color=colour, alpha=0.85, zorder=2)
        elif math.isfinite(point.gain):
            axes.barh(y, 0.012, left=0, height=0.62, color=colour, zorder=2, transform=axes.get_yaxis_transform())
        if math.isfinite(point.lower) and math.isfinite(point.upper):
            ends = [max(point.lower, left), max(point.upper, left)]
            axes.plot(ends, [y, y], color=INK, linewidth=1.1, zorder=3, solid_capstyle="butt")
            axes.plot(ends[1:], [y], color=INK, marker="|", markersize=6, linestyle="none", zorder=3)
            if point.lower > left:
                axes.plot(ends[:1], [y], color=INK, marker="|", markersize=6, linestyle="none", zorder=3)
        if math.isfinite(point.noise) and point.noise > left:
            axes.plot(
                [point.noise] * 2, [y - 0.31, y + 0.31], color=INK, linestyle=(0, (1, 1)), linewidth=1.4, zorder=4
            )
    tolerance = found[0].tolerance
    if math.isfinite(tolerance):
        axes.axvline(tolerance, color=INK, linestyle=(0, (4, 2)), linewidth=1.1, zorder=4)
    if left < 0:
        axes.axvline(0.0, color=QUIET, linewidth=0.8, zorder=1)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    verdict = found[0].network_verdict.replace("_", " ")
    what = "network" if found[0].is_single else f"stage {found[0].stage}"
    axes.set_title(what + (f": {verdict}" if verdict else ""), loc="left", fontsize=9, color=INK)
    _quiet_axes(axes, grid="x")


def _gain_limits(series: Sequence[SitePoint]) -> tuple[tuple[float, float], bool]:
    """Limits of the gain axis, and whether it is logarithmic."""
    values = [v for p in series for v in (p.gain, p.lower, p.upper, p.tolerance) if math.isfinite(v)] or [0.0]
    positive = [v for p in series for v in (p.gain, p.upper, p.tolerance) if math.isfinite(v) and v > 0]
    if positive and max(positive) > WIDE_RANGE * min(positive):
        # Gains far below the tolerance all read "nothing to gain": three decades are enough.
        return (max(min(positive) / 1.5, max(positive) / 3e3), max(positive) * 1.5), True
    low, high = min(0.0, *values), max(0.0, *values)
    pad = 0.06 * (high - low) or 1.0
    return (low - pad if low < 0 else 0.0, high + pad), False


def _site_legend(series: Sequence[SitePoint]) -> "list[Artist]":
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    present = {point.verdict for point in series}
    handles: list[Artist] = [
        Patch(color=colour, alpha=0.85, label=verdict.replace("_", " "))
        for verdict, colour in VERDICT_COLOURS.items()
        if verdict in present
    ]
    handles.append(Line2D([], [], color=INK, linewidth=1.1, marker="|", label="confidence limits"))
    if any(math.isfinite(point.noise) for point in series):
        handles.append(Line2D([], [], color=INK, linestyle=(0, (1, 1)), linewidth=1.4, label="noise floor"))
    if any(math.isfinite(point.tolerance) for point in series):
        handles.append(Line2D([], [], color=INK, linestyle=(0, (4, 2)), linewidth=1.1, label="tolerance"))
    return handles


def _draw_staircase(axes: "Axes", found: list[FrontierPoint], *, colour: str, is_unbeaten: bool) -> "Line2D":
    """One trial: its loss holds until more compute has changed it."""
    flops, losses = [p.flops for p in found], [p.loss for p in found]
    weight, alpha, level = (2.2, 1.0, 4) if is_unbeaten else (1.2, 0.75, 3)
    (line,) = axes.step(flops, losses, where="post", color=colour, linewidth=weight, alpha=alpha, zorder=level)
    for kind, marker in EVENT_MARKERS.items():
        grown = [p for p in found if kind in p.axes]
        axes.plot(
            [p.flops for p in grown], [p.loss for p in grown], marker=marker, markersize=5.5, linestyle="none",
            color=colour, markeredgecolor="white", markeredgewidth=0.7, alpha=alpha, zorder=level + 2,
        )  # fmt: skip
    end = found[-1]
    if end.is_unbeaten:
        axes.plot(end.flops, end.loss, marker="o", markersize=12, color=INK, fillstyle="none", linewidth=1.4, zorder=9)
    marker, size = ("X", 7) if end.cause == "failed" else ("o", 4.5)
    axes.plot(end.flops, end.loss, marker=marker, markersize=size, color=colour, zorder=level + 3)
    return line


def _frame_loss_axes(axes: "Axes", points: Sequence[FrontierPoint]) -> None:
    """Scales, limits with room for labels, and units that people read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    flops, losses = [p.flops for p in points], [p.loss for p in points]
    if max(flops) > WIDE_RANGE * min(flops):
        axes.set_xscale("log")
        axes.set_xlim(min(flops) / 1.4, max(flops) * 1.6)
        if max(flops) < 1e3 * min(flops):
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axes.set_xlim(0, max(flops) * 1.08)
    if min(losses) > 0 and max(losses) > WIDE_RANGE * min(losses):
        axes.set_yscale("log")
        axes.set_ylim(min(losses) / 1.5, max(losses) * 1.2)
    else:
        pad = 0.1 * (max(losses) - min(losses)) or 0.1 * abs(max(losses)) or 0.1
        axes.set_ylim(min(losses) - pad, max(losses) + pad)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_flops(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("compute so far: training, evaluation and probes", fontsize=10)
    axes.set_ylabel("validation loss, nats", fontsize=10)
    _quiet_axes(axes, grid="both")


def _trial_legend(
    named: list[str], handles: "dict[str, Line2D]", ends: dict[str, FrontierPoint]
) -> "tuple[list[Line2D], list[str]]":
    lines = [handles[trial] for trial in named]
    notes = {t: f" ({ends[t].cause})" if ends[t].cause in ("failed", "running") else "" for t in named}
    texts = [f"{elided(t, 22)}: {ends[t].loss:.3g} at {format_flops(ends[t].flops)}{notes[t]}" for t in named]
    others = [trial for trial in handles if trial not in named]
    if others:
        lines.append(handles[others[0]])
        texts.append(f"{len(others)} others")
    return lines, texts


def _event_legend(points: Sequence[FrontierPoint]) -> "list[Line2D]":
    from matplotlib.lines import Line2D

    present = {axis for p in points for axis in p.axes}
    handles = [
        Line2D([], [], color=QUIET, marker=marker, markersize=6, linestyle="none", label=f"{kind} grew")
        for kind, marker in EVENT_MARKERS.items()
        if kind in present
    ]
    handles.append(Line2D([], [], color=QUIET, marker="o", markersize=4.5, linestyle="none", label="end of a trial"))
    if any(p.cause == "failed" for p in points):
        handles.append(Line2D([], [], color=QUIET, marker="X", markersize=7, linestyle="none", label="failed"))
    ring = Line2D([], [], color=INK, marker="o", markersize=11, fillstyle="none", linestyle="none", label="unbeaten")
    return [*handles, ring]


def _label_ends(figure: "Figure", axes: "Axes", points: Sequence[FrontierPoint], colours: dict[str, str]) -> None:
    """Write the names of the ringed ends where they hide nothing, as far as there is room."""
    from matplotlib.patheffects import withStroke

    figure.draw_without_rendering()  # settles the layout, and with it where things are
    per_point = figure.dpi / 72
    ends = sorted((p for p in points if p.is_unbeaten), key=lambda p: p.flops)

    def place(p: FrontierPoint) -> tuple[float, float]:
        x, y = axes.transData.transform((p.flops, p.loss)) / per_point
        return float(x), float(y)

    texts = [elided(p.trial, 22) for p in ends]
    names = [Name(*place(p), 6.6 * len(text) + 4, 13) for p, text in zip(ends, texts, strict=True)]
    marks = [Box.around(*place(p), width=7, height=7) for p in points]
    marks += [Box.around(*place(p), width=14, height=14) for p in ends]
    frame = Box(*(float(v) / per_point for v in axes.get_window_extent().extents))
    spots = place_names(names, marks=marks, frame=frame)
    for p, text, spot in zip(ends, texts, spots, strict=True):
        colour = colours.get(p.trial, INK)
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkB": 6.5} if abs(spot[1]) > 20 else None
        label = axes.annotate(
            text, (p.flops, p.loss), spot, textcoords="offset points", ha="center", va="center",
            fontsize=9, fontweight="bold", color=colour, zorder=10, arrowprops=leader,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )  # fmt: skip
        label.set_in_layout(False)


def _quiet_axes(axes: "Axes", *, grid: Literal["x", "both"]) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(QUIET)
    axes.tick_params(color=QUIET, labelcolor=INK, labelsize=8)
    axes.grid(axis=grid, color=GRID, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)


def _empty(title: str, note: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2), dpi=120)
    figure.suptitle(title, fontsize=12, fontweight="bold", color=INK)
    figure.text(0.5, 0.4, note, ha="center", fontsize=10, color=QUIET)
    return figure


def _spread(stages: list[int], most: int) -> list[int]:
    """At most ``most`` of the stages, evenly spread, first and last included."""
    if len(stages) <= most:
        return stages
    return [stages[round(i * (len(stages) - 1) / (most - 1))] for i in range(most)]


def _site_label(site: str, kind: str) -> str:
    return f"{elided(site, _MAX_LABEL)} ({kind})"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
