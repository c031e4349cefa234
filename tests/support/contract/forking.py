"""A program that forks while a call is parked and others are running. Its argument says how the children end.

It prints "done" and exits with 0 if every child did what it should and the parent's connection survived.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import pytest

from paramserver.errors import ParamServerError
from paramserver.transport.grpc import GrpcChannel, connect, serve
from paramserver.v1 import coordinator_pb2, shard_pb2

FORKS = 10


class Coordinator:
    """Answers status, nothing else."""

    async def status(self, _: object) -> coordinator_pb2.StatusResponse:
        return coordinator_pb2.StatusResponse(job="alive")

    def __getattr__(self, name: str) -> Any:
        return self.status


class Shard:
    """Its pulls wait for ever."""

    def __init__(self) -> None:
        self.parked = threading.Event()

    async def pull(self, _: object) -> AsyncIterator[bytes]:
        yield b"first"
        self.parked.set()
        await asyncio.Event().wait()

    def __getattr__(self, name: str) -> Any:
        return self.pull


def in_child(channel: GrpcChannel) -> None:
    """Every use is refused with a clear sentence; garbage collection does no harm."""

    async def nothing() -> AsyncIterator[Any]:
        items: tuple[Any, ...] = ()
        for item in items:
            yield item

    uses: list[Callable[[], Any]] = [
        lambda: channel.call("Coordinator.Status", coordinator_pb2.StatusRequest(), timeout=1),
        lambda: channel.upload("Shard.Push", [b"x"], timeout=1),
        lambda: anext(channel.download("Shard.Pull", shard_pb2.PullRequest(), timeout=1)),
        lambda: anext(channel.session("Coordinator.Session", nothing())),
        lambda: connect("127.0.0.1:1").call("Coordinator.Status", coordinator_pb2.StatusRequest(), timeout=1),
        lambda: serve(()),
        lambda: channel.close(),
    ]

    async def refused(use: Callable[[], Any]) -> None:
        with pytest.raises(ParamServerError, match="forked from a worker"):
            await use()

    for use in uses:
        asyncio.run(refused(use))
    gc.collect()


def main(how: str) -> None:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    shard = Shard()
    server = run(serve([("Shard", shard), ("Coordinator", Coordinator())]))
    channel = connect(server.address)

    async def pull() -> None:
        async for _ in channel.download("Shard.Pull", shard_pb2.PullRequest(), timeout=600):
            pass

    async def traffic() -> None:
        while True:
            await channel.call("Coordinator.Status", coordinator_pb2.StatusRequest(), timeout=20)

    parked = asyncio.run_coroutine_threadsafe(pull(), loop)
    busy = asyncio.run_coroutine_threadsafe(traffic(), loop)
    assert shard.parked.wait(20)

    for _ in range(FORKS):
        if how == "multiprocessing":
            process = multiprocessing.get_context("fork").Process(target=in_child, args=(channel,))
            process.start()
            process.join(20)
            assert process.exitcode == 0, process.exitcode
            continue
        pid = os.fork()
        if pid == 0:
            child(how, channel)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status

    reply = run(channel.call("Coordinator.Status", coordinator_pb2.StatusRequest(), timeout=20))
    assert reply.job == "alive"
    assert not parked.done()
    assert not busy.done(), busy.result()
    busy.cancel()
    run(server.stop())
    run(channel.close())
    print("done")


def child(how: str, channel: GrpcChannel) -> NoReturn:
    """End the child in one of the usual ways."""
    try:
        in_child(channel)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    if how == "_exit":
        os._exit(0)
    del channel
    sys.exit(0)  # the interpreter tears everything down


if __name__ == "__main__":
    main(sys.argv[1])
