"""Processes that share one event loop: each can be stopped as by SIGSTOP, go on, or be killed, without the others.

Every step of every task of a process passes through a gate. What it calls and what it answers are tasks of their own
process, as they would be on machines apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextvars import Context, ContextVar
from typing import Any, TypeVar

from paramserver.transport.addresses import split_shard
from paramserver.transport.base import Channel, Method
from paramserver.transport.memory import MemoryChannel, MemoryNetwork, MemoryServer
from tests.support.cluster.faults import FaultPlan, FaultyChannel

T = TypeVar("T")

_process: ContextVar[Process | None] = ContextVar("process", default=None)


class Killed(BaseException):
    """Raised where a process has killed itself in the middle of its code: not one line more of it runs."""


def running_process() -> Process | None:
    """The process whose code runs here, None if it is none of these."""
    return _process.get()


class Process:
    """The tasks of one process, and its way out to all others."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.out = FaultPlan()
        self.killed = False
        # How many steps were held back at the gate.
        self.held = 0
        self._goes = asyncio.Event()
        self._goes.set()

    def run_in(self, work: Callable[[], T]) -> T:
        """Call a function whose new tasks are of this process."""
        context = Context()
        context.run(_process.set, self)
        return context.run(work)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task of this process."""
        return self.run_in(lambda: asyncio.get_running_loop().create_task(work))

    def pause(self) -> None:
        """No code of this process runs any more. Its connections stay; its time goes on."""
        self._goes.clear()

    def resume(self) -> None:
        """It goes on where it was."""
        self._goes.set()

    def kill(self) -> None:
        """As SIGKILL: no code of it runs any more, not even on its way out."""
        self.killed = True
        self.pause()

    def bury(self) -> None:
        """After a test: end what a killed or paused process has left; it reaches nobody."""
        self.out.cut()
        self.resume()

    @property
    def paused(self) -> bool:
        """Whether it stands still."""
        return not self._goes.is_set()

    async def gated(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine, each step of which waits at the gate."""
        result: T = await _Steps(self, work)
        return result

    async def wait_to_go(self) -> None:
        """Returns at once unless the process is paused."""
        self.held += 1
        await self._goes.wait()


class _Steps:
    def __init__(self, process: Process, work: Coroutine[Any, Any, Any]) -> None:
        self._process, self._work = process, work

    def _gate(self) -> Generator[Any, Any, BaseException | None]:
        error: BaseException | None = None
        while self._process.paused:
            try:
                yield from self._process.wait_to_go().__await__()
            except asyncio.CancelledError as cancelled:  # delivered when it goes on
                error = cancelled
        return error

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        while True:
            error = (yield from self._gate()) or error
            try:
                step = self._work.send(None) if error is None else self._work.throw(error)
            except StopIteration as end:
                return end.value
            except Killed:  # nobody hears of it
                yield from self._gate()
                raise asyncio.CancelledError from None
            error = None
            try:
                yield step
            except BaseException as thrown:
                error = thrown


def install(loop: asyncio.AbstractEventLoop) -> None:
    """From now on new tasks of this loop belong to the process that starts them."""

    def factory(
        loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> asyncio.Task[Any]:
        process = context.get(_process) if context is not None else _process.get()
        if process is None:
            return asyncio.Task(work, loop=loop, context=context)
        task = asyncio.Task(process.gated(work), loop=loop, context=context)
        task.add_done_callback(lambda _: work.close())  # cancelled before its first step, it never began
        return task

    loop.set_task_factory(factory)  # type: ignore[arg-type]


class _ProcessServer(MemoryServer):
    """Its calls are answered by tasks of its process."""

    process: Process

    def start(self, method: Method, work: Callable[[], Coroutine[Any, Any, T]], shard: int | None) -> asyncio.Task[T]:
        return self.process.run_in(lambda: super(_ProcessServer, self).start(method, work, shard))


class Network(MemoryNetwork):
    """Lines can be cut at either end: what goes out of a process, and what comes in at an address."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[str, FaultPlan] = {}
        # What each outgoing line has opened.
        self._opened: list[tuple[FaultPlan, MemoryChannel]] = []

    def line(self, address: str) -> FaultPlan:
        """What comes in at this address, whoever answers there."""
        return self._lines.setdefault(address, FaultPlan())

    def serve_in(self, process: Process, address: str, services: Sequence[tuple[str, object]]) -> None:
        """Answer calls to ``address`` in this process."""
        assert address not in self._servers, f"{address} is in use"
        self.line(address).heal()
        self._servers[address] = server = _ProcessServer(address, services, self._forget)
        server.process = process

    def end(self, process: Process, address: str) -> None:
        """Kill the process at this address; whoever waits for it hears that the connection is broken."""
        process.kill()
        self.kill(address)
        self.line(address).cut()

    def connect_from(self, out: FaultPlan) -> Callable[[str], Channel]:
        """How somebody whose outgoing line is ``out`` reaches addresses."""

        def connect(address: str) -> Channel:
            channel = self.connect(address)
            self._opened.append((out, channel))
            return FaultyChannel(FaultyChannel(channel, self.line(split_shard(address)[0])), out)

        return connect

    def hang_up(self, out: FaultPlan) -> None:
        """Break what goes out of a dead process: its peers notice at once, as they do when sockets are closed."""
        for line, channel in self._opened:
            if line is out:
                channel.break_off()
