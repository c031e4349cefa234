"""The launcher's view of a job that runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from paramserver.core.job.status import WELL, State
from paramserver.results.verdict import mode_text
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.web.facts import progress_of

_RATE_WINDOW_S = 3.0
_STUCK_S = 2.0


class Display(Protocol):
    """Shows a job."""

    def line(self, name: str, text: str) -> None:
        """A line of output of the process ``name``; "" is the launcher itself."""

    def update(self, status: coordinator_pb2.StatusResponse) -> None:
        """The newest state."""

    def close(self) -> None:
        """The job is over."""


class Rates:
    """Samples per second of each process and of all, over the last seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def of(self, name: str, samples: int) -> float:
        """Take in a total; return the present rate."""
        now = time.monotonic()
        seen = self._seen.setdefault(name, deque())
        if seen and samples < seen[-1][1]:  # a new process, or a coordinator that has not heard of all workers yet
            seen.clear()
        seen.append((now, samples))
        while len(seen) > 2 and now - seen[0][0] > _RATE_WINDOW_S:
            seen.popleft()
        (then, before), (last, after) = seen[0], seen[-1]
        return (after - before) / (last - then) if last > then else 0.0


class Waiting:
    """The reason why the job does not get on: its state, or else a wait that has taken a while."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._since = time.monotonic()

    def of(self, status: coordinator_pb2.StatusResponse) -> str:
        """In words; empty while the job gets on."""
        if status.state and status.state not in WELL:
            return f"{status.state}: {status.reason}" if status.reason else status.state
        servers = [p for p in status.processes if p.role == "server"]
        versions = [p.version for p in servers]
        if versions != self._versions:
            self._versions, self._since = versions, time.monotonic()
        if time.monotonic() - self._since < _STUCK_S:
            return ""
        whom = next((p.waiting_for for p in servers if p.waiting_for), "")
        return f"waiting for {whom}" if whom else ""


class PlainDisplay:
    """Lines for logs: output as it comes, and the state every ``interval_s`` seconds."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._said_at = time.monotonic()
        self._rates = Rates()
        self._waiting = Waiting()

    def line(self, name: str, text: str) -> None:
        """Print it behind its name."""
        line = f"{name} | {text}" if name else text
        try:
            print(line, flush=True)
        except UnicodeEncodeError:  # standard output does not take all characters
            encoding = sys.stdout.encoding
            print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)

    def update(self, status: coordinator_pb2.StatusResponse) -> None:
        """Print a line if it is time and something has happened."""
        workers = [p for p in status.processes if p.role == "worker"]
        rate = self._rates.of("", sum(p.samples for p in workers))
        waiting = self._waiting.of(status)
        now = time.monotonic()
        if now - self._said_at < self._interval_s:
            return
        self._said_at = now
        done, total = progress_of(status)
        losses = [p.metrics["loss"] for p in workers if "loss" in p.metrics]
        parts = [
            mode_text(status),
            f"version {max((p.version for p in status.processes), default=0)}",
            *([f"slices {done}/{total}"] if total else []),
            f"{rate:.0f} samples/s",
        ]
        if losses:
            parts.append(f"loss {sum(losses) / len(losses):.4f}")
        if waiting:
            parts.append(waiting)
        self.line("", "· " + " · ".join(parts))

    def close(self) -> None:
        """Nothing to tidy up."""


class LiveDisplay:
    """A table that stays at the bottom of the terminal; output scrolls above it."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout)
        self._rates = Rates()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("slices"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task: TaskID = self._progress.add_task("starting", total=None)
        self._live = Live(self._progress, console=self._console, refresh_per_second=4, transient=False)
        self._live.start()

    def line(self, name: str, text: str) -> None:
        """Print it above the table."""
        line = Text()
        if name:
            line.append(f"{name} | ", style="cyan")
        # A progress bar begins its line anew each time; here every state of it gets a line.
        line.append(text.replace("\r", "\n"))
        self._console.print(line, soft_wrap=True)

    def update(self, status: coordinator_pb2.StatusResponse) -> None:
        """Draw the newest state."""
        done, total = progress_of(status)
        self._progress.update(self._task, description=mode_text(status), completed=done, total=total or None)
        self._live.update(Group(self._table(status), self._progress))

    def _table(self, status: coordinator_pb2.StatusResponse) -> Table:
        asynchronous = status.view.consistency.mode == types_pb2.MODE_ASYNC
        title = f"job {status.job}" if status.state in ("", State.TRAINING) else f"job {status.job}: {status.state}"
        if status.reason:
            title += f" · {status.reason}"
        table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False, expand=True)
        for heading in ("name", "state", "clock" if asynchronous else "step", "version", "samples/s", "loss"):
            table.add_column(heading, justify="left" if heading in ("name", "state") else "right", no_wrap=True)
        table.add_column("why", overflow="ellipsis", no_wrap=True, ratio=1)  # what the others leave
        for p in status.processes:
            worker = p.role == "worker"
            table.add_row(
                p.name,
                p.state,
                str(p.clock if asynchronous else p.version) if worker else "",
                str(p.version) if p.role != "coordinator" else "",
                f"{self._rates.of(p.name, p.samples):.0f}" if worker else "",
                f"{p.metrics['loss']:.4f}" if "loss" in p.metrics else "",
                p.reason if p.role != "coordinator" else "",  # it is in the title
            )
        return table

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._live.stop()


def make_display(interval_s: float) -> Display:
    """A live table if standard output is a terminal, else plain lines."""
    return LiveDisplay() if sys.stdout.isatty() else PlainDisplay(interval_s)
