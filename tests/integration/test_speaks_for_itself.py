"""A worker of a real job speaks for servers and for other workers, and commands servers: refused, and the bits stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from paramserver import errors
from paramserver.cli.look.facts import describe
from paramserver.machine.jobs import call_coordinator
from paramserver.membership.joining import versions
from paramserver.transport import grpc
from paramserver.transport.base import METHODS, MethodKind
from paramserver.transport.security.access import Security
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.v1.coordinator_pb2 import StatusRequest
from paramserver.wire.messages import PROTOCOL
from tests.support.contract.trust import member
from tests.support.integration.harness import read_summary, status_of, until
from tests.support.integration.roles import TRAIN, Cluster, cluster_fixture, reference, same_result

SCRIPT = ("--epochs", "3", "--pace", "0.2")
CALL_S = 20.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    yield from cluster_fixture()


def messages(status: dict[str, Any], job: str, own: int) -> list[tuple[str, Message]]:
    """What a hostile worker says: as a server, as another worker, and as the coordinator."""
    others = {process["name"]: process["member"] for process in status["processes"] if process["role"] != "coordinator"}
    server, worker = others["server-0"], others["worker-0"]
    report = coordinator_pb2.SessionRequest
    timeline = status.get("timeline", 1)
    return [
        ("Coordinator.Session", report(member=own, shards=[shard_pb2.StatsResponse(holds="x", term=2**62)])),
        ("Coordinator.Session", report(member=own, shards=[shard_pb2.StatsResponse(holds="x", term=2)])),
        ("Coordinator.Session", report(member=server, leaving=True)),
        ("Coordinator.Session", report(member=worker, leaving=True, finished=True)),
        ("Coordinator.Finish", coordinator_pb2.FinishRequest(member=worker, timeline=timeline)),
        ("Coordinator.Stop", coordinator_pb2.StopRequest(reason="because")),
        ("Shard.Release", shard_pb2.ReleaseRequest(job=job, term=2**62)),
        ("Shard.Release", shard_pb2.ReleaseRequest(job=job, timeline=timeline, term=1000, versions=[1])),
        ("Shard.SetMembers", shard_pb2.SetMembersRequest(job=job, generation=1000, timeline=timeline, term=1000)),
        ("Shard.Idle", shard_pb2.IdleRequest(job=job, timeline=timeline, worker=worker)),
        ("Shard.Pull", shard_pb2.PullRequest(job=job, timeline=timeline, worker=worker, clock=2**40)),
        ("Shard.MadeLent", shard_pb2.MadeLentRequest(job=job, timeline=timeline, version=1)),
    ]


async def attack(coordinator: str, server: str, job: str, status: dict[str, Any], security: Security) -> None:
    """Join to read, and then say what only others may say."""
    channels = {
        "Coordinator": grpc.connect(coordinator, security, "coordinator"),
        "Shard": grpc.connect(server, security, "server"),
    }
    request = coordinator_pb2.JoinRequest(role=types_pb2.ROLE_OBSERVER, protocol=PROTOCOL, versions=versions())
    joined: Any = await channels["Coordinator"].call("Coordinator.Join", request, timeout=CALL_S)
    for method, message in messages(status, job, joined.member):
        channel = channels[METHODS[method].service]
        with pytest.raises((errors.DeniedError, errors.FencedError, errors.UnavailableError)) as caught:
            async with asyncio.timeout(CALL_S):
                await say(channel, method, message)
        assert (
            "permission denied" in str(caught.value)
            or "has heard" in str(caught.value)
            or "not heard" in str(caught.value)
        ), f"{method} {message}: {caught.value}"
        assert "\n" not in str(caught.value)
    for channel in channels.values():
        await channel.close()


async def say(channel: Any, method: str, message: Message) -> None:
    """Make a call of any kind."""

    async def once() -> AsyncIterator[Message]:
        yield message

    match METHODS[method].kind:
        case MethodKind.UNARY:
            await channel.call(method, message, timeout=CALL_S)
        case MethodKind.DOWNLOAD:
            async for _ in channel.download(method, message, timeout=CALL_S):
                pass
        case _:
            async for _ in channel.session(method, once()):
                pass


def address_of(status: dict[str, Any], name: str) -> str:
    return str(next(process["address"] for process in status["processes"] if process["name"] == name))


@pytest.mark.long
def test_under_run(cluster: Cluster) -> None:
    place = cluster.place
    wanted = reference(place, *SCRIPT[:2])
    summary = place.work / "out.json"
    run = place.launch(
        *("run", "--servers", "1", "--workers", "2", "--set", "training.slices_per_step=4", "--summary", summary),
        *(TRAIN, "--", *SCRIPT),
        environ={"OMP_NUM_THREADS": "1"},
    )
    run.wait_for(r"coordinator at ([0-9.]+:[0-9]+)")
    until("training", lambda: status_of(run)["version"] > 0, 60.0)
    status = status_of(run)
    asyncio.run(
        attack(
            address_of(status, "coordinator"), address_of(status, "server-0"), status["job"], status, Security.open()
        )
    )
    run.wait().check()
    same_result(read_summary(summary), wanted)


@pytest.mark.long
def test_over_tls(cluster: Cluster) -> None:
    """With the certificate and the token of a worker."""
    wanted = reference(cluster.place, *SCRIPT[:2])
    certs: Path = cluster.place.work / "certs"
    cluster.place.paramserver("certs", "init", certs).check()
    summary, tls = cluster.place.work / "out.json", ("--certs", certs)
    cluster.coordinator("--workers", "2", "--set", "training.slices_per_step=4", *tls, "--summary", summary)
    cluster.server(*tls)
    for _ in range(2):
        cluster.worker(*SCRIPT, flags=tls)

    def training() -> dict[str, Any] | None:
        told = call_coordinator(cluster.join, "Coordinator.Status", StatusRequest(), CALL_S, member(certs, "worker"))
        status = describe(cast(coordinator_pb2.StatusResponse, told))
        return status if status["version"] > 0 else None

    found = until("training", training, 60.0)
    assert found is not None
    asyncio.run(attack(cluster.join, address_of(found, "server-0"), cluster.job, found, member(certs, "worker")))
    cluster.ended()
    same_result(read_summary(summary), wanted)
