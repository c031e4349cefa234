"""A member in the record of a job: written by one coordinator, and read by the next one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from paramserver.core.job.membership import Member, Membership, Presence, Role
from paramserver.transport.security.members import Known
from paramserver.v1 import coordinator_pb2, types_pb2


class _Job(Protocol):
    members: Membership


class JobRoll:
    """The members as their coordinator knows them; see `transport.security.members.Roll`."""

    def __init__(self, job: _Job) -> None:
        self._job = job

    def member(self, number: int) -> Known | None:
        """The member of this number; None: there is none."""
        found = self._job.members.get(number)
        return Known(found.role.value, found.proof) if found is not None else None

    def roles(self, proof: bytes) -> Collection[str]:
        """Not asked: each request of a member to the coordinator names the member."""
        return ()

    def is_coordinator(self, proof: bytes) -> bool:
        """No coordinator calls another one."""
        return False


def member_to_record(member: Member) -> coordinator_pb2.MemberRecord:
    """A server or a worker as its entry in the record."""
    return coordinator_pb2.MemberRecord(
        member=member.ident,
        role=types_pb2.ROLE_SERVER if member.role is Role.SERVER else types_pb2.ROLE_WORKER,
        index=member.index,
        address=member.address,
        pid=member.pid,
        incarnation=member.incarnation,
        beside_worker=member.beside_worker,
        restart_command=member.restart_command,
        metrics_url=member.metrics_url,
        host=member.host,
        proof=member.proof,
        key=member.key,
    )


def for_servers(record: coordinator_pb2.JobRecord) -> bytes:
    """The record as servers keep it: without the keys, since each server knows its own key only."""
    told = coordinator_pb2.JobRecord()
    told.CopyFrom(record)
    for entry in told.members:
        entry.ClearField("key")
    return told.SerializeToString()


def member_of(entry: coordinator_pb2.MemberRecord) -> Member:
    """The member of an entry. Its lease has ended, and it has no session."""
    role = Role.SERVER if entry.role == types_pb2.ROLE_SERVER else Role.WORKER
    return Member(
        ident=entry.member,
        role=role,
        index=entry.index,
        name=f"{role.value}-{entry.index}",
        expires_at=0.0,
        presence=Presence.SILENT,
        address=entry.address,
        pid=entry.pid,
        incarnation=entry.incarnation,
        beside_worker=entry.beside_worker,
        restart_command=entry.restart_command,
        metrics_url=entry.metrics_url,
        host=entry.host,
        proof=entry.proof,
        key=entry.key,
    )
