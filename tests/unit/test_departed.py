"""What members say about themselves has room for so many bytes, and what the departed have said for still fewer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from paramserver import errors
from paramserver.coordinator import reports
from paramserver.coordinator.service import CoordinatorService
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.wire import bounds
from tests.support.marks import long_but
from tests.support.unit.joins import request, with_job

NAMES, CHARS = 1000, 1000
# The record, as servers and the store get it: the departed, a hundred events, and numbers.
RECORD_BYTES = reports.DEPARTED_BYTES + (1 << 20)


async def join(service: CoordinatorService, pid: int, **facts: Any) -> int:
    joining = request(role=types_pb2.ROLE_WORKER, pid=pid, incarnation=pid, **facts)
    return (await service.join(joining)).member


def said(turn: int) -> coordinator_pb2.WorkerReport:
    """Everything of which a report has room, as large as it can be."""
    names = [f"{turn:03} {index:04} ".ljust(CHARS, "m") for index in range(NAMES)]
    texts: dict[str, Any] = dict.fromkeys(
        ("state", "waiting_for", "transport", "transport_reason", "host_tier", "phase"), "t" * 5000
    )
    return coordinator_pb2.WorkerReport(metrics=dict.fromkeys(names, 1.0), samples=10, slices=1, **texts)


async def tell(service: CoordinatorService, *messages: coordinator_pb2.SessionRequest) -> None:
    """A session with these messages, which ends when the member has left, or with its end."""

    async def all_of_them() -> AsyncIterator[coordinator_pb2.SessionRequest]:
        for message in messages:
            yield message

    session: Any = service.session(all_of_them())
    async with aclosing(session) as replies:
        async for _ in replies:
            pass


def sizes(service: CoordinatorService) -> dict[str, int]:
    job = service.job
    job.write_down()
    return {
        "record": job.journal.record_now.ByteSize(),
        "members": job.keeping._news().ByteSize(),
        "store": len(job.journal._wanted["state"]),
    }


@pytest.mark.parametrize("turns", long_but({25}, (25, 100)))
def test_joining_and_leaving_does_not_bloat_the_record(turns: int) -> None:
    """Before, status and SetMembers were over 16 MiB after 19 times: no server heard of anything any more."""

    async def work(service: CoordinatorService) -> None:
        for turn in range(turns):
            member = await join(service, turn + 1, index=turn % 20, restart_command="c" * 300, address="a" * 300)
            report = coordinator_pb2.SessionRequest(member=member, worker=said(turn))
            gone = coordinator_pb2.SessionRequest(member=member, leaving=True, failure="f" * 1000)
            await tell(service, report, gone)
        found = sizes(service)
        assert max(found["record"], found["members"]) < RECORD_BYTES, found
        assert found["store"] < 2 * RECORD_BYTES, found
        status = await service.status(coordinator_pb2.StatusRequest(events=True))
        assert status.ByteSize() < RECORD_BYTES + (1 << 20)
        workers = [process for process in status.processes if process.role == "worker"]
        assert len(workers) == 20
        assert sum(process.samples for process in workers) == 10 * turns, "what was counted is summed"
        assert len(max(workers, key=lambda process: process.member).metrics) > 50, (
            "the last one has room for its values"
        )

    with_job(work)


def test_the_members_of_a_status_share_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "STATUS_BYTES", 1 << 20)
    monkeypatch.setattr("paramserver.coordinator.rpc.status.STATUS_BYTES", 1 << 20)

    async def work(service: CoordinatorService) -> None:
        members = [await join(service, 1 + number) for number in range(40)]
        for number, member in enumerate(members):
            await tell(service, coordinator_pb2.SessionRequest(member=member, worker=said(number)))
        status = await service.status(coordinator_pb2.StatusRequest())
        workers = [process for process in status.processes if process.role == "worker"]
        assert status.ByteSize() < 3 << 19
        assert [process.samples for process in workers] == [10] * 40, "the numbers of all stay"
        assert 10 < sum(bool(process.metrics) for process in workers) < 40

    with_job(work)


def test_a_report_keeps_no_bytes_of_what_was_cut() -> None:
    """A list that is shortened would keep the bytes of the whole message in memory."""
    request = coordinator_pb2.SessionRequest(member=1, worker=said(0))
    request.worker.logged.add(step=1, values={"x" * 900: 1.0})
    bounds.check_report(request.worker)
    kept = bounds.kept(request)
    assert not kept.worker.logged
    assert sorted(kept.worker.metrics)[0].startswith("000 0000")
    assert 50 < len(kept.worker.metrics) < 70
    assert kept.ByteSize() < bounds.MAX_METRICS_BYTES + 10 * bounds.MAX_TEXT_CHARS


def test_members_of_a_role_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paramserver.coordinator.rpc.sessions.MAX_MEMBERS", 3)

    async def work(service: CoordinatorService) -> None:
        for number in range(3):
            await join(service, number + 1)
        with pytest.raises(errors.ConfigError, match="this job has 3 workers, and more cannot join"):
            await join(service, 4)
        again = await service.join(request(role=types_pb2.ROLE_WORKER, pid=3, incarnation=3))
        assert again.name == "worker-2", "a member that asks again is told its number"
        await service.join(request(role=types_pb2.ROLE_OBSERVER, pid=5))

    with_job(work)


def test_a_number_among_workers_is_below_the_number_of_members() -> None:
    """Names of members that are gone stay in the record, and so there are not more of them than of members."""
    with pytest.raises(errors.ProtocolError, match="index 4096 is out of bounds"):
        bounds.check_newcomer(request(index=bounds.MAX_MEMBERS))


def test_facts_of_a_newcomer_have_room_together() -> None:
    joining = request(address="a" * 1000, restart_command="c" * 100)
    bounds.check_newcomer(joining)
    assert not joining.restart_command, "people can do without it"
    with pytest.raises(errors.ProtocolError, match="have 1100 bytes, and 1024 is the most"):
        bounds.check_newcomer(request(address="a" * 1000, host="h" * 100))
