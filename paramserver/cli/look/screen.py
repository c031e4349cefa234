"""The screen of ``paramserver top``: made of answers of the coordinator and keys, without I/O."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from paramserver.cli.look.events import Facts, changes
from paramserver.cli.look.facts import describe, render
from paramserver.core.job.status import WELL
from paramserver.core.records.digits import value_text
from paramserver.core.records.sparkline import sparkline
from paramserver.launcher.progress import Left, Progress, Rates, Waiting, metric_mean, shown_metric, time_text
from paramserver.wire.texts import harmless

if TYPE_CHECKING:
    from paramserver.v1.coordinator_pb2 import StatusResponse

_SERIES = 60
_EVENTS = 200
# Rows beside those of processes and events.
_OTHER_ROWS = 12
# Key -> what it does.
KEYS = {"q": "quit", "p": "pause", "s": "sort"}
ORDERS = ("name", "state", "samples")


class Screen:
    """Facts come by :meth:`heard` and :meth:`unheard`, keys by :meth:`press`. ``clock``: the time of day, as text."""

    def __init__(self) -> None:
        # Time and sentence, the newest last.
        self.events: deque[tuple[str, str]] = deque(maxlen=_EVENTS)
        self.order = ORDERS[0]
        self._facts: Facts | None = None
        self._begin()
        # Since when no coordinator answers, and why; "" while one does.
        self._silent_since = self._why = ""
        self._frozen: list[RenderableType] | None = None

    def _begin(self) -> None:
        self._rates, self._progress, self._waiting = Rates(), Progress(), Waiting()
        self._samples_per_s: deque[float] = deque(maxlen=_SERIES)
        self._metric: deque[float] = deque(maxlen=_SERIES)
        self._metric_name = self._blame = ""

    # ---- input

    def heard(self, status: StatusResponse, clock: str) -> None:
        """The coordinator has answered."""
        status = harmless(status)
        before, facts = self._facts, describe(status)
        if self._why and before is not None:
            self.events.append((clock, f"a coordinator answers again; none did since {self._silent_since}"))
        self._silent_since = self._why = ""
        if before is None or before["job"] != facts["job"]:
            self._begin()
            self.events.append((clock, f"job {facts['job']} is {facts['state'] or 'there'}"))
        else:
            self.events.extend((clock, event) for event in changes(before, facts))
        self._facts = facts
        self._progress.hear(status)
        samples = sum(process["samples"] for process in facts["processes"] if process["role"] == "worker")
        self._samples_per_s.append(self._rates.of("", samples))
        self._metric_name, value = shown_metric(status), metric_mean(status)
        self._metric.append(math.nan if value is None else value)
        self._blame = blame(status, self._waiting)

    def unheard(self, why: str, clock: str) -> None:
        """No coordinator answers, or there is no job. ``why``: a sentence."""
        if not self._why:
            self._silent_since = clock
            if self._facts is not None:
                self.events.append((clock, f"no coordinator answers any more: {why}"))
        self._why = why

    def press(self, key: str) -> bool:
        """A key. Returns False if the user quits."""
        if key == "p":
            self._frozen = None if self._frozen is not None else self._body(_OTHER_ROWS * 4)
        elif key == "s":
            self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
        return key != "q"

    # ---- output

    def draw(self, height: int) -> RenderableType:
        """Everything, in ``height`` rows."""
        body = self._frozen if self._frozen is not None else self._body(height)
        keys = [f"{key} {meaning}" for key, meaning in KEYS.items()]
        keys[-1] += f" (by {self.order})"
        if self._frozen is not None:
            keys.insert(0, "PAUSED, p goes on")
        return Group(*body, Text(" · ".join(keys), style="reverse"))

    def _body(self, height: int) -> list[RenderableType]:
        if self._facts is None:
            why = self._why or "the first answer of the coordinator is on its way"
            since = f" (since {self._silent_since})" if self._silent_since else ""
            return [Text(f"waiting for a job{since}: {why}")]
        parts: list[RenderableType] = []
        if self._why:
            told = f"NO COORDINATOR ANSWERS since {self._silent_since}: {self._why}. Waiting for one, or another job."
            parts.append(Text(told + " Below: the last answer.", style="bold"))
        rows = max(3, (height - _OTHER_ROWS) * 2 // 3)
        parts.append(render(self._ordered(rows), cut=True))
        if len(self._facts["processes"]) > rows:
            parts.append(Text(f"… and {len(self._facts['processes']) - rows} more processes"))
        parts += [Text(line) for line in (*self._curves(), *self._left())]
        if self._blame:
            parts.append(Text(self._blame, style="bold"))
        room = max(3, height - _OTHER_ROWS - min(rows, len(self._facts["processes"])))
        parts.append(Text("events", style="underline"))
        parts += [Text(f"{clock}  {event}", no_wrap=True, overflow="ellipsis") for clock, event in self._newest(room)]
        return parts

    def _newest(self, count: int) -> list[tuple[str, str]]:
        return list(self.events)[-count:]

    def _ordered(self, count: int) -> Facts:
        assert self._facts is not None
        processes = list(self._facts["processes"])
        if self.order == "state":
            processes.sort(key=lambda process: process["state"] in WELL)
        elif self.order == "samples":
            processes.sort(key=lambda process: (process["role"] != "worker", process["samples"]))
        return {**self._facts, "processes": processes[:count]}

    def _curves(self) -> list[str]:
        lines = [f"samples/s {self._samples_per_s[-1]:>10.0f}  {sparkline(self._samples_per_s)}"]
        if self._metric_name:
            lines.append(f"{self._metric_name:<9} {value_text(self._metric[-1]):>10}  {sparkline(self._metric)}")
        return lines

    def _left(self) -> list[str]:
        progress = self._progress
        if progress.of_job is None or progress.of_epoch is None:
            return []
        epoch = f"epoch {progress.epoch} of {progress.epochs}: {_left_text(progress.of_epoch)}"
        return [f"{epoch} · job: {_left_text(progress.of_job)}"]


def blame(status: StatusResponse, waiting: Waiting) -> str:
    """A sentence about what holds the job up; empty while nothing does, or while blame says more."""
    reason = "" if status.blame.sentence else waiting.of(status)
    # The first line of the screen has the reason for a state that is not well.
    return f"held up: {reason}" if reason and status.state in WELL else ""


def _left_text(left: Left) -> str:
    return f"{left.done}/{left.total} slices, {time_text(left.seconds)}"
