"""A TCP proxy that misbehaves on demand, between a client and a Redis or gRPC server.

>>> proxy = Proxy("127.0.0.1:6379")          # or "unix:/path/to/socket"
>>> await proxy.start()
>>> store = open_store(f"redis://{proxy.address}/0", "job:")
>>> proxy.cut(Way.REPLY)                     # the next reply does not arrive; the connection is reset
>>> ...
>>> proxy.check("cut")                       # raises if that never happened
>>> await proxy.stop()

Requests flow from client to server, replies from server to client. Every fault counts in `Proxy.fired` when it takes
effect, under the name of the method that ordered it. All methods belong into the event loop that runs the proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import ssl
import struct
from collections import Counter
from dataclasses import dataclass, field

CONNECT_S = 10.0
_CHUNK_BYTES = 65536
# How many chunks wait in the proxy before it stops reading; the sender then notices.
_CHUNKS = 256
# With a limit on the rate, data leave in pieces that take about this long.
_TICK_S = 0.02


class Way(enum.Enum):
    """A direction of the data."""

    REQUEST = "client to server"
    REPLY = "server to client"


@dataclass(slots=True)
class _Faults:
    """What happens to the data of one direction, in all connections."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    piece_bytes: int = 0
    piece_gap_s: float = 0.0
    # The connection is reset when so many more bytes have passed; None: never.
    cut_after: int | None = None
    cuts_left: int = 0
    cut_size: int = 0
    flowing: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """Passes connections on to ``upstream``, "host:port" or "unix:/path". With ``tls``, its clients speak that.

    `connections` counts those that clients have opened so far, `fired` the faults by name.
    """

    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None) -> None:
        self.fired: Counter[str] = Counter()
        self.connections = 0
        self._upstream = upstream
        self._tls = tls
        self._faults = {way: _Faults() for way in Way}
        self._reserved: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1") -> None:
        """Listen on a free port of ``host``."""
        # A second socket keeps the port while the proxy refuses connections.
        self._reserved = _bound(host, 0)
        for faults in self._faults.values():
            faults.flowing.set()
        await self.accept()

    async def stop(self) -> None:
        """Close everything. May be repeated."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    async def __aenter__(self) -> Proxy:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        """Where it listens, "host:port"; it stays the same until :meth:`stop`."""
        host, port = self._place()
        return f"{host}:{port}"

    @property
    def open(self) -> int:
        """Connections of clients that are open now."""
        return len(self._links)

    def check(self, *names: str) -> None:
        """Raise AssertionError unless each of these faults has fired."""
        idle = [name for name in names if not self.fired[name]]
        if idle:
            raise AssertionError(f"faults that never fired: {', '.join(idle)}; fired: {dict(self.fired)}")

    # ---- faults

    def delay(self, way: Way, latency_s: float) -> None:
        """What arrives from now on takes ``latency_s`` longer; bandwidth does not suffer. 0: no longer."""
        self._faults[way].latency_s = latency_s

    def throttle(self, way: Way, bytes_per_s: float) -> None:
        """No more than so many bytes per second and connection. 0: no limit."""
        self._faults[way].bytes_per_s = bytes_per_s

    def slice(self, way: Way, piece_bytes: int, gap_s: float = 0.0) -> None:
        """Pass data in pieces of at most so many bytes, each a write of its own. 0: as they come."""
        self._faults[way].piece_bytes, self._faults[way].piece_gap_s = piece_bytes, gap_s

    def pause(self, *ways: Way) -> None:
        """Nothing passes any more, not even the end of a connection; new ones are accepted. No ways: both."""
        for way in ways or Way:
            self._faults[way].flowing.clear()

    def resume(self) -> None:
        """After :meth:`pause`: what was held back passes now."""
        for faults in self._faults.values():
            faults.flowing.set()

    def cut(self, way: Way, after_bytes: int = 0, times: int = 1) -> None:
        """Reset a connection when ``after_bytes`` more have passed this way (over all connections) and one more comes.

        ``times``: do so again, counting anew, so many times. Nothing of the other direction is held back.
        """
        faults = self._faults[way]
        faults.cut_after, faults.cut_size, faults.cuts_left = after_bytes, after_bytes, times

    def reset(self) -> None:
        """Reset all connections now; new ones are accepted."""
        for link in list(self._links):
            self.fired["reset"] += 1
            link.reset()

    def refuse(self) -> None:
        """New connections are refused. Those that are open stay; to be rid of them, :meth:`reset`.

        It counts as fired at once: whether anybody tried, only the client knows.
        """
        if self._server is not None:
            self._server.close()
            self._server = None
            self.fired["refuse"] += 1

    async def accept(self) -> None:
        """After :meth:`refuse`: accept connections again, at the same address."""
        if self._server is None:
            host, port = self._place()
            listener = _bound(host, port)
            self._server = await asyncio.start_server(self._serve, sock=listener, ssl=self._tls)

    async def heal(self) -> None:
        """No faults any more. What is broken stays broken."""
        for faults in self._faults.values():
            faults.latency_s = faults.bytes_per_s = faults.piece_gap_s = 0.0
            faults.piece_bytes, faults.cut_after = 0, None
        self.resume()
        await self.accept()

    # ---- connections

    def _place(self) -> tuple[str, int]:
        assert self._reserved is not None, "the proxy is not started"
        host, port = self._reserved.getsockname()[:2]
        return str(host), int(port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._connect(reader, writer, task)
        except asyncio.CancelledError:
            pass  # a reset or stop(): asyncio's server would complain about a handler that ends so
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                if self._upstream.startswith("unix:"):
                    upstream = await asyncio.open_unix_connection(self._upstream.removeprefix("unix:"))
                else:
                    host, _, port = self._upstream.rpartition(":")
                    upstream = await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError:
            return  # nobody is there: the client sees its connection closed
        link = _Link(task, writer, upstream[1])
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(link, Way.REQUEST, reader, upstream[1]))
                group.create_task(self._pump(link, Way.REPLY, upstream[0], writer))
        finally:
            self._links.discard(link)
            upstream[1].transport.abort()

    async def _pump(self, link: _Link, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction until it ends."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS)
        taking = asyncio.create_task(self._take(way, reader, chunks))
        try:
            while True:
                due, data = await chunks.get()
                await self._wait(way, due)
                if not data:
                    break
                await self._pass(link, way, data, writer)
            if writer.can_write_eof():
                writer.write_eof()
            else:
                writer.close()
        except OSError:
            link.reset()
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    async def _take(self, way: Way, reader: asyncio.StreamReader, chunks: asyncio.Queue[tuple[float, bytes]]) -> None:
        """Read ahead, and note when each chunk may go on. The last one is empty."""
        loop = asyncio.get_running_loop()
        due = 0.0
        while True:
            try:
                data = await reader.read(_CHUNK_BYTES)
            except OSError:
                data = b""
            latency_s = self._faults[way].latency_s
            if latency_s and data:
                self.fired["delay"] += 1
            due = max(due, loop.time() + latency_s)
            await chunks.put((due, data))
            if not data:
                return

    async def _wait(self, way: Way, due: float) -> None:
        delay_s = due - asyncio.get_running_loop().time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        faults = self._faults[way]
        if not faults.flowing.is_set():
            self.fired["pause"] += 1
            await faults.flowing.wait()

    async def _pass(self, link: _Link, way: Way, data: bytes, writer: asyncio.StreamWriter) -> None:
        """Write, in pieces if need be. Raises ConnectionResetError if the connection was cut."""
        faults = self._faults[way]
        while data:
            size = len(data)
            if faults.piece_bytes:
                size = faults.piece_bytes
            if faults.bytes_per_s:
                size = min(size, max(1, int(faults.bytes_per_s * _TICK_S)))
            if faults.cut_after is not None:
                if faults.cut_after == 0:
                    faults.cuts_left -= 1
                    faults.cut_after = faults.cut_size if faults.cuts_left else None
                    self.fired["cut"] += 1
                    raise ConnectionResetError("cut")
                size = min(size, faults.cut_after)
                faults.cut_after -= min(size, len(data))
            piece, data = data[:size], data[size:]
            writer.write(piece)
            await writer.drain()
            if faults.piece_bytes and data:
                self.fired["slice"] += 1
                await asyncio.sleep(faults.piece_gap_s)
            if faults.bytes_per_s:
                self.fired["throttle"] += 1
                await asyncio.sleep(len(piece) / faults.bytes_per_s)


class _Link:
    """A client's connection and ours to the server."""

    def __init__(self, task: asyncio.Task[None], *writers: asyncio.StreamWriter) -> None:
        self._task = task
        self._writers = writers

    def reset(self) -> None:
        """End both at once; the peers see a reset, not an orderly end."""
        for writer in self._writers:
            connection: socket.socket | None = writer.get_extra_info("socket")
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._task.cancel()


def _bound(host: str, port: int) -> socket.socket:
    """A socket at this address that may share it with others of ours."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound
