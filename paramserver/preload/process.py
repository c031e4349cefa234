"""The launcher's side of one preloaded process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping, Sequence

from paramserver.preload.adopted import Adopted, Adopter
from paramserver.preload.forking import READY
from paramserver.preload.request import Request
from paramserver.processes.process import Child
from paramserver.processes.starting import Command

# How long the imports may take, and a fork after that: a machine may be busy.
LOAD_S = 60.0
FORK_S = 10.0


class NotForkedError(Exception):
    """No process was forked; the text says why."""


class Preloaded:
    """One preloaded process. ``child``: not started yet. ``control``: of a process that somebody else has started."""

    def __init__(self, child: Child, adopter: Adopter, control: socket.socket | None = None) -> None:
        self.child = child
        self._adopter = adopter
        self._control = control
        # What the process has said after its imports: "ready", or why it must not be forked. "" until then.
        self._word = "" if control is None else READY.decode()
        self._said = asyncio.Event()
        if control is not None:
            control.setblocking(False)
            self._said.set()

    @property
    def ready(self) -> bool:
        """Whether a fork takes no longer than a fork."""
        return self._word == READY.decode()

    @property
    def refusal(self) -> str:
        """Why the process must not be forked, in words; "" if it may be, or has not said yet."""
        return "" if self.ready else self._word

    async def start(self, program: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it; its imports go on meanwhile. The program is told the number of a socket behind its arguments.

        Raises OSError.
        """
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        with its:
            await self.child.start([*program, str(its.fileno())], environment, (its.fileno(),))
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._on_word)

    def _on_word(self) -> None:
        assert self._control is not None
        try:
            word = self._control.recv(1 << 10)
        except ConnectionError:
            word = b""
        asyncio.get_running_loop().remove_reader(self._control)
        self._word = word.decode()
        self._said.set()

    async def fork(self, command: Command) -> Adopted:
        """The new process, which is a child of this process. Waits for the imports, 60 s at most.

        Raises NotForkedError. A process that does not answer is killed.
        """
        try:
            async with asyncio.timeout(LOAD_S):
                await self._said.wait()
        except TimeoutError:
            self.child.kill()
            raise NotForkedError(f"its imports have taken more than {LOAD_S:g} s") from None
        if not self.ready or self._control is None:
            raise NotForkedError(self._word or "it has ended")
        line, its = socket.socketpair()
        with line:
            line.setblocking(False)
            try:
                with its, self._adopter.adopting():
                    self._ask(command, its)
                    its.close()
                    pid = await self._answer(line)
                process = Adopted(pid)
            except OSError as error:
                raise NotForkedError(error.strerror or str(error)) from error
            with contextlib.suppress(OSError):  # else it has ended already, as its exit code says
                line.send(b"g")
        return process

    def _ask(self, command: Command, line: socket.socket) -> None:
        assert self._control is not None
        streams = {0: command.stdin, 1: command.stdout, 2: command.stderr}
        given = {number: fd for number, fd in streams.items() if fd is not None}
        given |= {fd: fd for fd in command.pass_fds}
        request = Request(os.getpid(), command.argv, command.environment, tuple(given))
        memory = os.memfd_create("request")
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(request.encode())
            socket.send_fds(self._control, [b"f"], [memory, line.fileno(), *given.values()])
        finally:
            os.close(memory)

    async def _answer(self, line: socket.socket) -> int:
        try:
            async with asyncio.timeout(FORK_S):
                answer = await asyncio.get_running_loop().sock_recv(line, 64)
        except TimeoutError:
            self.child.kill()
            raise NotForkedError(f"it has not forked within {FORK_S:g} s") from None
        if not answer:
            raise NotForkedError("it could not fork, or has ended")
        return int(answer)

    async def close(self) -> None:
        """End it. Processes that were forked of it go on."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        self.child.kill()
        if self.child.exited is not None:
            await asyncio.wait([self.child.exited], timeout=FORK_S)
