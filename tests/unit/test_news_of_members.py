"""News of members: the view is made and encoded once for each change, however many members hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest

from paramserver.coordinator.job import Job
from paramserver.coordinator.service import CoordinatorService
from paramserver.v1 import coordinator_pb2, types_pb2
from tests.support.unit.joins import request, with_job

WORKERS = 3


def test_all_members_get_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made, view = [], Job.view

    def counted(job: Job) -> types_pb2.View:
        made.append(job)
        return view(job)

    async def reports(member: int) -> AsyncIterator[coordinator_pb2.SessionRequest]:
        yield coordinator_pb2.SessionRequest(member=member)
        await asyncio.Event().wait()

    async def work(service: CoordinatorService) -> None:
        joined = [await service.join(request(role=types_pb2.ROLE_WORKER, pid=pid)) for pid in range(1, WORKERS + 1)]
        async with AsyncExitStack() as stack:
            sessions: list[Any] = [
                await stack.enter_async_context(aclosing(service.session(reports(one.member)))) for one in joined
            ]
            for session in sessions:
                await anext(session)
            monkeypatch.setattr(service.job, "write_down", lambda: None)
            monkeypatch.setattr(Job, "view", counted)
            for workers in (WORKERS + 1, WORKERS + 2):
                made.clear()
                service.job.draining.add(workers)
                await service.job.refresh()
                heard = await asyncio.gather(*(anext(session) for session in sessions))
                assert len(made) == 1
                assert all(one is heard[0] for one in heard), "encoded once"
                draining = coordinator_pb2.SessionResponse.FromString(heard[0]).view.draining
                assert workers in draining, "the view is the newest one"

    with_job(work)
