"""The launcher's view of a job on a terminal: processes, progress bars of scripts, and what is left of the job."""

from __future__ import annotations

import sys
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paramserver.core.job.status import WELL, State
from paramserver.core.records.digits import value_text
from paramserver.core.shown import one_line
from paramserver.launcher.progress import Left, Progress, Rates, metric_text, shown_metric, time_text
from paramserver.processes import lines
from paramserver.processes.lines import Output
from paramserver.processes.rows import Rows
from paramserver.results.verdict import mode_text
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.wire.texts import harmless

# Bars of scripts are drawn no more often.
_DRAW_S = 0.1


class LiveDisplay:
    """A view that stays at the bottom of the terminal; output scrolls above it."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout)
        self._rates = Rates()
        self._progress = Progress()
        self._status: coordinator_pb2.StatusResponse | None = None
        self._outputs: list[Rows] = []
        self._drawn_at = 0.0
        self._live = Live(Text("starting"), console=self._console, refresh_per_second=4, transient=False)
        self._live.start()

    def output(self, name: str) -> Output:
        """Finished lines scroll; progress bars stay where they can be drawn anew."""
        rows = Rows(name, self.line)
        self._outputs.append(rows)
        return _Drawn(rows, self)

    def line(self, name: str, text: str) -> None:
        """Print it above the view."""
        self._console.print(_named(name, text) if name else Text(one_line(text)), soft_wrap=True)

    def update(self, status: coordinator_pb2.StatusResponse) -> None:
        """Draw the newest state."""
        self._status = status = harmless(status)
        self._progress.hear(status)
        self.draw()

    def ended(self, rows: Rows) -> None:
        """A stream is over: it has no bars any more."""
        self._outputs.remove(rows)

    def draw(self) -> None:
        """Draw everything as it is now."""
        self._drawn_at = time.monotonic()
        self._live.update(Group(*self._parts()))

    def draw_soon(self) -> None:
        """Draw, unless that was done a moment ago."""
        if time.monotonic() - self._drawn_at >= _DRAW_S:
            self.draw()

    def _parts(self) -> list[RenderableType]:
        bars = [_named(rows.name, bar) for rows in self._outputs for bar in rows.bars]
        room = max(3, self._console.height // 3)
        parts: list[RenderableType] = []
        if self._status is not None:
            parts.append(self.table(self._status))
        for bar in bars[:room]:
            bar.no_wrap, bar.overflow = True, "ellipsis"
            parts.append(bar)
        if len(bars) > room:
            parts.append(Text(f"… and {len(bars) - room} more progress bars"))
        parts.append(Text("starting") if self._status is None else self._bars(self._status))
        return parts

    def table(self, status: coordinator_pb2.StatusResponse) -> Table:
        """The processes, each in a row; on a low terminal those that are well may be left out."""
        asynchronous = status.view.consistency.mode == types_pb2.MODE_ASYNC
        title = f"job {status.job}" if status.state in ("", State.TRAINING) else f"job {status.job}: {status.state}"
        if status.reason:
            title += f" · {status.reason}"
        table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False, expand=True)
        metric = shown_metric(status)
        headings = ("name", "state", "clock" if asynchronous else "step", "version", "samples/s", metric or "loss")
        for heading in headings:
            table.add_column(Text(heading), justify="left" if heading in ("name", "state") else "right", no_wrap=True)
        table.add_column("why", overflow="ellipsis", no_wrap=True, ratio=1)  # what the others leave
        rates = {p.name: self._rates.of(p.name, p.samples) for p in status.processes if p.role == "worker"}
        shown = _most_telling(list(status.processes), max(4, self._console.height // 2))
        for p in shown:
            worker = p.role == "worker"
            cells = (
                p.name,
                p.state,
                str(p.clock if asynchronous else p.version) if worker else "",
                str(p.version) if p.role != "coordinator" else "",
                f"{rates[p.name]:.0f}" if worker else "",
                value_text(p.metrics[metric]) if metric in p.metrics else "",
                p.reason if p.role != "coordinator" else "",  # it is in the title
            )
            table.add_row(*(Text(cell) for cell in cells))
        if len(shown) < len(status.processes):
            table.add_row(f"… {len(status.processes) - len(shown)} more")
        return table

    def _bars(self, status: coordinator_pb2.StatusResponse) -> RenderableType:
        progress = self._progress
        mode, of_job, of_epoch = mode_text(status), progress.of_job, progress.of_epoch
        through = of_job is not None and of_job.done == of_job.total
        steps = f"{progress.steps_per_s:.1f} {'slices' if mode.startswith('async') else 'steps'}/s"
        rest = [part for part in ("" if through else steps, metric_text(status)) if part]
        if of_job is None or of_epoch is None:
            return Text(" · ".join([mode, *rest]))
        grid = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None, None):
            grid.add_column(ratio=ratio, no_wrap=True)
        if progress.epochs > 1:
            _bar(grid, f"epoch {progress.epoch} of {progress.epochs}", of_epoch, [])
        _bar(grid, mode, of_job, rest)
        return grid

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._live.stop()


class _Drawn:
    """An output whose bars are drawn."""

    def __init__(self, rows: Rows, display: LiveDisplay) -> None:
        self._rows, self._display = rows, display

    def feed(self, data: bytes) -> None:
        """Take in the next bytes."""
        self._rows.feed(data)
        if self._rows.bars:
            self._display.draw_soon()

    def end(self) -> None:
        """The stream is over."""
        self._rows.end()
        self._display.ended(self._rows)


def _bar(grid: Table, what: str, left: Left, rest: list[str]) -> None:
    bar = ProgressBar(total=left.total, completed=left.done)
    to_go = [] if left.done == left.total else [time_text(left.seconds)]
    grid.add_row(Text(what), bar, Text(f"{left.done}/{left.total} slices"), Text(" · ".join(to_go + rest)))


def _most_telling(processes: list[coordinator_pb2.ProcessStatus], most: int) -> list[coordinator_pb2.ProcessStatus]:
    """At most so many processes, in their order; processes that are not well come before the others."""
    if len(processes) <= most:
        return processes
    ranked = sorted(range(len(processes)), key=lambda i: processes[i].state in WELL)
    return [processes[i] for i in sorted(ranked[:most])]


def _named(name: str, text: str) -> Text:
    """A line of a process with its colours, and without anything else that steers the terminal."""
    line = Text()
    if name:
        line.append(f"{name} | ", style="cyan")
    return line.append_text(Text.from_ansi(lines.harmless(text)))
