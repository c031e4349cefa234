"""A member in the record of a job: written by one coordinator, and read by the next one."""

from __future__ import annotations

from paramserver.core.job.membership import Member, Presence, Role
from paramserver.v1 import coordinator_pb2, types_pb2


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
    )


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
    )
