"""Uploads of one contribution that take turns: each server in its turn is sent a chunk, and not much is under way.

Left to themselves, connections share links unevenly: some are done long before others, which then cannot fill their
links alone. So chunks go out to one server after the other, beginning with another one on each worker, and no more than
a *window* of bytes is under way to all of them together: then the queues before the links stay short, and all
connections advance at one pace. Servers tell what has arrived in the pull that is open meanwhile.

This is about speed only. Where nobody tells, or nothing arrives for long, nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from paramserver.v1 import shard_pb2

# If nothing arrives for so long, somebody is in trouble, or the link is too slow for this: everything goes as it can.
PATIENCE_S = 0.5
# What is under way where servers are as many as workers, at least: on a link of 100 Mb/s 40 ms, on one of 1 Gb/s 4.
_WINDOW_BYTES = 512 << 10
_WINDOW_CHUNKS = 8


class Flow:
    """One contribution. Lives in the event loop.

    ``bytes_of``: by server, what it is sent in all. ``first``: who begins, modulo the servers. ``told``: whether all
    servers tell, just now, what has arrived. ``patience_s``: if nothing arrives for so long, nobody waits any more.
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
        # By server: the sizes of the chunks that are under way, in their order, and how many have arrived before them.
        self._flying: list[deque[int]] = [deque() for _ in bytes_of]
        self._acked = [0 for _ in bytes_of]
        self._under_way = 0
        self._asking: dict[int, tuple[int, asyncio.Future[None]]] = {}
        self._given_up = False
        self._watch: asyncio.TimerHandle | None = None

    async def keep(self, server: int, frames: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """The frames for one server, a chunk in each but the first, each when its turn comes."""
        header = True
        try:
            async for frame in frames:
                if not header:
                    await self._room(server, len(frame))
                yield frame
                header = False
        finally:
            self._ends(server)

    def acknowledged(self, server: int, chunks: int) -> None:
        """So many chunks have arrived at a server, all together."""
        flying = self._flying[server]
        for _ in range(min(chunks - self._acked[server], len(flying))):
            self._under_way -= flying.popleft()
            self._acked[server] += 1
        self.grant()

    async def _room(self, server: int, nbytes: int) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._asking[server] = nbytes, turn
        loop.call_soon(self.grant)  # when the others have asked, too
        if self._watch is None:
            self._watch = loop.call_later(self._patience_s, self._look, sum(self._acked))
        await turn

    def _look(self, before: int) -> None:
        """Some time has passed since so many chunks had arrived."""
        self._watch = None
        if not self._asking:
            return
        now = sum(self._acked)
        self._given_up = self._given_up or now == before
        self._watch = asyncio.get_running_loop().call_later(self._patience_s, self._look, now)
        self.grant()

    def grant(self) -> None:
        """Let go what may leave: more has arrived, or nobody tells any more."""
        while self._asking:
            server = min(self._asking, key=self._rank)
            nbytes, turn = self._asking[server]
            room = not self._under_way or self._under_way + nbytes <= self._window
            if not room and not self._given_up and self._told():
                return
            del self._asking[server]
            self._flying[server].append(nbytes)
            self._under_way += nbytes
            self._sent[server] += nbytes
            if not turn.done():
                turn.set_result(None)

    def _rank(self, server: int) -> tuple[float, int]:
        """Who has been sent the smallest part of what it is sent comes first."""
        return self._sent[server] / max(1, self._bytes_of[server]), (server - self._first) % len(self._sent)

    def _ends(self, server: int) -> None:
        """The upload is over, however it ended: what is under way to there counts no more."""
        self._asking.pop(server, None)
        self._under_way -= sum(self._flying[server])
        self._flying[server].clear()
        self.grant()


class FlowControl:
    """All contributions of a worker that are leaving. Lives in the event loop."""

    def __init__(self, servers: int, chunk_bytes: int) -> None:
        """``chunk_bytes``: of a chunk, usually."""
        self._window = max(_WINDOW_BYTES, _WINDOW_CHUNKS * chunk_bytes)
        self._flows: dict[int, Flow] = {}
        # By server, the open pulls that tell of what arrives.
        self._telling = [0] * servers

    @contextmanager
    def leaving(self, nonce: int, bytes_of: Sequence[int], first: int, workers: int = 1) -> Iterator[None]:
        """Meanwhile this contribution leaves, with so many bytes for each server; large ones take turns.

        ``workers``: how many there are. If they are more than servers, each has less under way, since what they send
        meets before the servers.
        """
        servers = len(bytes_of)
        window = self._window * servers // max(servers, workers)
        if nonce and servers > 1 and sum(bytes_of) > window:
            self._flows[nonce] = Flow(bytes_of, first, window, lambda: all(self._telling), PATIENCE_S)
        try:
            yield
        finally:
            self._flows.pop(nonce, None)

    def flow(self, nonce: int) -> Flow | None:
        """Those of a contribution, if it takes any."""
        return self._flows.get(nonce)

    @contextmanager
    def telling(self, server: int, tells: bool) -> Iterator[None]:
        """Meanwhile there is a pull that, if it ``tells``, brings word of what has arrived at a server."""
        self._telling[server] += tells
        try:
            yield
        finally:
            self._telling[server] -= tells
            for flow in self._flows.values():
                flow.grant()

    def acknowledged(self, server: int, news: Iterable[shard_pb2.Ack]) -> None:
        """What a server tells."""
        for one in news:
            if one.nonce in self._flows:
                self._flows[one.nonce].acknowledged(server, one.chunks)
