"""The processes of one `paramserver start` command: started, supervised with ``--restart``, ended together.

The command itself only watches. Its processes write where it writes, and die with it, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from paramserver import errors
from paramserver.config import Settings, env_name, split_addresses
from paramserver.launcher.input import Input
from paramserver.launcher.poll import Poll
from paramserver.launcher.seats import HOPELESS, ChildFailedError, Seat, Seats, how
from paramserver.logs import configure
from paramserver.machine.hosts import split
from paramserver.pki.security import load_security
from paramserver.processes import environment as env
from paramserver.processes.children import dying_with_me
from paramserver.processes.ends import hand_on, listen
from paramserver.processes.process import Child, Guard, stop_all
from paramserver.processes.restarts import Restarts
from paramserver.processes.starting import python
from paramserver.transport.addresses import join
from paramserver.transport.grpc import connector
from paramserver.transport.rotating import coordinator_channel
from paramserver.v1 import coordinator_pb2, types_pb2

log = structlog.get_logger("paramserver")

_COMMAND = (*python("paramserver"), "start")
# Ends of a process that was told to end, and so is not started again.
_TOLD = (130, 143, -signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP)
_OVER = (types_pb2.JOB_STATE_DONE, types_pb2.JOB_STATE_STOPPED, types_pb2.JOB_STATE_FAILED)
# How often the coordinator is asked whether the servers are members.
_ASK_S = 1.0
# Seconds in which a process that was told to end leaves the job.
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the command. ``argv``: after ``paramserver start``. ``environ``: variables of its own."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_worker(self) -> bool:
        """Whether the process runs a script."""
        return self.argv[0] == "worker"


# Starts the process of a part in place of ended ones; asks the coordinator for the status of the job.
Start = Callable[[Part, Sequence[int]], Awaitable[Child]]
Ask = Callable[[], Awaitable[coordinator_pb2.StatusResponse | None]]


def server_parts(settings: Settings) -> list[Part]:
    """The servers of `start server`: as many as ``cluster.servers_per_host``."""
    count = settings.cluster.servers_per_host
    names = ["server"] if count == 1 else [f"server {number} of {count}" for number in range(1, count + 1)]
    # The first one takes the ports that are configured, each of the others some of its own.
    own = _ports_of_its_own(settings)
    return [Part(name, ("server",), own if number else {}) for number, name in enumerate(names)]


def worker_parts(settings: Settings, script: Path, args: Sequence[str], with_server: bool) -> list[Part]:
    """The worker of `start worker`, and the server beside it."""
    module = ("-m",) if settings.run.module else ()
    worker = Part("worker", ("worker", *module, "--", str(script), *args))
    if not with_server:
        return [worker]
    own = {**_ports_of_its_own(settings), env_name("cluster.beside_worker"): "true"}
    return [worker, Part("server", ("server",), own)]


def _ports_of_its_own(settings: Settings) -> dict[str, str]:
    wanted = {"cluster.listen": settings.cluster.listen, "web.metrics": settings.web.metrics}
    return {env_name(key): join(split(at)[0], 0) for key, at in wanted.items() if ":" in at.rpartition("]")[2]}


def keep(settings: Settings, parts: Sequence[Part], restart: bool) -> int:
    """Run the processes until all have ended; returns the exit code of the command.

    ``restart``: a process that is killed or crashes is started again, as `paramserver run` does.
    Raises ConfigError for settings that cannot be used, ChildFailedError if a process has died too often.
    """
    role = "worker" if any(part.is_worker for part in parts) else "server"
    configure(settings.log.level, settings.log.format, role)
    if restart and not settings.cluster.max_restarts:
        raise errors.ConfigError("--restart and cluster.max_restarts = 0 contradict each other; give one of them")
    return asyncio.run(_keep(settings, parts, restart))


async def _keep(settings: Settings, parts: Sequence[Part], restart: bool) -> int:
    """Give a keeper what it works with: signals, a way to ask the coordinator, a guard of the processes."""
    again = Seats(Restarts(settings.cluster.max_restarts), log.warning, settings.cluster.lease_s)
    keeper = Keeper(parts, again, restart)
    listen(keeper.on_signal, keeper.hand_on)
    role = "worker" if parts[0].is_worker else "server"
    connect = connector(load_security(settings, role), "coordinator")
    poll = Poll(coordinator_channel(split_addresses(settings.cluster.coordinator), connect), keeper.hear, _ASK_S)
    if restart and any(not part.is_worker for part in parts):
        poll.start()
    guard = Guard()
    try:
        return await keeper.run(partial(_start, settings, guard, Input(log.warning)), poll.ask)
    finally:
        await stop_all(keeper.children, 0.0)
        await poll.close()
        guard.close()


async def _start(settings: Settings, guard: Guard, given: Input, part: Part, replaces: Sequence[int]) -> Child:
    """Start a process in place of ended ones."""
    child = Child(part.name, guard, None)
    own = {env.ENV_PART: "1", **part.environ, **env.replacing(replaces)}
    if not part.is_worker:
        own["OMP_NUM_THREADS"] = "1"  # its threads work on a chunk each
    environ = {**os.environ, **settings.given_as_environment(), **(given.variables if part.is_worker else {}), **own}
    with given.opened(part.is_worker) as stdin:
        await child.start(dying_with_me([*_COMMAND, *part.argv]), environ, stdin=stdin)
    return child


class Keeper:
    """Watches the processes of one command. It owns their seats."""

    def __init__(self, parts: Sequence[Part], again: Seats, restart: bool) -> None:
        self._parts = parts
        self._again = again
        self._restart = restart
        self._ask: Ask | None = None
        self._seats: dict[Seat, Part] = {}
        # The coordinator's answer since the last look.
        self._answer: coordinator_pb2.StatusResponse | None = None
        # Since when the processes are told to end (monotonic seconds); and how many signals this command has got.
        self._ending_at: float | None = None
        self._signals = 0
        # The exit code for which the other processes are ended; and the error that explains it.
        self._code = 0
        self._error: ChildFailedError | None = None

    @property
    def children(self) -> list[Child]:
        """The present processes."""
        return [seat.child for seat in self._seats]

    async def run(self, start: Start, ask: Ask) -> int:
        """Start all, and watch them to the end; the exit code of the command.

        Raises ChildFailedError if a process has died too often.
        """
        self._ask = ask
        for part in self._parts:
            child = await start(part, ())
            self._seats[self._again.take(child, partial(start, part))] = part
        if self._ending_at is not None:  # told to end before all had begun
            self._end(signal.SIGTERM)
        await self._watch()
        if self._error is not None:
            raise self._error
        return self._code or next((seat.code for seat in self._seats if seat.code), 0)

    def hear(self, status: coordinator_pb2.StatusResponse) -> None:
        """Take in the coordinator's newest answer."""
        self._again.reached(status)
        self._answer = status

    # ---- watching

    async def _watch(self) -> None:
        while any(seat.code is None for seat in self._seats):
            for seat, part in self._seats.items():
                if seat.exit_code is not None and seat.due is None and seat.code is None:
                    await self._ended(seat, part)
            self._check_hung()
            if self._ending_at is None:
                await self._again.start_due(self._seats)
            elif time.monotonic() - self._ending_at > _PATIENCE_S:
                self._kill(f"has not ended {_PATIENCE_S:g} s after it was told to; it is killed")
            await self._again.pause(list(self._seats))

    async def _ended(self, seat: Seat, part: Part) -> None:
        """Deal with the end of a process: start another one, or end the others if they cannot go on without it."""
        code = seat.exit_code
        assert code is not None
        if self._ending_at is None and await self._to_be_replaced(seat, part, code):
            return
        seat.code = 1 if code == env.JOB_FAILED_CODE and not part.is_worker else code if code >= 0 else 128 - code
        # Servers of one command live and die together, and with a worker that is told to end. A script that fails
        # leaves its server to the others: the server holds a shard.
        if self._ending_at is None and (code in _TOLD if part.is_worker else code != 0):
            self._code = seat.code
            if any(other.code is None for other in self._seats):
                log.warning(f"{seat.name} has ended ({how(code)}): what was started with it ends, too")
            self._end(signal.SIGTERM)

    async def _to_be_replaced(self, seat: Seat, part: Part, code: int) -> bool:
        """Whether another process is started in place of the ended one."""
        final = code == 0 or code in _TOLD or code in HOPELESS or (part.is_worker and code > 0)
        if final or not self._restart:
            return False
        if await self._over(part, code):
            log.warning(f"{seat.name} has ended ({how(code)}), and so has the job: it is not started again")
            return False
        if self._ending_at is not None:  # told to end while the coordinator was asked
            return False
        try:
            self._again.again(seat, code, code if code > 0 else 128 - code)
        except ChildFailedError as error:
            log.warning(f"{seat.name} has ended ({how(code)}) too often: it is not started again")
            self._error = error
            return False
        return True

    async def _over(self, part: Part, code: int) -> bool:
        """Whether there is nothing left to do for another process."""
        assert self._ask is not None
        status = await self._ask()
        if status is None:
            return code == env.JOB_FAILED_CODE
        return status.view.state in _OVER or (part.is_worker and status.finished)

    def _check_hung(self) -> None:
        """Kill servers that hang. Without a checkpoint they may hold the only copy of their shards, and stay."""
        status, self._answer = self._answer, None
        if status is not None and status.checkpoint:
            servers = [seat for seat, part in self._seats.items() if not part.is_worker]
            self._again.check_servers(time.monotonic(), status, servers)

    # ---- ending

    def on_signal(self, number: signal.Signals) -> None:
        """A person, or a supervisor, ends the command: its processes hear the signal. The second one kills them."""
        self._signals += 1
        if self._signals == 1:
            self._end(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        else:
            self._kill("is killed")

    def hand_on(self, number: signal.Signals) -> None:
        """Give a signal to the script, if it has a handler for it."""
        log.warning(hand_on({s.child.pid: s.name for s, part in self._seats.items() if part.is_worker}, number))

    def _end(self, number: signal.Signals) -> None:
        """Tell all processes to end; start none any more."""
        self._ending_at = self._ending_at or time.monotonic()
        for seat in self._seats:
            if seat.due is not None:
                seat.due, seat.code = None, 128 + number
            seat.child.terminate(number)

    def _kill(self, why: str) -> None:
        for seat in self._seats:
            if seat.child.running:
                log.warning(f"{seat.name} {why}")
                seat.child.kill()
