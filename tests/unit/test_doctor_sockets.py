"""Doctor on the way of weights and gradients to the servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from paramserver.config import load_settings
from paramserver.doctor.finding import Finding, Level
from paramserver.doctor.sockets import MOST, check_sockets, servers_of
from paramserver.errors import DeniedError, UnavailableError
from paramserver.v1.coordinator_pb2 import ProcessStatus, StatusResponse


def found(servers: Mapping[str, str], reasons: Mapping[str, str | Exception], **cluster: Any) -> Finding:
    async def attempt(address: str) -> str:
        reason = reasons.get(address, "")
        if isinstance(reason, Exception):
            raise reason
        return reason

    settings = load_settings(overrides={f"cluster.{name}": value for name, value in cluster.items()})
    return asyncio.run(check_sockets(settings, servers, attempt))


def test_all_servers_are_reached() -> None:
    finding = found({"server-1": "b:1", "server-0": "a:1"}, {})
    assert (finding.level, finding.remedy) == (Level.OK, "")
    assert "sockets to server-0, server-1," in finding.value


def test_a_port_that_cannot_be_reached_is_named_with_the_remedy() -> None:
    finding = found({"server-0": "a:1", "server-1": "b:1"}, {"b:1": "port 7 of b cannot be reached (timed out)"})
    assert finding.level is Level.WARN
    assert "to server-1: port 7 of b cannot be reached (timed out)" in finding.value
    assert "sockets to server-0" in finding.value
    assert "cluster.bulk_port" in finding.remedy


def test_a_server_that_does_not_answer_is_named() -> None:
    finding = found({"server-0": "a:1"}, {"a:1": UnavailableError("it is gone\x1b[0m")})
    assert finding.level is Level.WARN
    assert "to server-0: it is gone" in finding.value
    assert "\x1b" not in finding.value


def test_without_the_right_to_call_servers_nothing_is_said_against_the_network() -> None:
    finding = found({"server-0": "a:1"}, {"a:1": DeniedError("an admin does not call this")})
    assert (finding.level, finding.value) == (Level.NOTE, "not tried: an admin does not call this")


def test_where_sockets_are_not_wanted_or_there_is_no_server_nothing_is_tried() -> None:
    assert found({"server-0": "a:1"}, {"a:1": "never"}, transport="grpc").level is Level.NOTE
    assert "no servers yet" in found({}, {}).value


def test_of_many_servers_some_are_tried() -> None:
    servers = {f"server-{number}": f"h{number}:1" for number in range(20)}
    assert found(servers, {}).value.count("server-") == MOST


def test_servers_that_are_gone_or_have_no_address_are_left_out() -> None:
    async def status() -> StatusResponse:
        return StatusResponse(
            processes=[
                ProcessStatus(role="server", name="server-0", address="a:1"),
                ProcessStatus(role="server", name="server-1", address="b:1", gone=True),
                ProcessStatus(role="server", name="server-2"),
                ProcessStatus(role="worker", name="worker-0", address="c:1"),
            ]
        )

    assert asyncio.run(servers_of(status)) == {"server-0": "a:1"}
