"""Finding a job by its servers, if the store is empty or has an older record than the servers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import cast

from google.protobuf.message import DecodeError

from paramserver import errors
from paramserver.coordinator.leadership.cluster import Connect, Servers
from paramserver.coordinator.leadership.takeover import begun
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.messages import record_age

_CALL_S = 2.0


class Found:
    """The newest record that servers have told. ``term``: the highest term that any of them has heard of."""

    def __init__(self) -> None:
        self.record = coordinator_pb2.JobRecord()
        self.model = types_pb2.ModelSpec()
        self.term = 0
        # Addresses of the servers that have answered, and of those among them that are of this job.
        self.answered: set[str] = set()
        self.ours: set[str] = set()

    def hear(self, reply: shard_pb2.StatsResponse) -> None:
        """One server has answered."""
        self.term = max(self.term, reply.term)
        try:
            record = coordinator_pb2.JobRecord.FromString(reply.record)
        except DecodeError:  # of another version
            return
        if reply.HasField("model") and record.layout == reply.holds and record_age(record) > record_age(self.record):
            self.record, self.model = record, reply.model

    def newer_than(self, known: coordinator_pb2.JobRecord | None) -> bool:
        """Whether the job is to go on from this record, instead of ``known``, the record in the store.

        Of two records of one job the newer one counts: it may say that the job has ended.
        """
        if not begun(self.record):
            return False
        if known is not None and known.view.beginning == self.record.view.beginning:
            return record_age(self.record) > record_age(known)
        return known is None or not begun(known)


async def find(
    connect: Connect, job: str, addresses: Collection[str], known: coordinator_pb2.JobRecord | None
) -> Found:
    """Ask the servers at ``addresses``, those of ``known``, and those that they name. Silent servers are left out."""
    found, asked = Found(), set[str]()
    todo = {*addresses, *_servers_of(known)}
    while todo:
        asked |= todo
        now = sorted(todo)
        replies = await asyncio.gather(*(_ask(connect, job, address) for address in now))
        for address, reply in zip(now, replies, strict=True):
            if reply is None:
                continue
            found.answered.add(address)
            if reply.incarnation:
                found.ours.add(address)
                found.hear(reply)
        todo = set(_servers_of(found.record)) - asked
    return found


def _servers_of(record: coordinator_pb2.JobRecord | None) -> list[str]:
    members = record.members if record is not None else ()
    return [member.address for member in members if member.role == types_pb2.ROLE_SERVER]


async def _ask(connect: Connect, job: str, address: str) -> shard_pb2.StatsResponse | None:
    request = shard_pb2.StatsRequest(job=job, record=True)
    try:
        return cast(shard_pb2.StatsResponse, await Servers(connect).ask(address, "Shard.Stats", request, _CALL_S))
    except errors.FencedError:  # of another job
        return shard_pb2.StatsResponse()
    except errors.ParamServerError:
        return None
