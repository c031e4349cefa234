"""The ways between this process and the other one, from this side. Blocking.

A push is done when the other side has confirmed all of its bytes. A pull is asked for with a small message.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from functools import cache
from types import TracebackType
from typing import IO, Any, Protocol, cast

import torch
from torch.distributed import rpc

from benchmarks.launch import environment
from benchmarks.wire.groups import give, gloo, join, payload, take
from benchmarks.wire.peer import MESSAGE_BYTES, read_into, sizes
from paramserver.tensors.codec import chunk_frames, header_from, split_frame
from paramserver.tensors.dtypes import buffer_of, tensor_from
from paramserver.transport.base import Channel, Place
from paramserver.transport.bulk.channel import BulkChannel
from paramserver.transport.grpc.channel import connect
from paramserver.transport.grpcio import grpc
from paramserver.transport.limits import LIMITS
from paramserver.v1 import shard_pb2
from paramserver.worker.background import Background

_CALL_S = 60.0
_START_S = 60.0


class Path(Protocol):
    """One way. Each method moves ``count`` payloads of ``size`` bytes, one after the other."""

    def push(self, size: int, count: int) -> None:
        """From a tensor here to a tensor there."""

    def pull(self, size: int, count: int) -> None:
        """From a tensor there to a tensor here."""

    def both(self, size: int, count: int) -> None:
        """Each time a push and a pull at once."""


class Peer:
    """The other process, and the objects that all ways need. ``groups``: with gloo and PyTorch RPC."""

    def __init__(self, groups: bool = False) -> None:
        self.groups = groups
        self._directory = tempfile.TemporaryDirectory()
        self.background = Background()
        self.ports: dict[str, int] = {}
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Peer:
        where = self._directory.name if self.groups else ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.wire.peer", where],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            if self.groups:
                join(where, 0)
            line = self._output.readline()
            if not line:
                raise RuntimeError("the other process did not start; it says why above")
            self.ports = json.loads(line)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        self._process.kill()
        self._process.wait()
        self.background.close()
        self._directory.cleanup()

    @property
    def _output(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def begin(self, command: str) -> None:
        """Give a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def end(self) -> str:
        """The answer to the oldest command that has none."""
        return self._output.readline()

    def cpu_s(self) -> float:
        """CPU seconds that both processes have used so far."""
        self.begin("cpu")
        return float(self.end()) + time.process_time()

    def address(self, way: str) -> str:
        """Of a server in the other process."""
        return f"127.0.0.1:{self.ports[way]}"


class Tcp:
    """Sockets, `sendall` and `recv_into` preallocated memory."""

    def __init__(self, peer: Peer) -> None:
        self._sockets = [socket.create_connection(("127.0.0.1", peer.ports["tcp"]), 10.0) for _ in range(2)]
        for one in self._sockets:
            one.settimeout(_CALL_S)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = cache(_buffer)

    def push(self, size: int, count: int) -> None:
        """See `Path`."""
        peer, payload = self._sockets[0], self._buffer("push", size)
        for _ in range(count):
            peer.sendall(struct.pack("<cQ", b"<", size))
            peer.sendall(payload)
            assert peer.recv(1) == b"k"

    def pull(self, size: int, count: int) -> None:
        """See `Path`."""
        peer, payload = self._sockets[1], self._buffer("pull", size)
        for _ in range(count):
            peer.sendall(struct.pack("<cQ", b">", size))
            assert read_into(peer, payload)

    def both(self, size: int, count: int) -> None:
        """See `Path`. Not in step with each other: two threads."""
        pull = threading.Thread(target=self.pull, args=(size, count))
        pull.start()
        self.push(size, count)
        pull.join()


def _buffer(way: str, size: int) -> memoryview:
    return memoryview(bytearray(size))


class _Grpc:
    """The common part of the paths over gRPC: a loop in a thread of its own, as a worker has it."""

    def __init__(self, peer: Peer) -> None:
        self._background = peer.background

    def push(self, size: int, count: int) -> None:
        """See `Path`."""
        self._times(count, lambda: self._push(size), size)

    def pull(self, size: int, count: int) -> None:
        """See `Path`."""
        self._times(count, lambda: self._pull(size), size)

    def both(self, size: int, count: int) -> None:
        """See `Path`."""

        async def go() -> int:
            there, back = await asyncio.gather(self._push(size), self._pull(size))
            return there if there == back else -1

        self._times(count, go, size)

    def pings(self, count: int) -> None:
        """The smallest calls, one after the other, without leaving the loop."""

        async def go() -> None:
            for _ in range(count):
                await self._ping()

        self._background.run(go(), _CALL_S)

    def _times(self, count: int, work: Callable[[], Coroutine[Any, Any, int]], size: int) -> None:
        async def go() -> None:
            for _ in range(count):
                assert await work() == size

        self._background.run(go(), _CALL_S)

    async def _ping(self) -> None:
        raise NotImplementedError

    async def _push(self, size: int) -> int:
        raise NotImplementedError

    async def _pull(self, size: int) -> int:
        raise NotImplementedError


