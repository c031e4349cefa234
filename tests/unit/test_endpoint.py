"""Whom a coordinator that does not lead yet has heard of: servers that come new, and servers that hold a shard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from paramserver import errors
from paramserver.coordinator import endpoint
from paramserver.coordinator.endpoint import Endpoint
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2


def ask(one: Endpoint, method: str, request: object) -> None:
    """It does not lead, and says so."""
    with pytest.raises(errors.NotLeaderError):
        asyncio.run(getattr(one, method)(request))


def open_session(one: Endpoint, *requests: coordinator_pb2.SessionRequest) -> None:
    async def go() -> None:
        async def all_of_them() -> AsyncIterator[coordinator_pb2.SessionRequest]:
            for request in requests:
                yield request

        async for _ in one.session(all_of_them()):  # type: ignore[attr-defined]
            raise AssertionError("it does not lead")

    with pytest.raises(errors.NotLeaderError):
        asyncio.run(go())


def test_a_server_that_asks_for_the_settings_is_a_newcomer() -> None:
    """`paramserver start server` asks for them before it joins, and gets no answer while a job is taken over."""
    one = Endpoint("job")
    for newcomer in (5, 5, 6):
        ask(one, "settings", coordinator_pb2.SettingsRequest(newcomer=newcomer))
    ask(one, "settings", coordinator_pb2.SettingsRequest())  # a worker, or a command
    assert one.newcomers() == 2
    assert one.holders() == []


def test_a_server_with_a_shard_is_known_by_its_session_and_by_joining() -> None:
    one = Endpoint("job")
    open_session(
        one,
        coordinator_pb2.SessionRequest(
            member=1, address="a:1", shards=[shard_pb2.StatsResponse(holds="layout", term=7, incarnation=1)]
        ),
    )
    open_session(one, coordinator_pb2.SessionRequest(member=2, worker=coordinator_pb2.WorkerReport()))
    ask(
        one,
        "join",
        coordinator_pb2.JoinRequest(role=types_pb2.ROLE_SERVER, address="b:1", holds="layout", term=6, incarnation=2),
    )
    assert {(knock.address, knock.term) for knock in one.holders()} == {("a:1", 7), ("b:1", 6)}
    assert one.newcomers() == 0


def test_who_has_not_asked_for_a_while_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Endpoint("job")
    ask(one, "settings", coordinator_pb2.SettingsRequest(newcomer=5))
    assert one.newcomers() == 1
    monkeypatch.setattr(endpoint, "_KNOCK_S", -1.0)
    assert one.newcomers() == 0
