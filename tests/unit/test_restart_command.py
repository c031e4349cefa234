"""A process tells with which command it is started again; `status` names the command when the process is lost."""

from __future__ import annotations

import socket

import pytest

from paramserver.config import load_settings
from paramserver.coordinator.rpc.status import job_facts
from paramserver.coordinator.service import CoordinatorService
from paramserver.core.job.membership import Joined, Role
from paramserver.core.job.seats import Facts, Gone
from paramserver.errors import ProtocolError
from paramserver.membership.joining import restart_command
from paramserver.v1 import types_pb2
from tests.support.unit.joins import request, with_job

COMMAND = "docker start 3f2a"


def test_it_comes_from_the_environment_with_the_name_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert restart_command() == ""
    monkeypatch.setenv("PARAMSERVER_RESTART_COMMAND", "docker start $HOSTNAME")
    assert restart_command() == f"docker start {socket.gethostname()}"
    load_settings()  # it is no setting, and no unknown one


@pytest.mark.parametrize(
    ("own", "told", "shown"),
    [
        ("docker start $HOSTNAME", COMMAND, COMMAND),
        ("docker start $HOSTNAME", "docker start host-1.example", "docker start host-1.example"),
        ("docker start $HOSTNAME", "docker start x; rm -rf ~", ""),
        ("docker start $HOSTNAME", "docker start $(rm -rf ~)", ""),
        ("docker start $HOSTNAME", "docker start --help", ""),
        ("docker start $HOSTNAME", "rm -rf ~", ""),
        ("ssh a start-it", "ssh a start-it", "ssh a start-it"),
        ("ssh a start-it", "ssh b start-it", ""),
        ("", COMMAND, ""),
        ("docker start $HOSTNAME", "", ""),
    ],
)
def test_people_are_told_to_type_the_words_of_the_coordinators_own_environment(
    own: str, told: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker could write any command, and `status` told people to type it."""
    monkeypatch.setenv("PARAMSERVER_RESTART_COMMAND", own)

    async def work(service: CoordinatorService) -> None:
        await service.join(request(role=types_pb2.ROLE_WORKER, restart_command=told))
        (member,) = service.job.members.of(Role.WORKER)
        assert member.restart_command == shown

    with_job(work)


@pytest.mark.parametrize("command", [COMMAND, ""])
@pytest.mark.parametrize("role", [Role.WORKER, Role.SERVER])
def test_a_lost_process_is_named_with_what_to_type(role: Role, command: str) -> None:
    async def work(service: CoordinatorService) -> None:
        job = service.job
        job.members.handle(Joined(role, pid=7, incarnation=1, restart_command=command), 0.0)
        (member,) = job.members.of(role)
        (row,) = job.record().members
        assert row.restart_command == command, "the next coordinator knows it, too"
        job.members.forget(member.ident)
        job.reports.removed(member, lost=True, reason=f"{member.name} has ended")
        if role is Role.SERVER:
            facts = Facts(job.options.job, servers=1, layout="digest")
            job.seats.handle(Gone(member, True, f"{member.name} has ended", facts), 0.0)
        shown = job_facts(job)
        (said,) = shown.missed if role is Role.WORKER else shown.away
        assert said.endswith(f" (if nothing starts it again, type: {COMMAND})") == bool(command)
        (gone,) = job.reports.departed()
        assert gone.restart_command == command

    with_job(work)


@pytest.mark.parametrize("command", ["a\nb", "\x1b[2J", "x" * 301])
def test_a_command_that_could_not_be_shown_is_refused(command: str) -> None:
    async def work(service: CoordinatorService) -> None:
        with pytest.raises(ProtocolError, match="the restart command"):
            await service.join(request(role=types_pb2.ROLE_WORKER, restart_command=command))

    with_job(work)
