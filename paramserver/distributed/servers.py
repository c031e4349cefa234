"""The servers of a job as a process group sees them: who they are, and calls to them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from paramserver import errors
from paramserver.config import Settings, load_settings, split_addresses
from paramserver.membership.settings import fetch
from paramserver.pki.security import load_security
from paramserver.tensors.codec import header_from, split_frame
from paramserver.transport import bulk, fork, grpc
from paramserver.transport.allocation import keep_memory
from paramserver.transport.base import Channel
from paramserver.transport.rotating import coordinator_channel
from paramserver.transport.security.access import Security
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.worker.background import Background

# For so long calls to a server that cannot be reached are tried again.
_UNREACHED_S = 20.0
_RETRY_S = 0.2
# An answer needs so long at most after the last rank has come.
_SLACK_S = 60.0
_STATUS_S = 10.0


@dataclass(frozen=True, slots=True)
class Servers:
    """The facts about a job that all ranks of a process group need."""

    job: str
    addresses: Sequence[str]

    def encode(self) -> str:
        """As text, for the store of the process group."""
        return json.dumps([self.job, list(self.addresses)])

    @staticmethod
    def decode(text: str) -> Servers:
        """The value that `encode` has made a text of."""
        job, addresses = json.loads(text)
        return Servers(job, addresses)


class Network:
    """A way to coordinator and servers, for all process groups of this process. Work is done in the background."""

    def __init__(
        self,
        background: Background,
        connect: Callable[[str], Channel],
        find: Callable[[], Coroutine[Any, Any, Servers]],
    ) -> None:
        """``connect`` opens a channel to a server. ``find`` asks the coordinator for the servers."""
        self.background = background
        self._connect, self._find = connect, find
        self._channels: dict[str, Channel] = {}

    def find(self) -> Servers:
        """The servers of the job; waits until all of them are there."""
        return self.background.run(self._find())

    async def collect(
        self, address: str, request: shard_pb2.CollectRequest, place: Callable[[int], memoryview | None]
    ) -> None:
        """One round at one server. ``place(index)``: where the part of this index of the result belongs."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._connect(address)
        unreached: float | None = None
        deadline = time.monotonic() + request.wait_s
        while True:
            try:
                await _download(channel, request, place)
                return
            except errors.OverloadedError:
                # The collectives of others, or messages that nobody fetches, fill the server.
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)
            except errors.UnavailableError as error:
                now = time.monotonic()
                unreached = unreached or now
                if now - unreached > _UNREACHED_S:
                    raise errors.JobFailedError(
                        f"the server at {address} cannot be reached, and what it held of the process group is lost: "
                        f"start all ranks again ({error})"
                    ) from error
                await asyncio.sleep(_RETRY_S)

    def close(self) -> None:
        """Close all connections, and end the thread."""

        async def close_all() -> None:
            await asyncio.gather(*(channel.close() for channel in self._channels.values()))

        self.background.run(close_all(), 10.0)
        self.background.close()


def configured() -> Network:
    """The way to the job that is configured for this process. Raises ConfigError for wrong settings."""
    fork.guard()
    keep_memory()
    settings = load_settings(None, {})
    security = load_security(settings, "worker")
    connect = bulk.connector(security, "server", settings.cluster.transport != "grpc")
    return Network(Background("paramserver-collectives"), connect, lambda: _find(settings, security))


async def _download(
    channel: Channel, request: shard_pb2.CollectRequest, place: Callable[[int], memoryview | None]
) -> None:
    def placed(header: bytes, size: int) -> memoryview | None:
        found = place(header_from(header).chunks[0].index)
        return found if found is not None and found.nbytes == size else None

    limit_s = request.wait_s + _SLACK_S
    async with aclosing(channel.download("Shard.Collect", request, timeout=limit_s, place=placed)) as frames:
        async for raw in frames:
            for ref, data in split_frame(raw)[1]:
                target = place(cast(shard_pb2.ChunkRef, ref).index)
                if target is None or target.nbytes != data.nbytes:
                    raise errors.ProtocolError(f"{request.what}: a part of {data.nbytes} bytes that nobody asked for")
                if data.nbytes and _begin(target) != _begin(data):
                    target[:] = data


def _begin(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, np.uint8).ctypes.data)


async def _find(settings: Settings, security: Security) -> Servers:
    addresses = settings.cluster.coordinator
    if not addresses:
        raise errors.ConfigError(
            "a process group needs the servers of a job, and no coordinator is configured: start the script by "
            "paramserver run --ddp SCRIPT, or name the coordinator in PARAMSERVER_CLUSTER__COORDINATOR=HOST:PORT"
        )
    channel = coordinator_channel(split_addresses(addresses), grpc.connector(security, "coordinator"))
    try:
        job = (await fetch(channel, settings))["cluster.job"]
        deadline = time.monotonic() + settings.cluster.join_timeout_s
        while True:
            reply = await channel.call("Coordinator.Status", coordinator_pb2.StatusRequest(), timeout=_STATUS_S)
            status = cast(coordinator_pb2.StatusResponse, reply)
            found = [one.address for one in status.processes if one.role == "server" and not one.gone and one.address]
            if len(found) >= max(1, status.wanted_servers):
                return Servers(job, found)
            if time.monotonic() > deadline:
                raise errors.DeadlineError(
                    f"waited {settings.cluster.join_timeout_s:g} s for {status.wanted_servers} servers; "
                    f"{len(found)} have come"
                )
            await asyncio.sleep(_RETRY_S)
    finally:
        await channel.close()
