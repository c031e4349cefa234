"""A worker whose host has another one with the seat: takes weights from its memory, and offers contributions to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress

from paramserver.core.layout.host_weights import Give
from paramserver.transport.shm.channel import Asking, join
from paramserver.transport.shm.meeting import connected, receive
from paramserver.transport.shm.segments import Foreign, Segment
from paramserver.v1 import shard_pb2
from paramserver.v1.local_pb2 import Envelope, HostShare

# The worker with the seat answers within half a second, if it is alive.
SILENT_S = 4.0
# An offer is answered when all servers have counted it. Meanwhile a worker looks so often whether the other is alive.
_LOOK_S = 1.0
# The calls: a version is wanted; these slices are to be expected; a contribution is offered.
TAKE, SHARE, OFFER = "Host.Take", "Host.Share", "Host.Offer"
_BYTE = b"\n"


_SILENT = f"it has said nothing for {SILENT_S:g} s"


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
        self._share = HostShare()

    async def take(self, version: int, reading: Sequence[int]) -> Give | str | None:
        """Where ``version`` or a later one lies, once it does; or the reason why it does not, in words.

        None: the worker with the seat is gone.
        """
        request = shard_pb2.PullRequest(min_version=version, shared=shard_pb2.SharedPull(reading=reading))
        raw = request.SerializeToString()
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    answer = await self._line.ask(TAKE, raw)
            except TimeoutError:
                return _SILENT
            if answer is None:
                return None
            if answer.error:
                return answer.text
            header = shard_pb2.PullHeader.FromString(answer.message)
            if header.ready:
                return Give(0, header.version, header.slot)

    def expect(self, share: HostShare) -> None:
        """Say which slices this worker will offer."""
        self._share = share
        self._line.post(Envelope(method=SHARE, message=share.SerializeToString()))

    async def offer(self, header: shard_pb2.PushHeader) -> bool | str | None:
        """Offer the contribution that lies in a slot of the inbox. True: it counts. False: it has to be pushed.

        In words: why the other worker is not to be asked for a while. None: the worker with the seat is gone.
        """
        asked = asyncio.ensure_future(self._line.ask(OFFER, header.SerializeToString()))
        try:
            while not asked.done():
                await asyncio.wait([asked], timeout=_LOOK_S)
                if not asked.done() and not await self._alive():
                    return _SILENT
        finally:
            asked.cancel()
        answer = asked.result()
        if answer is None:
            return None
        if answer.error:
            return answer.text
        return shard_pb2.PushResponse.FromString(answer.message).outcome == shard_pb2.OUTCOME_ACCEPTED

    async def _alive(self) -> bool:
        try:
            async with asyncio.timeout(SILENT_S):
                await self._line.ask(SHARE, self._share.SerializeToString())
        except TimeoutError:
            return False
        return True

    async def lost(self) -> None:
        """Wait until the worker with the seat is gone."""
        await self._line.over.wait()

    async def close(self) -> None:
        """Hang up. The memory stays readable."""
        self._line.close()


async def meet(name: str, nbytes: int, inbox: Segment) -> Guest:
    """Connect to the worker with the seat, whose memory has ``nbytes``. Raises OSError or ValueError.

    ``inbox``: in which this worker offers contributions.
    """
    connection = connected(name)
    try:
        await readable(connection)
        (fd,) = receive(connection, 1)
        memory = Foreign(fd, nbytes)
        socket.send_fds(connection, [_BYTE], [inbox.reading_fd])
        line = _Line()
        await join(line, connection)
    except TimeoutError as error:
        connection.close()
        raise OSError("the worker with the seat does not answer") from error
    except BaseException:
        connection.close()
        raise
    return Guest(line, memory)


async def readable(connection: socket.socket) -> None:
    """Wait until something has come. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    come = asyncio.Event()
    loop.add_reader(connection.fileno(), come.set)
    try:
        async with asyncio.timeout(SILENT_S):
            await come.wait()
    finally:
        with suppress(OSError):
            loop.remove_reader(connection.fileno())
