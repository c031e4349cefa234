"""Who is let in: one protocol, one role per certificate, one set of settings, and servers with the right shard."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any

import pytest

from paramserver import errors
from paramserver.coordinator.admission import admit_server, check_join, check_versions, server_gone
from paramserver.coordinator.job import Job
from paramserver.coordinator.service import CoordinatorService
from paramserver.core.job.life import Ends, Phase
from paramserver.core.job.membership import Joined, Member, Renewed, Role
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.membership.joining import versions
from paramserver.transport.base import Caller, set_caller
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.wire.messages import PROTOCOL
from tests.support.unit.joins import ASYNC, request, with_job


def check(asked: coordinator_pb2.JoinRequest, role: Role = Role.WORKER, **options: Any) -> None:
    async def work(service: CoordinatorService) -> None:
        check_join(service.job, asked, role)

    with_job(work, **options)


# ---- the state of the job


@pytest.mark.parametrize(
    ("phase", "error", "text"),
    [
        (Phase.FAILED, errors.JobFailedError, "^why it ended$"),
        (Phase.DONE, errors.EndedError, r"nothing left to do: job 'test' has ended \(why it ended\)"),
        (Phase.STOPPED, errors.EndedError, r"nothing left to do: job 'test' has ended \(why it ended\)"),
    ],
)
def test_a_job_that_has_ended(phase: Phase, error: type[Exception], text: str) -> None:
    async def work(service: CoordinatorService) -> None:
        service.job.life.handle(Ends(phase, "why it ended"))
        check_join(service.job, request(), Role.WORKER)

    with pytest.raises(error, match=text):
        with_job(work)


def test_another_job() -> None:
    check(request(job="test"))
    with pytest.raises(errors.ConfigError, match="this coordinator runs job 'test', not 'other'"):
        check(request(job="other"))


# ---- roles


@pytest.mark.parametrize(
    ("roles", "role", "allowed"),
    [
        ({"worker"}, Role.WORKER, True),
        ({"server"}, Role.SERVER, True),
        ({"server"}, Role.WORKER, False),
        ({"worker"}, Role.SERVER, False),
        ({"admin"}, Role.WORKER, False),
        ({"coordinator"}, Role.SERVER, False),
        ({"worker"}, Role.OBSERVER, True),
        ({"admin"}, Role.OBSERVER, True),
        ({"server"}, Role.OBSERVER, False),
        ({"worker", "server", "coordinator", "admin"}, Role.SERVER, True),
        (set(), Role.WORKER, False),
    ],
)
def test_nobody_takes_part_in_another_role(roles: set[str], role: Role, allowed: bool) -> None:
    def attempt() -> None:
        set_caller(Caller(frozenset(roles), admin=True))
        if allowed:
            check(request(), role)
        else:
            with pytest.raises(errors.DeniedError, match=r"^permission denied$"):
                check(request(), role)

    copy_context().run(attempt)


# ---- versions


def test_another_protocol_is_refused_with_a_table() -> None:
    theirs = {**versions(), "torch": "1.0.0"}
    with pytest.raises(errors.VersionMismatchError) as caught:
        check_versions(PROTOCOL + 1, theirs, Role.WORKER)
    first, *table = str(caught.value).splitlines()
    assert first.startswith("versions differ (the protocol): install the same version of paramserver and torch")
    rows = {line.split()[0]: line for line in table}
    assert rows["protocol"].endswith("<- differs")
    assert rows["torch"].endswith("<- differs")
    assert not rows["numpy"].endswith("<- differs")


@pytest.mark.parametrize("package", ["torch", "paramserver"])
def test_other_versions_of_what_decides_the_bits(package: str) -> None:
    with pytest.raises(errors.VersionMismatchError, match=rf"versions differ \({package}\)"):
        check_versions(PROTOCOL, {**versions(), package: "0.0.1"}, Role.WORKER)


def test_builds_of_one_version_are_equal() -> None:
    """A GPU build beside a CPU build."""
    mine = versions()["torch"].partition("+")[0]
    check_versions(PROTOCOL, {**versions(), "torch": f"{mine}+cu999"}, Role.WORKER)


def test_other_packages_and_those_who_only_look_may_differ() -> None:
    check_versions(PROTOCOL, {**versions(), "numpy": "0.1", "python": "2.7"}, Role.WORKER)
    check_versions(PROTOCOL, {"torch": "0.1"}, Role.OBSERVER)
    check_versions(PROTOCOL, {}, Role.WORKER)


def test_a_hostile_table_stays_short() -> None:
    many = {f"package-{number}" * 50: "9" * 1000 for number in range(1000)}
    with pytest.raises(errors.VersionMismatchError) as caught:
        check_versions(PROTOCOL + 1, many, Role.WORKER)
    assert len(str(caught.value)) < 2000


# ---- settings


def test_who_has_no_opinion_is_let_in() -> None:
    check(request(), consistency=ASYNC, slices_per_step=4)


def test_the_modes_of_the_start_and_of_now_are_accepted() -> None:
    """The launcher's file says how the job began; it may have been changed since."""

    async def work(service: CoordinatorService) -> None:
        service.job.life.agree(Consistency(Mode.ASYNC, 5, revision=1))
        for mode, staleness in [(types_pb2.MODE_SYNC, None), (types_pb2.MODE_ASYNC, 5)]:
            check_join(service.job, request(mode=mode, staleness=staleness), Role.WORKER)
        with pytest.raises(
            errors.ConfigError, match=r"consistency\.staleness = 3, the job runs async with staleness 5"
        ):
            check_join(service.job, request(mode=types_pb2.MODE_ASYNC, staleness=3), Role.WORKER)

    with_job(work)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"mode": types_pb2.MODE_ASYNC, "staleness": 3}, r"consistency\.mode = async, the job runs sync"),
        ({"slices_per_step": 3}, r"training\.slices_per_step = 3, the job has 2"),
        ({"seed": 8}, r"training\.seed = 8, the job has 7"),
        ({"seed": 0}, r"training\.seed = 0, the job has 7"),
    ],
)
@pytest.mark.parametrize("role", [Role.WORKER, Role.SERVER])
def test_other_settings_are_refused(given: dict[str, Any], text: str, role: Role) -> None:
    with pytest.raises(errors.ConfigError, match=f"this {role.value} was started with {text}: use one setting"):
        check(request(**given), role)
    check(request(**given), Role.OBSERVER)


