"""A worker whose host has another one that pulls: takes weights from that one's memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress

from paramserver.core.layout.host_weights import Give
from paramserver.transport.shm.channel import Asking, join
from paramserver.transport.shm.meeting import connected, receive
from paramserver.transport.shm.segments import Foreign
from paramserver.v1 import shard_pb2

# A worker that pulls answers within half a second, if it is alive.
_SILENT_S = 4.0
_METHOD = "Host.Take"


class _Line(Asking):
    """Tells when the other side is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.over = asyncio.Event()

    def lost(self) -> None:
        """See `Asking`."""
        super().lost()
        self.over.set()


class Guest:
    """The connection to the worker that pulls. Made by `meet`."""

    def __init__(self, line: _Line, memory: Foreign) -> None:
        self.memory = memory
        self._line = line

    async def take(self, version: int, reading: Sequence[int]) -> Give | str | None:
        """Where ``version`` or a later one lies, once it does; or the reason why it does not, in words.

        None: the worker that pulls is gone.
        """
        request = shard_pb2.PullRequest(min_version=version, shared=shard_pb2.SharedPull(reading=reading))
        raw = request.SerializeToString()
        while True:
            try:
                async with asyncio.timeout(_SILENT_S):
                    answer = await self._line.ask(_METHOD, raw)
            except TimeoutError:
                return f"it has said nothing for {_SILENT_S:g} s"
            if answer is None:
                return None
            if answer.error:
                return answer.text
            header = shard_pb2.PullHeader.FromString(answer.message)
            if header.ready:
                return Give(0, header.version, header.slot)

    async def lost(self) -> None:
        """Wait until the worker that pulls is gone."""
        await self._line.over.wait()

    async def close(self) -> None:
        """Hang up. The memory stays readable."""
        self._line.close()


async def meet(name: str, nbytes: int) -> Guest:
    """Connect to the worker that pulls, whose memory has ``nbytes``. Raises OSError or ValueError."""
    connection = connected(name)
    try:
        await _readable(connection)
        (fd,) = receive(connection, 1)
        memory = Foreign(fd, nbytes)
        line = _Line()
        await join(line, connection)
    except TimeoutError as error:
        connection.close()
        raise OSError("the worker that pulls does not answer") from error
    except BaseException:
        connection.close()
        raise
    return Guest(line, memory)


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    come = asyncio.Event()
    loop.add_reader(connection.fileno(), come.set)
    try:
        async with asyncio.timeout(_SILENT_S):
            await come.wait()
    finally:
        with suppress(OSError):
            loop.remove_reader(connection.fileno())
