"""The step of `exchange.py` by other means: a parameter server on PyTorch RPC; gRPC and sockets that only move bytes.

Ranks of torchrun; the last rank is the server. With ``rpc`` a worker calls a function with its gradient. The answer
comes when the gradients of all workers are there, and is the new weights: one call, without further copies than
PyTorch's. With ``bare`` a worker sends as many bytes through `grpc.aio` and fetches as many, which are not used. With
``sockets`` it sends and fetches them through TCP, from memory and into memory of the size of the model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import threading
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

from benchmarks.scripts.exchange import OPTIMIZERS, gradient, optimizer_of, write

_RPC_S = 120
_FRAME = 4 << 20


# ---- PyTorch RPC


class Server:
    """Adds up a gradient from each worker, and answers all of them with the new weights."""

    made: Server

    def __init__(self, elements: int, optimizer: str, workers: int) -> None:
        self.weights = torch.ones(elements)
        self.total = torch.zeros(elements)
        self.weights.grad = self.total
        self.optimizer = optimizer_of(optimizer, [self.weights], fused=True)
        self.workers = workers
        self.waiting = 0
        self.lock = threading.Lock()
        self.answer: Any = torch.futures.Future()

    def contribute(self, part: Tensor) -> Any:
        """A future of the weights after this step."""
        with self.lock:
            answer = self.answer
            if self.waiting:
                self.total.add_(part)
            else:
                self.total.copy_(part)
            self.waiting += 1
            if self.waiting == self.workers:
                self.total.div_(self.workers)
                self.optimizer.step()
                self.waiting, self.answer = 0, torch.futures.Future()
                answer.set_result(self.weights)
            return answer


@rpc.functions.async_execution  # type: ignore[untyped-decorator]  # torch does not say what it is
def contribute(part: Tensor) -> Any:
    """Called by workers."""
    return Server.made.contribute(part)


def over_rpc(args: argparse.Namespace, rank: int) -> None:
    warnings.filterwarnings("ignore", "You are using a Backend")
    elements = args.megabytes * 2**20 // 4
    # As between machines; by itself it finds a way through memory.
    options = rpc.TensorPipeRpcBackendOptions(
        _transports=["uv"], _channels=["mpt_uv", "basic"], rpc_timeout=_RPC_S, num_worker_threads=args.ranks
    )
    is_server = rank == args.ranks
    if is_server:
        Server.made = Server(elements, args.optimizer, args.ranks)
    begin: Any = rpc.init_rpc
    begin("server" if is_server else f"worker{rank}", rank=rank, world_size=args.ranks + 1, rpc_backend_options=options)
    if not is_server:
        part, weights, times = torch.full((elements,), gradient(rank)), torch.ones(elements), []
        for step in range(args.steps):
            began = time.monotonic()
            weights = rpc.rpc_sync("server", contribute, (part,))
            times.append((step, began, time.monotonic()))
        write(args.out, rank, times, weights[0].item(), "PyTorch RPC")
    rpc.shutdown()


# ---- bytes


async def over_grpc(args: argparse.Namespace, rank: int) -> None:
    from paramserver.transport.grpcio import grpc
    from paramserver.transport.limits import LIMITS

    frames = [bytes(_FRAME) for _ in range(args.megabytes * 2**20 // _FRAME)]
    place = args.out / "port"
    if rank < args.ranks:
        while not place.exists():
            await asyncio.sleep(0.05)
        times = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{place.read_text()}", options=LIMITS.client()) as channel:
            push: Any = channel.stream_unary("/bare/Push")
            pull: Any = channel.unary_stream("/bare/Pull")
            for step in range(args.steps):
                began = time.monotonic()
                call = push(timeout=_RPC_S)
                for raw in frames:
                    await call.write(raw)
                await call.done_writing()
                await call
                got = 0
                answers = pull(b"", timeout=_RPC_S)
                while (raw := await answers.read()) is not grpc.aio.EOF:
                    got += len(raw)
                assert got == args.megabytes * 2**20
                times.append((step, began, time.monotonic()))
        write(args.out, rank, times, 0.0, "grpcio, bytes")
        return
    barrier, left = asyncio.Barrier(args.ranks), args.ranks * args.steps
    done = asyncio.Event()

    class Service(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            if details.method == "/bare/Push":
                return grpc.stream_unary_rpc_method_handler(self._push)
            return grpc.unary_stream_rpc_method_handler(self._pull)

        async def _push(self, requests: AsyncIterator[bytes], _: Any) -> bytes:
            async for _raw in requests:
                pass
            await barrier.wait()
            return b""

        async def _pull(self, _: bytes, context: Any) -> None:
            nonlocal left
            for raw in frames:
                await context.write(raw)
            left -= 1
            if not left:
                done.set()

    server = grpc.aio.server(options=LIMITS.server())
    server.add_generic_rpc_handlers((Service(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    (args.out / "port.new").write_text(str(port))
    (args.out / "port.new").replace(place)
    await done.wait()
    await server.stop(5.0)


# ---- sockets


def over_sockets(args: argparse.Namespace, rank: int) -> None:
    nbytes = args.megabytes * 2**20
    place = args.out / "port"
    if rank < args.ranks:
        while not place.exists():
            time.sleep(0.05)
        sent, got, times = memoryview(b"\1" * nbytes), memoryview(bytearray(b"\2" * nbytes)), []
        with socket.create_connection(("127.0.0.1", int(place.read_text())), timeout=_RPC_S) as line:
            for step in range(args.steps):
                began = time.monotonic()
                line.sendall(sent)
                _fill(line, got)
                times.append((step, began, time.monotonic()))
        write(args.out, rank, times, 0.0, "TCP, bytes")
        return
    barrier, weights = threading.Barrier(args.ranks, timeout=_RPC_S), memoryview(b"\3" * nbytes)

    def serve(line: socket.socket) -> None:
        part = memoryview(bytearray(b"\4" * nbytes))
        with line:
            for _ in range(args.steps):
                _fill(line, part)
                barrier.wait()
                line.sendall(weights)

    with socket.create_server(("127.0.0.1", 0)) as door:
        (args.out / "port.new").write_text(str(door.getsockname()[1]))
        (args.out / "port.new").replace(place)
        threads = [threading.Thread(target=serve, args=(door.accept()[0],)) for _ in range(args.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _fill(line: socket.socket, room: memoryview) -> None:
    while room:
        count = line.recv_into(room)
        assert count, "the other side has hung up"
        room = room[count:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=["rpc", "bare", "sockets"], required=True)
    parser.add_argument("--megabytes", type=int, required=True, help="size of the model, in 2**20 bytes")
    parser.add_argument("--ranks", type=int, required=True, help="workers")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory for the times of each process, as JSON")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(2 if rank == args.ranks else 1)
    if args.how == "rpc":
        over_rpc(args, rank)
    elif args.how == "sockets":
        over_sockets(args, rank)
    else:
        asyncio.run(over_grpc(args, rank))


if __name__ == "__main__":
    main()
