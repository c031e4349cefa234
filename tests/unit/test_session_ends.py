"""A process dies: its session ends however the transport tells it, and another process may take its place at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from paramserver.coordinator.service import CoordinatorService
from paramserver.core.job.membership import Disconnected, Presence, Renewed, Role
from paramserver.v1 import coordinator_pb2, types_pb2
from tests.support.unit.joins import request, with_job


async def join(service: CoordinatorService, **given: object) -> coordinator_pb2.JoinResponse:
    return await service.join(request(role=types_pb2.ROLE_WORKER, **given))


def presences(service: CoordinatorService) -> dict[str, Presence]:
    return {member.name: member.presence for member in service.job.members.of(Role.WORKER)}


def test_a_call_that_is_cancelled_while_its_stream_ends() -> None:
    async def work(service: CoordinatorService) -> None:
        member = (await join(service, pid=10)).member
        ending, stuck = asyncio.Event(), asyncio.Event()

        async def reports() -> AsyncIterator[coordinator_pb2.SessionRequest]:
            yield coordinator_pb2.SessionRequest(member=member)
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await stuck.wait()

        begun = asyncio.Event()

        async def serve() -> None:
            answers: Any = service.session(reports())
            async with aclosing(answers) as views:
                async for _ in views:
                    begun.set()

        call = asyncio.create_task(serve())
        await asyncio.wait_for(begun.wait(), 5.0)
        call.cancel()
        await asyncio.wait_for(ending.wait(), 5.0)
        call.cancel()  # the second notice of the same death
        await asyncio.wait({call}, timeout=5.0)
        assert call.cancelled()
        assert presences(service) == {"worker-0": Presence.SILENT}
        stuck.set()

    with_job(work)


def test_a_replacement_need_not_wait_for_the_lease() -> None:
    async def work(service: CoordinatorService) -> None:
        first = await join(service, pid=10, incarnation=1)
        await join(service, pid=11, incarnation=2)
        silent = next(m for m in service.job.members.of(Role.WORKER) if m.ident == first.member)
        service.job.members.handle(Disconnected(silent.ident), 0.0)
        again = await join(service, pid=12, incarnation=3, index=0, replaces=[10])
        assert (again.rank, again.name) == (0, "worker-0")
        assert again.member != first.member
        assert (service.job.reports.lost, service.job.reports.losses) == ([], 1), "it was lost, and has a successor"
        assert first.member not in service.job.members

    with_job(work)


def test_a_replacement_without_a_wish_gets_the_rank_of_its_predecessor() -> None:
    """Also if a process between them died before it had joined. Pids of other machines mean nothing."""

    async def work(service: CoordinatorService) -> None:
        for number, address in enumerate(("10.0.0.1", "10.0.0.2", "10.0.0.2")):
            await join(service, pid=10 + number // 2, incarnation=1 + number, address=address)
        for member in service.job.members.of(Role.WORKER):
            service.job.members.handle(Disconnected(member.ident), 0.0)
        again = await join(service, pid=12, incarnation=4, address="10.0.0.2", replaces=[11, 77])
        assert again.rank == 2
        again = await join(service, pid=13, incarnation=5, address="10.0.0.2", replaces=[10])
        assert again.rank == 1
        assert presences(service).keys() == {"worker-0", "worker-1", "worker-2"}
        assert service.job.reports.losses == 2

    with_job(work)


def test_a_lost_worker_is_not_missed_if_there_are_enough() -> None:
    """After a power cut new workers may come before the leases of the old ones have ended."""

    async def work(service: CoordinatorService) -> None:
        for number in range(3):
            await join(service, pid=10 + number, incarnation=1 + number)
        reports, members = service.job.reports, service.job.members
        for losses, missed in ((1, []), (2, ["worker-1"])):
            member = members.of(Role.WORKER)[0]
            members.forget(member.ident)
            reports.removed(member, lost=True, reason="its lease has ended")
            assert (reports.losses, reports.lost, list(reports.missed)) == (losses, missed, missed)

    with_job(work)


def test_nobody_replaces_who_is_there() -> None:
    async def work(service: CoordinatorService) -> None:
        first = await join(service, pid=10, incarnation=1)
        service.job.members.handle(Renewed(first.member), 0.0)
        again = await join(service, pid=12, incarnation=3, index=0, replaces=[10])
        assert again.rank == 1
        assert first.member in service.job.members
        assert (service.job.reports.lost, service.job.reports.losses) == ([], 0)

    with_job(work)
