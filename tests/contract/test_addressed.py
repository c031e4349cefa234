"""An address may end with the number of a shard, on every transport: the service that answers hears the number."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from paramserver.transport.addresses import shard_address, split_shard, target
from paramserver.transport.base import addressed
from paramserver.v1 import coordinator_pb2, shard_pb2
from tests.support.contract.channels import WIRES, Stub, Wires, run
from tests.support.contract.requests import PULL, PUSH, SESSION, STATUS, WANT, T


@pytest.mark.parametrize("kind", WIRES, ids=lambda wires: wires.kind)
def test_every_kind_of_call_is_addressed(kind: type[Wires]) -> None:
    heard: list[tuple[str, int | None]] = []

    async def status(_: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
        heard.append(("status", addressed()))
        return coordinator_pb2.StatusResponse()

    async def push(frames: AsyncIterator[bytes]) -> shard_pb2.PushResponse:
        assert [frame async for frame in frames] == [b"frame"]
        heard.append(("push", addressed()))
        return shard_pb2.PushResponse()

    async def pull(_: shard_pb2.PullRequest) -> AsyncIterator[bytes]:
        heard.append(("pull", addressed()))
        yield b"frame"

    async def session(requests: AsyncIterator[coordinator_pb2.SessionRequest]) -> AsyncIterator[object]:
        heard.append(("session", addressed()))
        async for _ in requests:
            yield coordinator_pb2.SessionResponse()

    async def one() -> AsyncIterator[coordinator_pb2.SessionRequest]:
        yield coordinator_pb2.SessionRequest()

    async def go(wires: Wires) -> None:
        server = await wires.serve(
            ("Shard", Stub(push=push, pull=pull)), ("Coordinator", Stub(status=status, session=session))
        )
        for shard in (None, 0, 3, 41):
            address = server.address if shard is None else shard_address(server.address, shard)
            channel = wires.connect(address)
            assert channel.address == address
            await channel.call(STATUS, coordinator_pb2.StatusRequest(), timeout=T)
            await channel.upload(PUSH, [b"frame"], timeout=T)
            assert [frame async for frame in channel.download(PULL, WANT, timeout=T)] == [b"frame"]
            assert len([reply async for reply in channel.session(SESSION, one())]) == 1
            assert heard == [(name, shard) for name in ("status", "push", "pull", "session")]
            heard.clear()
        assert addressed() is None, "outside of a call"

    run(kind, go)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.7:8791/3", ("10.0.0.7:8791", 3)),
        ("[::1]:8791/0", ("[::1]:8791", 0)),
        ("server:1", ("server:1", None)),
        ("server:1/", ("server:1/", None)),
        ("server:1/x", ("server:1/x", None)),
        ("/3", ("/3", None)),
    ],
)
def test_the_parts_of_an_address(address: str, parts: tuple[str, int | None]) -> None:
    assert split_shard(address) == parts
    if parts[1] is not None:
        assert shard_address(*parts) == address  # type: ignore[arg-type]
        assert "/3" not in target(parts[0])
