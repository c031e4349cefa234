"""The result is gathered from the servers that have the shards, also if shards move meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paramserver import errors
from paramserver.config import Run
from paramserver.results import gather as gathering
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2


@pytest.mark.parametrize("moved", [types_pb2.View(placement=4), types_pb2.View(timeline=1, placement=3)])
def test_a_shard_moves_while_its_former_server_is_asked(moved: types_pb2.View, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former server never gives the shard. A coordinator that does not answer is asked again."""
    monkeypatch.setattr(gathering, "_LOOK_S", 0.01)
    given_up = asyncio.Event()

    async def collect(*_: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    monkeypatch.setattr(gathering, "collect", collect)
    views: list[types_pb2.View | errors.UnavailableError] = [
        types_pb2.View(placement=3),
        errors.UnavailableError("no coordinator"),
        moved,
    ]

    async def look() -> types_pb2.View:
        view = views.pop(0)
        if isinstance(view, errors.UnavailableError):
            raise view
        return view

    async def go() -> None:
        status = coordinator_pb2.StatusResponse(view=types_pb2.View(placement=3))
        with pytest.raises(gathering.MovedError, match="moved"):
            await gathering.gather(status, lambda address: pytest.fail("there is no shard"), look, Run())

    asyncio.run(asyncio.wait_for(go(), 30.0))
    assert given_up.is_set()
    assert views == []


@pytest.mark.parametrize(
    "report", [shard_pb2.StatsResponse(backup=True, active=True, applied=28), shard_pb2.StatsResponse()]
)
def test_a_shard_moves_before_its_server_says_what_it_counted(
    report: shard_pb2.StatsResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former server has a copy that it has begun anew, or nothing."""
    reports = [report, shard_pb2.StatsResponse(active=True, applied=28)]

    class Server:
        async def call(self, *_: Any, **__: Any) -> shard_pb2.StatsResponse:
            return reports.pop()

        async def close(self) -> None: ...

    async def collect(*_: Any) -> None: ...

    monkeypatch.setattr(gathering, "collect", collect)
    shards = [types_pb2.ShardInfo(index=0), types_pb2.ShardInfo(index=1)]
    status = coordinator_pb2.StatusResponse(view=types_pb2.View(shards=shards))
    with pytest.raises(gathering.MovedError, match="moved"):
        asyncio.run(gathering.gather(status, lambda _: Server(), lambda: pytest.fail("it is quick"), Run()))  # type: ignore[arg-type, return-value]
    assert not reports
