"""Starts processes again that have died: the part of supervision that `paramserver run` and `start --restart` share.

A place in a job (*seat*) outlives the processes that take it. A process that dies is started again, after a pause that
grows with every failure in a row, until it has failed too often while the job got no further.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paramserver import errors
from paramserver.launcher.poll import POLL_S
from paramserver.processes.process import Child
from paramserver.processes.restarts import Restarts, cool_down_s
from paramserver.processes.silence import Silence
from paramserver.v1 import coordinator_pb2

# Exit codes of errors that another attempt would meet again: configuration, versions.
HOPELESS = (errors.UserError.exit_code, errors.VersionMismatchError.exit_code)
# How many ended processes of a seat the next one names: those that have died before they could join hide none.
_FORMER = 8


class ChildFailedError(errors.ParamServerError):
    """A part of the cluster ended; the command ends with its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code if code > 0 else 1
        # The code of the system: below 0, a signal has ended the process.
        self.code = code


@dataclass(slots=True, eq=False)
class Seat:
    """A place in the job. ``again(pids)`` starts the next process in place of the ended ones with these pids."""

    name: str
    child: Child
    again: Callable[[Sequence[int]], Awaitable[Child]]
    started_at: float
    # When the next process is to be started (monotonic seconds).
    due: float | None = None
    # The exit code of the last process, if no other process takes its place.
    code: int | None = None
    # The process was asked to leave.
    leaving: bool = False
    # Pids of the newest ended processes, the last one at the end.
    former: list[int] = field(default_factory=list)
    # How many processes in a row have ended before they were members, while the job went on without them.
    refused: int = 0

    @property
    def exit_code(self) -> int | None:
        """How the present process has ended; None while it runs."""
        exited = self.child.exited
        return exited.result() if exited is not None and exited.done() else None


class Seats:
    """Starts the processes of seats again. ``say`` prints a line for people.

    ``absent_s``: a server that runs, but has been no member for so long, is killed.
    """

    def __init__(self, restarts: Restarts, say: Callable[[str], None], absent_s: float) -> None:
        self.restarts = restarts
        self._say = say
        self._absent_s = absent_s
        # Since when servers are no members.
        self._absent = Silence()

    def take(self, child: Child, again: Callable[[Sequence[int]], Awaitable[Child]]) -> Seat:
        """A seat for the first process of this name."""
        self.restarts.started(child.name)
        return Seat(child.name, child, again, time.monotonic())

    def again(self, seat: Seat, code: int, fatal: int, told: bool = False, spare: bool = False) -> None:
        """Have the next process started soon. ``told``: people have been told that the last one has ended.

        ``spare``: the job goes on without it, so it is tried for ever, though more and more seldom. Otherwise raises
        ChildFailedError with the exit code ``fatal`` if it has failed too often.
        """
        if code in (0, errors.RestartError.exit_code):  # an operator has asked the process to leave, or to restart
            seat.due = time.monotonic()
            self._say(f"{seat.name} has left, and is started again")
            return
        pause_s = max(self.count(seat.name, code, fatal, spare), cool_down_s(seat.refused))
        if not told:
            self._say(f"{seat.name} ended unexpectedly ({how(code)})")
        seat.due = time.monotonic() + pause_s
        after = f" in {pause_s:g} s" if pause_s else ""
        failures, most = max(self.restarts.failures(seat.name), seat.refused), self.restarts.most
        often = f"{failures} of at most {most} times in a row"
        if failures > most:
            often = f"{failures} times in a row; the job goes on without it"
        self._say(f"{seat.name} is started again{after} ({often})")

    def count(self, name: str, code: int, fatal: int, spare: bool = False) -> float:
        """Note that a process has failed; returns the seconds until its next start.

        Raises ChildFailedError with the exit code ``fatal`` if it has failed too often, and is not ``spare``.
        """
        pause_s = self.restarts.failed(name)
        if pause_s is None and spare:
            return cool_down_s(self.restarts.failures(name))
        if pause_s is None:
            raise ChildFailedError(
                f"{name} has ended {self.restarts.failures(name)} times in a row, the last time with {how(code)}, "
                f"and the job got no further in between; cluster.max_restarts is {self.restarts.most}",
                fatal,
            )
        return pause_s

    async def start_due(self, seats: Iterable[Seat]) -> None:
        """Start the processes whose time has come."""
        for seat in seats:
            if seat.due is not None and seat.due <= time.monotonic():
                seat.former = [*seat.former, seat.child.pid][-_FORMER:]
                seat.child = await seat.again(seat.former)
                seat.due, seat.started_at = None, time.monotonic()
                self.restarts.started(seat.name)

    async def pause(self, seats: Sequence[Seat]) -> None:
        """Wait until a process has ended or is due, but not for long."""
        wait_s = min([POLL_S, *(seat.due - time.monotonic() for seat in seats if seat.due is not None)])
        exits = [s.child.exited for s in seats if s.child.exited is not None and not s.child.exited.done()]
        if exits:
            await asyncio.wait(exits, timeout=max(wait_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(max(wait_s, 0.0))

    def reached(self, status: coordinator_pb2.StatusResponse) -> None:
        """Note how far the job has come."""
        self.restarts.reached(max((p.version for p in status.processes if p.role == "server"), default=0))

    def check_servers(self, now: float, status: coordinator_pb2.StatusResponse, servers: Iterable[Seat]) -> None:
        """Kill servers that were given up for lost and hang; otherwise they would come back with their shards."""
        members = server_pids(status)
        running = [seat for seat in servers if seat.child.running]
        self._absent.look(now, members, [seat.child.pid for seat in running if seat.child.pid not in members])
        for seat in running:
            if self._absent.of(seat.child.pid) > self._absent_s:
                self._say(f"{seat.name} runs, but the coordinator has given it up for lost; it is killed")
                self._absent.forget(seat.child.pid)
                seat.child.kill()


def server_pids(status: coordinator_pb2.StatusResponse) -> set[int]:
    """The servers that are members, by pid."""
    return {process.pid for process in status.processes if process.role == "server" and not process.gone}


def how(code: int) -> str:
    """The end of a process in words."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
