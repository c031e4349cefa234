"""The servers of each shard on the status page, and what is wrong with the copies of shards, in clauses for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paramserver.coordinator.job import Job
from paramserver.core.job.held import Backup
from paramserver.core.job.membership import Role
from paramserver.core.job.status import again
from paramserver.v1 import coordinator_pb2

_NAMES = 4


def shard_statuses(job: Job) -> list[coordinator_pb2.ShardStatus]:
    """By shard, the servers that hold it; empty if shards have no backups, and before there are any."""
    if not job.holders.replicas or not job.registry.ready:
        return []
    shares = _shares(job)
    return [
        coordinator_pb2.ShardStatus(
            shard=shard,
            primary=f"server-{held.primary}",
            backups=[
                coordinator_pb2.CopyOnServer(
                    server=f"server-{one.server}",
                    whole=one.whole,
                    share=_share(shares, shard, one),
                )
                for one in held.backups
            ],
            state=job.holders.state(shard),
        )
        for shard, held in enumerate(job.holders.shards)
    ]


def heirs(job: Job, name: str) -> str:
    """A clause about a server that is gone: which servers hold its shards. Empty if its shards are lost, too."""
    index = int(name.rpartition("-")[2])
    if not job.holders.replicas or not job.registry.ready or job.seats.seat(index) is not None:
        return ""
    primaries = sorted({*job.holders.primaries} - {index})
    return f"{_listed(primaries)} {'holds' if len(primaries) == 1 else 'hold'} its shards"


def unprotected(job: Job) -> list[str]:
    """Clauses about servers that are gone and whose shards others hold, and about backups that catch up after that."""
    holders, servers = job.holders, range(job.options.servers)
    if not holders.replicas or not job.registry.ready:
        return []
    commands = {gone.name: gone.restart_command for gone in job.reports.departed()}
    clauses = []
    for name in (f"server-{index}" for index in servers if job.seats.seat(index) is None):
        lost = name in job.reports.lost
        if lost or not holders.replicated:
            clause = f"{name} {'is lost' if lost else 'has left'}; {heirs(job, name)}"
            if not holders.replicated:
                clause += ", some of them without a backup until a server takes its place"
            clauses.append(clause + again(commands.get(name, "")))
    if not clauses and holders.hurt and not job.seats.away:
        clauses.append(_catching_up(job))
    return clauses


def _catching_up(job: Job) -> str:
    """Which servers catch up with the primaries, and how much of their shards they have."""
    shares = _shares(job)
    has: dict[int, list[float]] = {}
    for shard, held in enumerate(job.holders.shards):
        for one in held.backups:
            has.setdefault(one.server, []).append(_share(shares, shard, one))
    late = sorted({server for _, server in job.holders.catching_up([m.index for m in job.members.of(Role.SERVER)])})
    if not late:
        return "some shards have no backup yet"
    parts = [share for server in late for share in has[server]]
    verb = "catches up with the shards that it is to hold" if len(late) == 1 else "catch up with the shards to hold"
    return f"{_listed(late)} {verb}: {percent(sum(parts) / len(parts))}"


def percent(share: float) -> str:
    """A part in words, rounded down: what is not whole is not 100 %."""
    return f"{int(share * 100)} %"


def _shares(job: Job) -> dict[tuple[int, int], float]:
    """By shard and server, how much of the shard a backup has, as its primary has reported."""
    servers = job.members.of(Role.SERVER)
    shares = {}
    for report in job.reports.shards():
        for status in report.backups:
            for server in servers:
                if job.servers.address(server, report.shard) == status.place.address:
                    shares[report.shard, server.index] = status.bytes / status.of if status.of else 0.0
    return shares


def _share(shares: Mapping[tuple[int, int], float], shard: int, backup: Backup) -> float:
    """How much of a shard a backup has; nothing while its primary has not reported it."""
    return 1.0 if backup.whole else shares.get((shard, backup.server), 0.0)


def _listed(servers: Sequence[int]) -> str:
    names = [f"server-{index}" for index in servers]
    return ", ".join([*names[:_NAMES], *["..."] * (len(names) > _NAMES)])
