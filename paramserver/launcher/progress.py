"""How a job gets on: rates, what is left, the number that people watch. Derived from one status after the other."""

from __future__ import annotations

import shlex
import time
from collections import deque
from dataclasses import dataclass

from paramserver.config import hide_password
from paramserver.core.job.status import WELL
from paramserver.core.records.digits import value_text
from paramserver.v1 import coordinator_pb2
from paramserver.web.facts import progress_of

_RATE_WINDOW_S = 3.0
# Speeds from which the time to go follows change less.
_LONG_WINDOW_S = 30.0
_STUCK_S = 2.0


class Rates:
    """Counts per second, by name, over the last ``window_s`` seconds."""

    def __init__(self, window_s: float = _RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def of(self, name: str, total: int) -> float:
        """Take in a total; return the present rate."""
        now = time.monotonic()
        seen = self._seen.setdefault(name, deque())
        if seen and total < seen[-1][1]:  # a new process, or a coordinator that has not heard of all workers yet
            seen.clear()
        seen.append((now, total))
        while len(seen) > 2 and now - seen[0][0] > self._window_s:
            seen.popleft()
        (then, before), (last, after) = seen[0], seen[-1]
        return (after - before) / (last - then) if last > then else 0.0


def shown_metric(status: coordinator_pb2.StatusResponse) -> str:
    """The name of the number that stands for how well training goes; empty if scripts have logged none.

    The name is "loss" if scripts log a number of this name, else the first name that the first worker has logged.
    """
    workers = [p for p in status.processes if p.role == "worker"]
    if any("loss" in p.metrics for p in workers):
        return "loss"
    return next((p.first_metric for p in workers if p.first_metric in p.metrics), "")


def metric_text(status: coordinator_pb2.StatusResponse) -> str:
    """Such as "loss 0.4321", the mean over the workers that have logged it; empty if scripts have logged nothing."""
    value = metric_mean(status)
    return "" if value is None else f"{shown_metric(status)} {value_text(value)}"


def metric_mean(status: coordinator_pb2.StatusResponse) -> float | None:
    """The number of :func:`shown_metric`: the mean over the workers that have logged it."""
    name = shown_metric(status)
    values = [p.metrics[name] for p in status.processes if p.role == "worker" and name in p.metrics]
    return sum(values) / len(values) if values else None


def version_of(status: coordinator_pb2.StatusResponse) -> int:
    """The newest version that a process knows."""
    return max((p.version for p in status.processes), default=0)


def where_it_stands(status: coordinator_pb2.StatusResponse, place: str, function: bool = False) -> str:
    """What is left of a run that is interrupted, and how to go on. ``place``: of its checkpoints, or empty.

    A password in the place is not shown.

    ``function``: the workers call a function, and run no script.

    >>> where_it_stands(coordinator_pb2.StatusResponse(checkpoint="step-00000004-t1"), "ckpt")
    'interrupted at version 0; checkpoint step-00000004-t1 is saved; go on with: paramserver run --resume ckpt'
    """
    version, place = version_of(status), hide_password(place)
    if place and status.checkpoint:
        go_on = shlex.join(["paramserver", "run", "--resume", place])
        if function:
            go_on = f"paramserver.launch(..., checkpoint__resume={place!r})"
        return f"interrupted at version {version}; checkpoint {status.checkpoint} is saved; go on with: {go_on}"
    why = f"no checkpoint is known in {place}" if place else "the run has no --checkpoint-dir"
    return f"interrupted at version {version}; {why}, so only what the script itself has saved is left"


@dataclass(frozen=True, slots=True)
class Left:
    """A part of the work: ``done`` of ``total`` slices, and the seconds that the rest takes; None: not known."""

    done: int
    total: int
    seconds: float | None


def time_text(seconds: float | None) -> str:
    """Such as "0:01:20 left"."""
    if seconds is None:
        return "-:--:-- left"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left"


class Progress:
    """The rest of the epoch and of the job. Speeds are those of the last half minute."""

    def __init__(self) -> None:
        self._slices = Rates(_LONG_WINDOW_S)
        self._versions = Rates()
        self.epoch = self.epochs = 0
        # None: the scripts have not said how much work there is.
        self.of_epoch: Left | None = None
        self.of_job: Left | None = None
        # In synchronous mode a version is a step, else a slice.
        self.steps_per_s = 0.0

    def hear(self, status: coordinator_pb2.StatusResponse) -> None:
        """Take in the newest status."""
        self.steps_per_s = self._versions.of("", version_of(status))
        done, total = progress_of(status)
        rate = self._slices.of("", done)
        if not total:
            self.of_epoch = self.of_job = None
            return
        self.epochs = max(p.epochs_planned for p in status.processes)
        length = total // self.epochs
        self.epoch = min(done // length, self.epochs - 1) + 1
        before = (self.epoch - 1) * length
        self.of_epoch = _left(done - before, length, rate)
        self.of_job = _left(done, total, rate)


def _left(done: int, total: int, rate: float) -> Left:
    return Left(done, total, (total - done) / rate if rate > 0 else None)


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