def test_slices_per_step_0_is_no_opinion() -> None:
    check(request(slices_per_step=0), slices_per_step=5)


# ---- servers


def admitted(
    asked: coordinator_pb2.JoinRequest,
    absent: int | None = None,
    present: int = 0,
    model: bool = True,
    silent: int | None = None,
    published: bool = True,
) -> tuple[int, Job]:
    """The index that a server gets where ``present`` servers are there and server ``absent`` is away.

    Server ``silent`` is there, but has no session. ``published``: version 0 is.
    """

    async def work(service: CoordinatorService) -> tuple[int, Job]:
        service.job.life.begin_timeline(1)
        registry = service.job.registry
        registry.model, registry.digest, registry.ready = types_pb2.ModelSpec(), "digest", published
        for number in range(present):
            # A seat has one server at most: those that are there leave the seat of the absent one.
            index = number + (absent is not None and number >= absent)
            joined = Joined(Role.SERVER, index, incarnation=100 + number, pid=200 + number)
            service.job.members.handle(joined, 0.0)
            if number != silent:
                service.job.members.handle(Renewed(number + 1), 0.0)
        if absent is not None:
            gone = Member(9, Role.SERVER, absent, f"server-{absent}", 0.0, incarnation=55)
            server_gone(service.job, gone, lost=True, reason="silence")
        if not model:  # the first model could not be set up, since that server was gone
            registry.model, registry.digest = None, ""
        try:
            return (await admit_server(service.job, asked, 1)).index, service.job
        except errors.ParamServerError as error:
            error.job = service.job  # type: ignore[attr-defined]
            raise

    found: tuple[int, Job] = with_job(work)
    return found


def test_a_newcomer_gets_the_index_it_wishes() -> None:
    assert admitted(request(), model=False)[0] == 1


def test_one_server_too_many() -> None:
    with pytest.raises(errors.ConfigError, match=r"job 'test' already has its 2 servers; raise cluster\.servers"):
        admitted(request(), present=2)


@pytest.mark.parametrize(("given", "silent"), [({}, 1), ({"replaces": [201]}, None)])
def test_one_that_comes_before_the_end_of_another_is_noticed_tries_again(given: dict[str, Any], silent: int) -> None:
    with pytest.raises(errors.UnavailableError, match=r"but server-1 is not heard of just now: a place"):
        admitted(request(**given), present=2, silent=silent)


def test_one_that_was_cut_off_gets_its_own_index_back() -> None:
    index, job = admitted(request(incarnation=55, holds="digest", timeline=2), absent=0, present=1)
    assert index == 0
    assert not job.seats.away


@pytest.mark.parametrize(
    "given",
    [
        {"incarnation": 54, "holds": "digest", "timeline": 2},
        {"incarnation": 55, "holds": "another", "timeline": 2},
        {"incarnation": 55, "holds": "digest", "timeline": 1},
        {"incarnation": 100, "holds": "digest", "timeline": 2},
    ],
)
def test_any_other_shard_is_of_an_earlier_run(given: dict[str, Any]) -> None:
    with pytest.raises(errors.JobFailedError, match="holds a shard of an earlier run of job 'test'") as caught:
        admitted(request(**given), absent=0, present=1)
    job = caught.value.job  # type: ignore[attr-defined]
    assert job.life.phase is not Phase.FAILED, "the job still waits for the right one"
    assert [away.member.index for away in job.seats.away] == [0]


def test_an_empty_one_in_the_place_of_one_that_is_missed_ends_the_job() -> None:
    with pytest.raises(errors.JobFailedError, match="a server has come without a shard in place of server-0") as caught:
        admitted(request(incarnation=77), absent=0, present=1)
    assert caught.value.job.life.phase is Phase.FAILED  # type: ignore[attr-defined]
    assert caught.value.job.over.result() == "failed"  # type: ignore[attr-defined]


def test_an_empty_one_in_the_place_of_one_that_is_missed_gets_its_part_of_version_0() -> None:
    index, job = admitted(request(incarnation=77), absent=0, present=1, published=False)
    assert index == 0
    assert not job.seats.away
    assert job.life.phase is not Phase.FAILED


def test_before_there_is_a_model_any_server_will_do() -> None:
    index, job = admitted(request(incarnation=77), absent=0, present=1, model=False, published=False)
    assert index == 0
    assert not job.seats.away, "nobody waits for a server that had no shard"
    assert job.life.phase is not Phase.FAILED


# ---- in place of a process that has ended


def test_who_ended_before_it_had_a_session_is_replaced_at_once() -> None:
    """Nobody has heard of its end but its launcher, who says so."""

    async def work(service: CoordinatorService) -> tuple[int, list[int]]:
        join = {"role": types_pb2.ROLE_WORKER, "job": "test", "index": 0}
        first = await service.join(request(**join, incarnation=1, pid=41))
        second = await service.join(request(**join, incarnation=2, pid=42, replaces=[41]))
        assert first.member != second.member
        return second.member, [member.ident for member in service.job.members.of(Role.WORKER)]

    second, present = with_job(work)
    assert present == [second]
