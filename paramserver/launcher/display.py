"""The launcher's view of a job that runs: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from paramserver.core.shown import one_line
from paramserver.launcher.progress import Rates, Waiting, metric_text, version_of
from paramserver.logs import miss
from paramserver.processes.lines import NamedLines, Output
from paramserver.results.verdict import mode_text
from paramserver.v1 import coordinator_pb2
from paramserver.web.facts import progress_of


class Display(Protocol):
    """Shows a job."""

    def output(self, name: str) -> Output:
        """Shows a stream of the process ``name``."""

    def line(self, name: str, text: str) -> None:
        """A line of output of the process ``name``; "" is the launcher itself, whose texts are made harmless."""

    def update(self, status: coordinator_pb2.StatusResponse) -> None:
        """The newest state."""

    def close(self) -> None:
        """The job is over."""


class PlainDisplay:
    """Lines for logs: output as it comes, and the state every ``interval_s`` seconds.

    ``json``: processes write JSON, which has their names.
    """

    def __init__(self, interval_s: float, json: bool = False) -> None:
        self._interval_s, self._json = interval_s, json
        self._said_at = time.monotonic()
        self._rates = Rates()
        self._waiting = Waiting()

    def output(self, name: str) -> Output:
        """Each line as it ends."""
        return NamedLines(name, self.line)

    def line(self, name: str, text: str) -> None:
        """Print it behind its name."""
        if not name:
            text = one_line(text)
        line = text if not name or (self._json and text.startswith("{")) else f"{name} | {text}"
        try:
            try:
                print(line, flush=True)
            except UnicodeEncodeError:  # standard output does not take all characters
                encoding = sys.stdout.encoding
                print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
        except OSError as error:
            miss(error)

    def update(self, status: coordinator_pb2.StatusResponse) -> None:
        """Print a line if it is time and something has happened."""
        rate = self._rates.of("", sum(p.samples for p in status.processes if p.role == "worker"))
        waiting = self._waiting.of(status)
        now = time.monotonic()
        if now - self._said_at < self._interval_s:
            return
        self._said_at = now
        done, total = progress_of(status)
        slices = f"slices {done}/{total}" if total else ""
        parts = [mode_text(status), f"version {version_of(status)}", slices, f"{rate:.0f} samples/s"]
        parts += [metric_text(status), waiting]
        self.line("", "· " + " · ".join(part for part in parts if part))

    def close(self) -> None:
        """Nothing to tidy up."""


def make_display(interval_s: float, json: bool = False) -> Display:
    """A live view if standard output is a terminal, else plain lines. ``json``: processes write JSON."""
    if not sys.stdout.isatty():
        return PlainDisplay(interval_s, json)
    from paramserver.launcher.live import LiveDisplay

    return LiveDisplay()
