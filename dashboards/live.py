"""Watching a study: a live table on a terminal, lines of text elsewhere."""

from rich.console import Console
from rich.live import Live

from dashboards.terminal import live_table, stage_line
from growth_service.core.records import StageRecord, TrialRecord


class LiveView:
    """Observer of a study that draws on a console (standard error, so that output stays clean)."""

    def __init__(self, console: Console, *, budget_flops: float, num_stages: int) -> None:
        self._console, self._budget_flops, self._num_stages = console, budget_flops, num_stages
        self._rows: dict[str, tuple[StageRecord | None, str]] = {}
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> "LiveView":
        """Begin to draw."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing."""
        if self._live is not None:
            self._live.stop()

    def trial_started(self, trial: str) -> None:
        """A trial waits for its workers."""
        self._rows[trial] = (None, "starting workers")
        self._draw()

    def stage_done(self, record: StageRecord) -> None:
        """A stage is over."""
        kind = record.decision["kind"]
        now = {"grow": "growing", "stop": "ending"}.get(kind, "training")
        self._rows[record.trial] = (record, now)
        if self._live is None:
            self._console.print(stage_line(record, num_stages=self._num_stages), highlight=False, soft_wrap=True)
        self._draw()

    def trial_done(self, record: TrialRecord) -> None:
        """A trial ended."""
        assert record.final is not None
        last = record.stages[-1] if record.stages else None
        self._rows[record.trial] = (last, f"ended: {record.final.cause}")
        if self._live is None:
            text = f"{record.trial:<16} ended: {record.final.cause}"
            self._console.print(text, highlight=False, soft_wrap=True)
        self._draw()

    def _draw(self) -> None:
        if self._live is not None:
            rows = [(trial, *row) for trial, row in self._rows.items()]
            table = live_table(rows, budget_flops=self._budget_flops, num_stages=self._num_stages)
            self._live.update(table, refresh=True)
