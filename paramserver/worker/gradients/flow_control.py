"""Flow control of pushes: chunks go to one server after the other, and a window bounds the bytes on their way.

Without flow control, connections share links unevenly: some connections end long before others, and the remaining ones
cannot fill their links alone. Therefore a worker sends chunks to its servers in turn; each worker begins with another
server. At most a *window* of bytes is on its way to all servers together. This keeps the queues of the links short, and
all connections advance at one pace. Servers acknowledge chunks in the answer to the pull that is open meanwhile.

Flow control changes the speed only. If servers send no acknowledgements, or no chunk arrives for half a second, chunks
leave without waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from paramserver.frames import AnyFrame
from paramserver.v1 import shard_pb2

# If no chunk is acknowledged for so long, a server is in trouble or the link is very slow: nothing waits any more.
PATIENCE_S = 0.5
# The smallest window if there are as many servers as workers: 40 ms on a link of 100 Mb/s, 4 ms on one of 1 Gb/s.
_WINDOW_BYTES = 512 << 10
_WINDOW_CHUNKS = 8


class Flow:
    """The uploads of one contribution to all servers. Lives in the event loop.

    ``bytes_of``: bytes of the contribution by shard. ``first``: the server that is sent the first chunk, modulo their
    number. ``window``: in bytes. ``told``: whether all servers send acknowledgements at the moment. ``patience_s``: if
    no chunk is acknowledged for so long, no upload waits any more.
    """

    def __init__(
        self,
        bytes_of: Sequence[int],
        first: int,
        window: int,
        told: Callable[[], bool],
        patience_s: float,
    ) -> None:
        self._bytes_of, self._first, self._window = bytes_of, first, window
        self._told, self._patience_s = told, patience_s
        self._sent = [0 for _ in bytes_of]
        # By shard: the sizes of the chunks on their way, in order, and how many chunks before them were acknowledged.
        self._flying: list[deque[int]] = [deque() for _ in bytes_of]
        self._acked = [0 for _ in bytes_of]
        self._under_way = 0
        self._asking: dict[int, tuple[int, asyncio.Future[None]]] = {}
        self._given_up = False
        self._watch: asyncio.TimerHandle | None = None

    async def keep(self, shard: int, frames: AsyncIterator[AnyFrame]) -> AsyncGenerator[AnyFrame, None]:
        """The frames for one server, each when it may leave. Every frame but the first, the header, holds one chunk."""
        header = True
        try:
            async for frame in frames:
                if not header:
                    await self._room(shard, len(frame))
                yield frame
                header = False
        finally:
            self._ends(shard)

    def acknowledged(self, shard: int, chunks: int) -> None:
        """A server has acknowledged ``chunks`` chunks in all."""
        flying = self._flying[shard]
        for _ in range(min(chunks - self._acked[shard], len(flying))):
            self._under_way -= flying.popleft()
            self._acked[shard] += 1
        self.grant()

    async def _room(self, shard: int, nbytes: int) -> None:
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        self._asking[shard] = nbytes, granted
        loop.call_soon(self.grant)  # when the others have asked, too
        if self._watch is None:
            self._watch = loop.call_later(self._patience_s, self._look, sum(self._acked))
        await granted

    def _look(self, before: int) -> None:
        """``patience_s`` ago ``before`` chunks had been acknowledged: give up if there are no more."""
        self._watch = None
        if not self._asking:
            return
        now = sum(self._acked)
        self._given_up = self._given_up or now == before
        self._watch = asyncio.get_running_loop().call_later(self._patience_s, self._look, now)
        self.grant()

    def grant(self) -> None:
        """Let the next chunks leave as far as the window has room, or if no server acknowledges any more."""
        while self._asking:
            shard = min(self._asking, key=self._rank)
            nbytes, granted = self._asking[shard]
            room = not self._under_way or self._under_way + nbytes <= self._window
            if not room and not self._given_up and self._told():
                return
            del self._asking[shard]
            self._flying[shard].append(nbytes)
            self._under_way += nbytes
            self._sent[shard] += nbytes
            if not granted.done():
                granted.set_result(None)

    def _rank(self, shard: int) -> tuple[float, int]:
        """The server that was sent the smallest part of its bytes comes first."""
        return self._sent[shard] / max(1, self._bytes_of[shard]), (shard - self._first) % len(self._sent)

    def _ends(self, shard: int) -> None:
        """The upload to a server has ended or failed: its chunks no longer fill the window."""
        self._asking.pop(shard, None)
        self._under_way -= sum(self._flying[shard])
        self._flying[shard].clear()
        self.grant()


class FlowControl:
    """Flow control of all contributions that a worker is pushing. Lives in the event loop."""

    def __init__(self, shards: int, chunk_bytes: int) -> None:
        """``chunk_bytes``: the usual size of a chunk."""
        self._window = max(_WINDOW_BYTES, _WINDOW_CHUNKS * chunk_bytes)
        self._flows: dict[int, Flow] = {}
        # By shard, the number of open pulls whose answers carry acknowledgements.
        self._telling = [0] * shards

    @contextmanager
    def leaving(self, nonce: int, bytes_of: Sequence[int], first: int, workers: int = 1) -> Iterator[None]:
        """Context of one push of ``bytes_of`` bytes to each server. Those larger than the window are controlled.

        ``workers``: the number of workers. If there are more workers than servers, the window of each is smaller, since
        the links of the servers are shared.
        """
        shards = len(bytes_of)
        window = self._window * shards // max(shards, workers)
        if nonce and shards > 1 and sum(bytes_of) > window:
            self._flows[nonce] = Flow(bytes_of, first, window, lambda: all(self._telling), PATIENCE_S)
        try:
            yield
        finally:
            self._flows.pop(nonce, None)

    def flow(self, nonce: int) -> Flow | None:
        """The uploads of a contribution; None if they are not controlled."""
        return self._flows.get(nonce)

    @contextmanager
    def telling(self, shard: int, tells: bool) -> Iterator[None]:
        """Context of one open pull; ``tells``: its answer carries acknowledgements of a server."""
        self._telling[shard] += tells
        try:
            yield
        finally:
            self._telling[shard] -= tells
            for flow in self._flows.values():
                flow.grant()

    def acknowledged(self, shard: int, news: Iterable[shard_pb2.Ack]) -> None:
        """A server sent these acknowledgements."""
        for one in news:
            if one.nonce in self._flows:
                self._flows[one.nonce].acknowledged(shard, one.chunks)