class Bare(_Grpc):
    """`grpc.aio` by itself, with payloads that are `bytes` already and pass as they are."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self._payloads: dict[int, list[bytes]] = {}

        async def open_channel() -> grpc.aio.Channel:
            return grpc.aio.insecure_channel(
                peer.address("bare"), options=LIMITS.client(), compression=grpc.Compression.NoCompression
            )

        self._channel = self._background.run(open_channel())
        self._call_ping: Any = self._channel.unary_unary("/bare/Ping")

    async def _ping(self) -> None:
        await self._call_ping(b"ping", timeout=_CALL_S)

    async def _push(self, size: int) -> int:
        if size not in self._payloads:
            self._payloads[size] = [bytes(part) for part in sizes(size)]
        call: Any = self._channel.stream_unary("/bare/Push")(timeout=_CALL_S)
        return await _send(call, self._payloads[size])

    async def _pull(self, size: int) -> int:
        total = 0
        start: Any = self._channel.unary_stream("/bare/Pull")
        call = start(str(size).encode(), timeout=_CALL_S)
        while (raw := await call.read()) is not grpc.aio.EOF:
            total += tensor_from(memoryview(raw), "float32").nbytes
        return total


class Stock(Bare):
    """`grpc.aio` with stock protobuf: the tensor in a `bytes` field, from `tobytes`."""

    async def _push(self, size: int) -> int:
        tensor = payload(size)
        messages = (shard_pb2.Frame(data=part.numpy().tobytes()) for part in parts(tensor, size))
        serialize = shard_pb2.Frame.SerializeToString
        return await _send(self._channel.stream_unary("/stock/Push", serialize)(timeout=_CALL_S), messages)

    async def _pull(self, size: int) -> int:
        total = 0
        parse = shard_pb2.Frame.FromString
        start: Any = self._channel.unary_stream("/stock/Pull", response_deserializer=parse)
        call = start(str(size).encode(), timeout=_CALL_S)
        while (message := await call.read()) is not grpc.aio.EOF:
            total += tensor_from(memoryview(message.data), "float32").nbytes
        return total


def parts(tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """A tensor of float32 in the messages that it is sent as."""
    return torch.split(tensor, [part // 4 for part in sizes(size)])


async def _send(call: Any, messages: Iterable[object]) -> int:
    for message in messages:
        await call.write(message)
    await call.done_writing()
    return int(await call)


class Ours(_Grpc):
    """Our frames over our transport `grpc`: a push is encoded from the tensor, a version was encoded once."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self._channel: Channel = connect(peer.address("ours"))

    async def _ping(self) -> None:
        await self._channel.call("Shard.Stats", shard_pb2.StatsRequest(), timeout=_CALL_S)

    def _place(self, size: int) -> Place | None:
        """Where payloads of this size are received."""
        return None

    async def _push(self, size: int) -> int:
        split = parts(payload(size), size)
        chunks = ((shard_pb2.ChunkRef(index=i, bytes=part.nbytes), buffer_of(part)) for i, part in enumerate(split))
        frames = chunk_frames(shard_pb2.PushHeader(chunks=len(split)), chunks)
        reply = await self._channel.upload("Shard.Push", frames, timeout=_CALL_S)
        return cast(shard_pb2.PushResponse, reply).version

    async def _pull(self, size: int) -> int:
        total = 0
        request = shard_pb2.PullRequest(min_version=size)
        calls = self._channel.download("Shard.Pull", request, timeout=_CALL_S, place=self._place(size))
        async with aclosing(calls) as frames:
            async for raw in frames:
                total += sum(tensor_from(data, "float32").nbytes for _, data in split_frame(raw)[1])
        return total


class OursBulk(Ours):
    """The same over our sockets beside gRPC. A pull is received into memory that is there, as it is in workers."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self._channel = BulkChannel(self._channel)
        self._room = cache(_buffer)

    def _place(self, size: int) -> Place | None:
        room = self._room("pull", size)

        def place(header: bytes, nbytes: int) -> memoryview:
            start = header_from(header).chunks[0].index * MESSAGE_BYTES
            return room[start : start + nbytes]

        return place


class Gloo:
    """`torch.distributed` with gloo: `send` and `recv` of tensors, and one byte back."""

    def __init__(self, peer: Peer) -> None:
        assert peer.groups
        self._peer = peer

    def push(self, size: int, count: int) -> None:
        """See `Path`."""
        self._exchange("push", size, count)

    def pull(self, size: int, count: int) -> None:
        """See `Path`."""
        self._exchange("pull", size, count)

    def both(self, size: int, count: int) -> None:
        """See `Path`."""
        self._exchange("both", size, count)

    def _exchange(self, order: str, size: int, count: int) -> None:
        self._peer.begin(f"gloo {order} {size} {count}")
        gloo(order, size, count, 1)
        self._peer.end()


class Rpc:
    """PyTorch RPC (TensorPipe over TCP): a function over there takes or returns a tensor."""

    def __init__(self, peer: Peer) -> None:
        assert peer.groups

    def push(self, size: int, count: int) -> None:
        """See `Path`."""
        for _ in range(count):
            assert rpc.rpc_sync("peer", take, (payload(size),)) == size

    def pull(self, size: int, count: int) -> None:
        """See `Path`."""
        for _ in range(count):
            assert rpc.rpc_sync("peer", give, (size,)).nbytes == size

    def both(self, size: int, count: int) -> None:
        """See `Path`."""
        for _ in range(count):
            there = rpc.rpc_async("peer", take, (payload(size),))
            back = rpc.rpc_async("peer", give, (size,))
            assert there.wait() == size
            assert back.wait().nbytes == size
