"""Starts processes by forks of a preloaded process where that is possible, and by themselves otherwise."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paramserver.preload.adopted import Adopter
from paramserver.preload.process import NotForkedError, Preloaded
from paramserver.preload.request import key_of
from paramserver.processes.process import Child
from paramserver.processes.starting import Command, Executing, Started

# How often a preloaded process that has ended is replaced.
_MOST = 3


@dataclass(slots=True)
class _Place:
    """The preloaded process for one environment. ``process``: None if there is none. ``ended``: how many have ended."""

    environment: Mapping[str, str]
    process: Preloaded | None
    watching: asyncio.Task[None] | None = None
    ended: int = 0


class Preloading:
    """A starter for one program, which is forked; every other program starts by itself.

    ``program``: how the command line of the program begins. ``loader``: the command line of the preloaded process.
    ``child``: makes a child process that is not started yet. ``own``: the prefix of variables that may differ between
    processes that are forked of the same preloaded process. ``say``: prints a line for people.
    """

    def __init__(
        self,
        program: Sequence[str],
        loader: Sequence[str],
        child: Callable[[], Child],
        own: str,
        say: Callable[[str], None],
    ) -> None:
        self._program, self._loader = list(program), list(loader)
        self._child = child
        self._own = own
        self._say = say
        self._plain = Executing()
        self.adopter = Adopter()
        self._places: dict[frozenset[tuple[str, str]], _Place] = {}

    async def prepare(self, environment: Mapping[str, str]) -> None:
        """Begin to preload a process for commands with this environment."""
        key = key_of(environment, self._own)
        if key not in self._places:
            place = self._places[key] = _Place(dict(key), None)
            await self._fill(place)

    async def start(self, command: Command) -> Started:
        """Start a process. Raises OSError."""
        process = self._for(command)
        if process is None:
            return await self._plain.start(command)
        try:
            return await process.fork(command)
        except NotForkedError as error:
            if not process.refusal:  # else people are told once
                self._say(f"a process starts without the preloaded process: {error}")
            return await self._plain.start(command)

    def _for(self, command: Command) -> Preloaded | None:
        """The preloaded process for this command; None if the command starts by itself."""
        if list(command.argv[: len(self._program)]) != self._program:
            return None
        place = self._places.get(key_of(command.environment, self._own))
        if place is None or place.process is None:
            return None
        return None if command.light and not place.process.ready else place.process

    async def _fill(self, place: _Place) -> None:
        process = Preloaded(self._child(), self.adopter)
        try:
            await process.start(self._loader, place.environment)
        except OSError as error:
            self._say(f"no process can be preloaded: {error.strerror}")
            return
        place.process = process
        place.watching = asyncio.create_task(self._watch(place, process))

    async def _watch(self, place: _Place, process: Preloaded) -> None:
        """Replace the preloaded process when it has ended; do without if it must not be forked."""
        assert process.child.exited is not None
        await asyncio.wait([process.child.exited])  # a task of its own, which goes on if this one is cancelled
        code = process.child.exited.result()
        place.process = None
        await process.close()
        if process.refusal:
            self._say(f"processes start without a preloaded process: {process.refusal}")
            return
        place.ended += 1
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        if place.ended > _MOST:
            self._say(f"the preloaded process has ended {place.ended} times ({how}): processes start without it")
            return
        self._say(f"the preloaded process ended unexpectedly ({how}), and another one is started")
        await self._fill(place)

    async def close(self) -> None:
        """End the preloaded processes. Processes that were forked of them go on."""
        watching = [place.watching for place in self._places.values() if place.watching is not None]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        for place in self._places.values():
            if place.process is not None:
                await place.process.close()


class Handed:
    """A starter for one program, which is forked of a process that somebody has handed over; ``other`` starts the rest.

    ``begins``: how the command line of the program begins. ``control``: the socket of the process that is forked.
    """

    def __init__(
        self, begins: Sequence[str], control: socket.socket, child: Child, other: Preloading | Executing
    ) -> None:
        self._begins = list(begins)
        self._other = other
        adopter = other.adopter if isinstance(other, Preloading) else Adopter()
        self._process = Preloaded(child, adopter, control)

    async def start(self, command: Command) -> Started:
        """Start a process. Raises OSError."""
        if list(command.argv[: len(self._begins)]) != self._begins:
            return await self._other.start(command)
        try:
            return await self._process.fork(command)
        except NotForkedError as error:
            raise ChildProcessError(f"no worker can be forked: {error}") from error
