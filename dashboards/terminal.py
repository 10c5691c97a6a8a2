"""Tables of a study for a terminal, drawn from records."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from growth_service.core.frontier import Outcome, Preference
from growth_service.core.records import StageRecord, TrialRecord
from growth_service.core.units import format_flops, format_seconds

VERDICT_STYLE = {
    "useful": "green",
    "saturated": "blue",
    "no_transferable_gain": "magenta",
    "undetermined": "yellow",
}


def live_table(rows: list[tuple[str, StageRecord | None, str]], *, budget_flops: float, num_stages: int) -> Table:
    """One line a trial while a study runs.

    Args:
        rows: Trial, its last record, and its state in a word.
        budget_flops: Of a trial.
        num_stages: Of a trial.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    for name, justify in (
        ("trial", "left"),
        ("stage", "right"),
        ("depth", "right"),
        ("width", "right"),
        ("data", "right"),
        ("val loss", "right"),
        ("gain", "right"),
        ("verdict", "left"),
        ("FLOPs of budget", "right"),
        ("now", "left"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for trial, record, state in rows:
        if record is None:
            table.add_row(trial, f"0/{num_stages}", "", "", "", "", "", "", "", state)
            continue
        table.add_row(
            trial,
            f"{record.stage + 1}/{num_stages}",
            str(record.depth),
            str(record.width),
            str(record.train_samples),
            f"{record.loss_val:.4f}",
            _gain(record),
            verdict_text(record.verdict),
            f"{format_flops(record.flops_total)} ({record.flops_total / budget_flops:.0%})",
            state,
        )
    return table


def stage_line(record: StageRecord, *, num_stages: int) -> str:
    """One stage as a line of log, where no live table can be drawn."""
    grown = f"  after {', '.join(record.step)}" if record.step else ""
    grown += "  (taken over)" if record.reused else ""
    return (
        f"{record.trial:<16} stage {record.stage + 1}/{num_stages}  depth {record.depth} width {record.width} "
        f"data {record.train_samples}  val {record.loss_val:.4f}  {format_flops(record.flops_total)}  "
        f"{record.verdict or '-'}{grown}"
    )


def final_table(trials: list[TrialRecord], frontier: list[Outcome], *, preferred: str | None) -> Table:
    """All trials of a study side by side; the frontier is starred."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (
        ("", "left"),
        ("trial", "left"),
        ("val loss", "right"),
        ("test loss", "right"),
        ("test acc", "right"),
        ("FLOPs", "right"),
        ("size at the end", "left"),
        ("grown", "left"),
        ("ended", "left"),
    ):
        table.add_column(name, justify=justify, no_wrap=name != "grown")  # type: ignore[arg-type]
    on_frontier = {o.trial for o in frontier}
    for trial in trials:
        final, last = trial.final, trial.stages[-1] if trial.stages else None
        style = "bold" if trial.trial == preferred else None
        if final is None or last is None:
            table.add_row("", trial.trial, "", "", "", "", "", "", final.reason if final else "unfinished", style="red")
            continue
        table.add_row(
            "*" if trial.trial in on_frontier else "",
            trial.trial,
            f"{final.loss_val:.4f}",
            f"{final.loss_test:.4f}",
            f"{final.accuracy_test:.1%}",
            format_flops(final.flops_total),
            f"{last.depth} blocks, {last.width} units, {last.train_samples} samples",
            summarise(trial.events),
            Text(final.cause, style=VERDICT_STYLE.get(final.cause, "red" if final.cause == "failed" else "")),
            style=style,
        )
    return table


def reasons(trials: list[TrialRecord]) -> list[Text]:
    """Decisions of the trials that looked at certificates, in words."""
    lines: list[Text] = []
    for trial in trials:
        looked = [r for r in trial.stages if r.verdict is not None]
        if not looked:
            continue
        lines.append(Text(trial.trial, style="bold"))
        for record in looked:
            kind = record.decision["kind"].replace("_", " ")
            head = f"  after stage {record.stage + 1}: {kind}"
            lines.append(Text.assemble(head, " - ", (record.decision["reason"], "dim")))
        if trial.final is not None and trial.final.cause == "pruned":
            lines.append(Text.assemble("  pruned - ", (trial.final.reason, "dim")))
    return lines


def study_summary(trials: list[TrialRecord], frontier: list[Outcome], preference: Preference | None) -> RenderableType:
    """Table, reasons, frontier, and the schedule to prefer."""
    parts: list[RenderableType] = [final_table(trials, frontier, preferred=preference.trial if preference else None)]
    why = reasons(trials)
    if why:
        parts += [Text("Why the signal-guided trials grew or stopped", style="bold underline"), *why, Text("")]
    if frontier:
        listed = ", ".join(f"{o.trial} ({format_flops(o.flops)}, {o.loss:.4f})" for o in frontier)
        parts.append(Text.assemble(("Pareto frontier (*): ", "bold"), listed))
    if preference is not None:
        parts.append(Text.assemble(("Prefer: ", "bold"), (preference.trial, "bold green"), f" - {preference.reason}."))
    else:
        parts.append(Text("No trial ended well: nothing to prefer.", style="red"))
    return Group(*parts)


def certificate_table(report: dict[str, Any]) -> RenderableType:
    """Certificates of a probe, one line a candidate.

    Args:
        report: ``SaturationReport.to_dict()``.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "candidate",
        "kappa",
        "gain, nats [limits]",
        "transferable [upper]",
        "p",
        "SNR",
        "eta",
        "gain per GFLOP",
        "verdict",
    ):
        table.add_column(name, justify="left" if name in ("candidate", "verdict") else "right", no_wrap=True)
    for s in report["sites"]:
        table.add_row(
            " ".join(filter(None, (s["kind"], s["site"], s.get("name")))),
            f"{s['kappa']:.2f}",
            f"{s['predicted_gain']:.3f} [{s['gain_lcl']:.3f}, {s['predicted_gain_ucl']:.3f}]",
            "-" if s["transfer_ucl"] is None else f"{s['transfer_gain']:+.3f} [{s['transfer_ucl']:+.3f}]",
            f"{s['p_value']:.4f}",
            f"{s['snr']:.1f}",
            f"{s['eta']:.2f}",
            f"{s['gain_per_flop'] * 1e9:.3g}",
            verdict_text(s["verdict"]),
        )
    head = Text.assemble(
        ("Network: ", "bold"),
        verdict_text(report["verdict"]),
        f" at tolerance {report['tolerance_nats']:.3g} nats, level {report['level']:g}, "
        f"{report['sites'][0]['num_samples']} probe samples, loss {report['loss_nats']:.4f}",
    )
    notes = dict.fromkeys([*report["notes"], *(f"{s['site']}: {n}" for s in report["sites"] for n in s["notes"])])
    return Group(table, head, *(Text(f"note: {n}", style="yellow") for n in notes), Text(report["caveat"], style="dim"))


def advice_text(report: dict[str, Any]) -> Text:
    """What to do next, and what would settle or change it.

    Args:
        report: ``SaturationReport.to_dict()``.
    """
    advice = report["advice"]
    action = advice["action"].replace("_", " ") + (f" at {advice['target']}" if advice["target"] else "")
    return Text.assemble(
        ("Next: ", "bold"), f"{action} - {advice['reason']}\n", ("Would change it: ", "bold"), advice["unlock"]["words"]
    )


def verdict_text(verdict: str | None) -> Text:
    """A verdict in its colour."""
    return Text(verdict or "", style=VERDICT_STYLE.get(verdict or "", ""))


def summarise(events: list[str]) -> str:
    """Grow steps without the long paths: ``depth x2, width x1, stream +32, data 0.50 1.00``."""
    parts = []
    for axis in ("depth", "width"):
        count = sum(e.startswith(axis) for e in events)
        if count:
            parts.append(f"{axis} x{count}")
    channels = sum(int(e.rpartition("+")[2]) for e in events if e.startswith("stream@"))
    if channels:
        parts.append(f"stream +{channels}")
    shares = [e.removeprefix("data@") for e in events if e.startswith("data@")]
    if shares:
        parts.append(f"data {' '.join(shares)}")
    return ", ".join(parts) or "-"


def _gain(record: StageRecord) -> str:
    """Largest predicted gain of the last look, in nats."""
    if not record.certificates:
        return ""
    return f"{max(c['predicted_gain'] for c in record.certificates):.3f}"


def profile_table(parts: Sequence[Any]) -> RenderableType:
    """What the lanes of a study spent their time on, as ``orchestration.profile`` splits it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Time of all lanes", title_justify="left")
    table.add_column("spent on")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for part in parts:
        table.add_row(part.what, format_seconds(part.seconds), f"{part.share:.1%}")
    return table
