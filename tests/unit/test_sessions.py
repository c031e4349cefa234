"""The coordinator's looks at the parts of a job, and reports of members that cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from paramserver import errors
from paramserver.coordinator.job import Job
from paramserver.coordinator.rpc.sessions import Sessions
from paramserver.v1 import coordinator_pb2

SYNC = ("blame", "idle", "poison", "checkpoints", "replication", "resizing", "ending", "loads", "records", "course")
ASYNC = ("watch", "stalls", "stuck", "tracing")


class Parts:
    """A job whose parts only say that they were looked at; ``broken`` ones raise."""

    def __init__(self, *broken: str) -> None:
        self.seen: list[str] = []
        self.broken = broken
        for name in SYNC:
            setattr(self, name, SimpleNamespace(look=self._look(name)))
        for name in ASYNC:
            setattr(self, name, SimpleNamespace(look=self._look_async(name)))
        self.members = SimpleNamespace(
            of=lambda role: [], handle=lambda event, now: [], get=lambda ident: SimpleNamespace(name="worker-3")
        )
        self.journal = SimpleNamespace(fenced=asyncio.Event())
        self.changes = SimpleNamespace(notify=self._notify)

    def _see(self, name: str) -> None:
        self.seen.append(name)
        if name in self.broken:
            raise RuntimeError(f"{name} is broken")

    def _look(self, name: str) -> Any:
        return lambda: self._see(name)

    def _look_async(self, name: str) -> Any:
        async def look() -> None:
            self._see(name)

        return look

    async def _notify(self) -> None:
        self.seen.append("told")


@pytest.mark.parametrize("broken", [(), ("watch",), ("blame", "stuck"), (*SYNC, *ASYNC)])
def test_a_part_that_fails_keeps_no_other_part_from_its_look(broken: tuple[str, ...]) -> None:
    async def look() -> Parts:
        job = Parts(*broken)
        await Sessions(cast(Job, job))._look(0.0)
        return job

    with capture_logs() as logs:
        job = asyncio.run(look())
    assert sorted(job.seen) == sorted((*SYNC, *ASYNC))
    assert len([one for one in logs if one["log_level"] == "error"]) == len(broken)


@pytest.mark.parametrize("error", [errors.ProtocolError("a NaN"), RuntimeError("a bug")])
def test_a_report_that_cannot_be_read_is_in_the_log(error: Exception) -> None:
    """It ends the session of that member."""

    async def requests() -> AsyncIterator[coordinator_pb2.SessionRequest]:
        yield coordinator_pb2.SessionRequest(member=3)

    async def hear(request: coordinator_pb2.SessionRequest) -> None:
        raise error

    async def read() -> Parts:
        job = Parts()
        sessions = Sessions(cast(Job, job))
        sessions._hear = hear  # type: ignore[method-assign]
        await sessions._read(requests(), 3)
        return job

    with capture_logs() as logs:
        job = asyncio.run(read())
    assert job.seen == ["told"]
    (line,) = logs
    assert (line["event"], line["member"]) == ("a report cannot be read, and ends the session", "worker-3")
