"""The other process: `python -m benchmarks.wire.peer DIRECTORY`. It answers on all ways.

It prints its ports as JSON. Then each line of its input is a command, answered with a line: "cpu" with the CPU seconds
it has used; "gloo ORDER SIZE COUNT" takes part in so many exchanges of gloo, and the answer is empty. It ends with its
input.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch

from benchmarks.wire.groups import gloo, join
from paramserver.frames import AnyFrame, Frame
from paramserver.tensors.codec import frame_of, split_frame
from paramserver.tensors.dtypes import tensor_from
from paramserver.transport.allocation import keep_memory
from paramserver.transport.bulk import server as bulk
from paramserver.transport.grpc.server import serve
from paramserver.transport.grpcio import grpc
from paramserver.transport.limits import LIMITS
from paramserver.v1 import shard_pb2

# Of one message; larger payloads are several.
MESSAGE_BYTES = 4 << 20


def sizes(total: int) -> list[int]:
    """The messages that a payload is sent as, in bytes."""
    return [min(MESSAGE_BYTES, total - at) for at in range(0, total, MESSAGE_BYTES)]


# ---- raw TCP: "<order><size>", then the payload one way or the other, then one byte back


def answer_tcp(server: socket.socket) -> None:
    """Serve each connection in a thread of its own."""
    while True:
        try:
            peer, _ = server.accept()
        except OSError:
            return
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_talk, args=(peer,), daemon=True).start()


def _talk(peer: socket.socket) -> None:
    buffers: dict[int, memoryview] = {}
    head = memoryview(bytearray(9))
    while read_into(peer, head):
        order, size = struct.unpack("<cQ", head)
        if size not in buffers:
            buffers[size] = memoryview(bytearray(size))
        view = buffers[size]
        if order == b"<":
            read_into(peer, view)
            peer.sendall(b"k")
        else:
            peer.sendall(view)


def read_into(peer: socket.socket, view: memoryview) -> bool:
    """Fill the view; False if the connection ended before."""
    while len(view):
        got = peer.recv_into(view)
        if not got:
            return False
        view = view[got:]
    return True


# ---- grpcio by itself


class Bare(grpc.GenericRpcHandler):
    """/bare/Push and /bare/Pull move `bytes` as they are, /stock/Push and /stock/Pull messages of protobuf."""

    def __init__(self) -> None:
        self._payloads: dict[int, list[bytes]] = {}

    def service(self, details: Any) -> Any:
        """gRPC's question."""
        return {
            "/bare/Ping": grpc.unary_unary_rpc_method_handler(self._ping),
            "/bare/Push": grpc.stream_unary_rpc_method_handler(self._push),
            "/bare/Pull": grpc.unary_stream_rpc_method_handler(self._pull),
            "/stock/Push": grpc.stream_unary_rpc_method_handler(
                self._push_stock, request_deserializer=shard_pb2.Frame.FromString
            ),
            "/stock/Pull": grpc.unary_stream_rpc_method_handler(
                self._pull_stock, response_serializer=shard_pb2.Frame.SerializeToString
            ),
        }.get(details.method)

    async def _ping(self, raw: bytes, _: Any) -> bytes:
        return raw

    async def _push(self, requests: AsyncIterator[bytes], _: Any) -> bytes:
        total = 0
        async for raw in requests:
            total += tensor_from(memoryview(raw), "float32").nbytes
        return str(total).encode()

    async def _pull(self, raw: bytes, context: Any) -> None:
        size = int(raw)
        if size not in self._payloads:
            self._payloads[size] = [bytes(part) for part in sizes(size)]
        for payload in self._payloads[size]:
            await context.write(payload)

    async def _push_stock(self, requests: AsyncIterator[shard_pb2.Frame], _: Any) -> bytes:
        total = 0
        async for message in requests:
            total += tensor_from(memoryview(message.data), "float32").nbytes
        return str(total).encode()

    async def _pull_stock(self, raw: bytes, context: Any) -> None:
        source = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        for part in sizes(int(raw)):
            await context.write(shard_pb2.Frame(data=source[:part].numpy().tobytes()))


# ---- our transport


class Shard:
    """Takes any frames, and gives as many bytes as a pull has for a version; a version is encoded once."""

    def __init__(self) -> None:
        self._versions: dict[int, list[Frame]] = {}
        self.offer: Callable[[], shard_pb2.OpenBulkResponse]

    async def push(self, frames: AsyncIterator[AnyFrame]) -> shard_pb2.PushResponse:
        """Take a payload."""
        total = 0
        async for raw in frames:
            _, parts = split_frame(raw)
            total += sum(tensor_from(data, "float32").nbytes for _, data in parts)
        return shard_pb2.PushResponse(outcome=shard_pb2.OUTCOME_ACCEPTED, version=total)

    async def pull(self, request: shard_pb2.PullRequest) -> AsyncIterator[AnyFrame]:
        """Give one."""
        size = request.min_version
        if size not in self._versions:
            self._versions[size] = [
                frame_of(shard_pb2.FrameHeader(chunks=[shard_pb2.ChunkRef(index=number, bytes=part)]), [bytes(part)])
                for number, part in enumerate(sizes(size))
            ]
        for raw in self._versions[size]:
            yield raw

    async def open_bulk(self, _: shard_pb2.OpenBulkRequest) -> shard_pb2.OpenBulkResponse:
        """Bulk connections."""
        return self.offer()

    async def stats(self, _: shard_pb2.StatsRequest) -> shard_pb2.StatsResponse:
        """The smallest call."""
        return shard_pb2.StatsResponse()

    def __getattr__(self, name: str) -> Any:
        return None  # calls that are never made


async def main() -> None:
    torch.set_num_threads(1)
    keep_memory(server=True)
    directory = sys.argv[1]
    if directory:
        await asyncio.to_thread(join, directory, 1)
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer_tcp, args=(listening,), daemon=True).start()
    bare = grpc.aio.server(options=LIMITS.server(), compression=grpc.Compression.NoCompression)
    bare.add_generic_rpc_handlers((Bare(),))
    bare_port = bare.add_insecure_port("127.0.0.1:0")
    await bare.start()
    shard = Shard()
    sockets = await bulk.serve([("Shard", shard)])
    shard.offer = sockets.offer
    ours = await serve([("Shard", shard)])
    ports = {"tcp": listening.getsockname()[1], "bare": bare_port, "ours": ours.port}
    print(json.dumps(ports), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order, *words = line.split()
        if order == "gloo":
            await asyncio.to_thread(gloo, words[0], int(words[1]), int(words[2]), 0)
        print(time.process_time() if order == "cpu" else "", flush=True)
    os._exit(0)  # without waiting for the other end of gloo and RPC, which may be gone


if __name__ == "__main__":
    asyncio.run(main())
