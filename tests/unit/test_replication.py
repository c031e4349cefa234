"""The coordinator tells servers which shards they hold, until each of them knows all of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from paramserver.coordinator.work.replication import Replication
from paramserver.core.job.holders import Holders
from paramserver.core.job.membership import Member, Membership, Role
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.transport.addresses import shard_address
from paramserver.v1 import shard_pb2


class Servers:
    """Servers that answer when the test lets them.

    ``told``: by shard, what its primary was told, in order. ``asked``: by server, of which shards it was asked to be a
    backup.
    """

    def __init__(self, count: int) -> None:
        self.configuring = [asyncio.Event() for _ in range(count)]
        self.telling, self.told_0 = asyncio.Event(), asyncio.Event()
        self.told: defaultdict[int, list[shard_pb2.SetHoldersRequest]] = defaultdict(list)
        self.asked: list[list[int]] = [[] for _ in range(count)]

    def address(self, server: Member, shard: int) -> str:
        """Of a shard at a server."""
        return shard_address(server.address, shard)

    async def call(self, server: Member, shard: int, *_: Any) -> None:
        """Shard.Configure."""
        self.asked[server.index].append(shard)
        await self.configuring[server.index].wait()

    async def call_all(
        self, places: list[tuple[int, Member]], _: str, request: Callable[[int], shard_pb2.SetHoldersRequest], *__: Any
    ) -> None:
        """Shard.SetHolders."""
        requests = {shard: request(shard) for shard, _ in places}
        if 0 in requests:
            self.told_0.set()
            await self.telling.wait()
        for shard, one in requests.items():
            self.told[shard].append(one)


def a_job(servers: Servers) -> Any:
    """What `Replication` uses of a job."""
    members, count = Membership(10.0, 10.0), len(servers.asked)
    there = [Member(n + 1, Role.SERVER, n, f"server-{n}", 0.0, address=f"10.0.0.{n}:1") for n in range(count)]
    members.restore(there, 0.0)
    tasks = []

    async def nothing() -> None:
        await asyncio.sleep(0)

    def begin(work: Awaitable[None]) -> asyncio.Future[None]:
        tasks.append(asyncio.ensure_future(work))
        return tasks[-1]

    return SimpleNamespace(
        options=SimpleNamespace(servers=count, replicas=1, call_timeout_s=5.0, job="a job", repair_mbps=0.0),
        members=members,
        servers=servers,
        journal=SimpleNamespace(settled=nothing),
        tasks=SimpleNamespace(begin=begin),
        changes=SimpleNamespace(notify=nothing),
        registry=SimpleNamespace(ready=True, configuration=lambda shard: shard_pb2.ConfigureRequest(shard=shard)),
        recovery=SimpleNamespace(under_way=False),
        resizing=SimpleNamespace(under_way=False),
        mode_change=SimpleNamespace(agreed=Consistency(Mode.SYNC)),
        given_up=False,
        over=asyncio.get_running_loop().create_future(),
        timeline=0,
        term=1,
        shards=SimpleNamespace(infos=list),
        write_down=lambda: None,
    )


async def turns() -> None:
    """Let all tasks go on as far as they can."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_primary_hears_of_a_backup_that_was_made_ready_while_it_was_being_told() -> None:
    """Else the backup never gets the shard."""

    async def go() -> None:
        servers = Servers(2)
        replication = Replication(a_job(servers))
        servers.configuring[0].set()
        replication.begin()
        await servers.told_0.wait()  # of no backup, since server-1 is not ready
        servers.configuring[1].set()
        await turns()
        servers.telling.set()
        await turns()
        assert [[place.address for place in one.backups] for one in servers.told[0]] == [[], ["10.0.0.1:1/0"]]
        assert [place.address for place in servers.told[1][-1].backups] == ["10.0.0.0:1/1"]

    asyncio.run(asyncio.wait_for(go(), 30.0))


def test_no_server_is_made_a_backup_once_another_timeline_begins() -> None:
    """It may be the primary of that shard then."""

    async def go() -> None:
        servers = Servers(3)
        replication = Replication(a_job(servers))
        replication.begin()
        await turns()
        assert [len(shards) for shards in servers.asked] == [1, 1, 1], "each of two shards"
        replication.pause(stay=True)
        for one in servers.configuring:
            one.set()
        await turns()
        assert [len(shards) for shards in servers.asked] == [1, 1, 1]
        replication.begin()
        servers.telling.set()
        await turns()
        assert [len(shards) for shards in servers.asked] == [3, 3, 3]

    asyncio.run(asyncio.wait_for(go(), 30.0))


def test_no_shard_moves_while_the_result_is_gathered() -> None:
    """Both shards are at server-0, since server-1 has come late: as a rule one of them moves."""

    async def go(through: bool) -> tuple[int, ...]:
        servers = Servers(2)
        for gate in (*servers.configuring, servers.telling):
            gate.set()
        job = a_job(servers)
        replication = Replication(job)
        replication.adopt(Holders([0, 0], 1))
        replication.begin()
        for _ in range(2):  # a backup has all of its shard, and may become the primary with the next report
            held = replication.holders.shards
            copies = [
                shard_pb2.BackupStatus(place=shard_pb2.BackupPlace(address=f"10.0.0.1:1/{shard}"), whole=True)
                for shard in range(2)
            ]
            for shard, copy in enumerate(copies):
                copy.place.since = held[shard].backups[0].since
            if through and not job.over.done():
                job.over.set_result("done")
            replication.hear([shard_pb2.StatsResponse(shard=n, backups=[copy]) for n, copy in enumerate(copies)])
        await turns()
        return replication.holders.primaries

    assert asyncio.run(asyncio.wait_for(go(False), 30.0)) == (1, 0)
    assert asyncio.run(asyncio.wait_for(go(True), 30.0)) == (0, 0)
