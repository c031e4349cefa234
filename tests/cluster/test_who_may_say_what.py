"""Each field of each request, from each wrong role and member, beyond its bound, and from a member that has left.

Over real sockets, with certificates and with tokens alone. Each call is refused in one sentence, and nothing changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from paramserver import errors
from paramserver.transport.base import METHODS, Method, MethodKind
from paramserver.transport.security import fields
from paramserver.transport.security.fields import HEADERS, MAX_CLAIM, MAX_COUNT, Rule, parts_of, request_of, rules
from paramserver.transport.security.policy import ADMIN_METHODS, CALLERS, GUEST_METHODS, OBSERVER_METHODS
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from tests.support.cluster.sockets import Sockets, credentials, sockets, state

CALL_S = 20.0
AT_ONCE = 16
# Who calls, and as what the called side knows it.
ACTORS = {"guest": "guest", "worker": "worker", "server": "server", "observer": "observer"}
REFUSED = errors.DeniedError
STRANGER = (errors.NotMemberError, errors.FencedError, errors.UnavailableError, errors.DeniedError)


@dataclass(frozen=True)
class Place:
    """A field of a request, or of a part of it. ``path``: the fields that lead to it."""

    method: Method
    path: tuple[FieldDescriptor, ...]
    rule: Rule

    @property
    def field(self) -> FieldDescriptor:
        return self.path[-1]

    def roles(self) -> frozenset[str]:
        """Those who may send the field here."""
        allowed = CALLERS[self.method.name] | ({"observer"} if self.method.name in OBSERVER_METHODS else frozenset())
        if self.method.name in GUEST_METHODS:
            allowed |= {"guest", "observer", "worker", "server"}
        for step in self.path:
            assert step.containing_type is not None
            rule = next(r for r in rules(step.containing_type.name) if r.name == step.name)
            allowed = allowed if rule.roles is None else allowed & rule.roles
        return allowed

    def message(self, number: int, value: Any = None) -> Message:
        """A request with this field. ``number``: that of the member for which it speaks."""
        request = GetMessageClass(request_of(self.method))()
        inside: Any = request
        for step in self.path[:-1]:
            inside = getattr(inside, step.name).add() if step.is_repeated else getattr(inside, step.name)
            if not isinstance(inside, Message):
                raise AssertionError(step.name)
            inside.SetInParent() if not step.is_repeated else None
        put(inside, self.field, value)
        name_member(request, number)
        return request


def put(message: Any, field: FieldDescriptor, value: Any = None) -> None:
    """Set a field, to something small if no value is given."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        kind = field.message_type.fields_by_name["value"]
        if kind.message_type is not None:
            getattr(message, field.name)["x"].SetInParent()
        elif kind.type == FieldDescriptor.TYPE_STRING:
            getattr(message, field.name)["x" if field.name != "names" else 1] = "x"
        else:
            getattr(message, field.name)["x"] = 1
        return
    if field.message_type is not None:
        (getattr(message, field.name).add() if field.is_repeated else getattr(message, field.name)).SetInParent()
        return
    small: Any = 1 if value is None else value
    if field.type == FieldDescriptor.TYPE_STRING:
        small = "x"
    elif field.type == FieldDescriptor.TYPE_BYTES:
        small = b"x"
    elif field.type == FieldDescriptor.TYPE_BOOL:
        small = True
    if field.is_repeated:
        getattr(message, field.name).append(small)
    else:
        setattr(message, field.name, small)


def name_member(request: Any, number: int) -> None:
    """Put the number of the member where the request has it."""
    if isinstance(request, shard_pb2.ExchangeRequest):
        if not request.HasField("pull"):
            request.push.SetInParent()
        for half in ("push", "pull"):
            if request.HasField(half):
                getattr(request, half).worker = number
    for rule in rules(request.DESCRIPTOR.name):
        if rule.kind == fields.OWN:
            setattr(request, rule.name, number)


def places() -> Iterator[Place]:
    """Each field of each request, and each field of each message within requests at one place."""
    seen: set[str] = set()
    for method in METHODS.values():

        def walk(message: Descriptor, path: tuple[FieldDescriptor, ...], method: Method = method) -> Iterator[Place]:
            if path and message.name in seen:
                return
            seen.add(message.name)
            by_name = {rule.name: rule for rule in rules(message.name)}
            for field in message.fields:
                yield Place(method, (*path, field), by_name[field.name])
            for field, part in parts_of(message):
                yield from walk(part, (*path, field))

        yield from walk(request_of(method), ())


def test_each_field_of_each_request_is_in_the_table_and_nothing_else() -> None:
    assert set(fields.FIELDS) == set(fields.senders())
    for place in places():
        message = place.field.containing_type
        assert message is not None
        assert [rule.name for rule in rules(message.name)] == [field.name for field in message.fields], message.name


def test_the_kinds_and_roles_of_the_table_mean_something() -> None:
    known = {"worker", "server", "observer", "coordinator", "admin"}
    for message in fields.FIELDS:
        for rule in rules(message):
            assert rule.kind in ("", fields.OWN, fields.RISING, fields.ANY)
            assert rule.roles is None or rule.roles <= known


async def call(one: Sockets, actor: str, method: Method, message: Message) -> BaseException | None:
    """Make a call, as a process of this name; the error with which it ends."""
    channel = one.channel(actor, method.service)
    if isinstance(message, coordinator_pb2.JoinRequest):
        message.role = types_pb2.ROLE_SERVER if actor.startswith("server") else types_pb2.ROLE_WORKER
    try:
        async with asyncio.timeout(CALL_S):
            if method.kind is MethodKind.UNARY:
                await channel.call(method.name, message, timeout=CALL_S)
            elif method.kind is MethodKind.UPLOAD:
                frame = shard_pb2.Frame()
                getattr(frame.header, HEADERS[method.name]).MergeFrom(message)
                getattr(frame.header, HEADERS[method.name]).SetInParent()
                await channel.upload(method.name, [frame.SerializeToString()], timeout=CALL_S)
            elif method.kind is MethodKind.DOWNLOAD:
                async for _ in channel.download(method.name, message, timeout=CALL_S):
                    pass
            else:

                async def requests() -> Any:
                    yield message

                async for _ in channel.session(method.name, requests()):
                    pass
    except (errors.ParamServerError, TimeoutError) as error:
        return error
    return None


Case = tuple[str, Place, Message]


async def refused(one: Sockets, cases: list[Case], check: Callable[[Case, BaseException | None], None]) -> None:
    """Make all these calls, and see that nothing has changed."""
    before = state(one)
    room = asyncio.Semaphore(AT_ONCE)

    async def one_case(case: Case) -> None:
        async with room:
            actor, place, message = case
            check(case, await call(one, actor, place.method, message))

    await asyncio.gather(*(one_case(case) for case in cases))
    assert state(one) == before


def told(case: Case) -> str:
    actor, place, message = case
    return f"{actor}: {place.method.name} {'.'.join(step.name for step in place.path)} ({message})"


def denied(case: Case, error: BaseException | None) -> None:
    actor, place, _ = case
    if actor == "observer" and place.method.service == "Shard" and place.method.name not in GUEST_METHODS:
        strange(case, error)  # servers are not told of observers
        return
    if place.method.kind is MethodKind.UPLOAD and isinstance(error, errors.FencedError):
        return  # the answer came before anything of the upload was read
    assert isinstance(error, REFUSED), f"{told(case)}: {error!r}"
    assert "permission denied" in str(error) or "the call takes" in str(error), error
    assert "\n" not in str(error)


def strange(case: Case, error: BaseException | None) -> None:
    assert isinstance(error, STRANGER), f"{told(case)}: {error!r}"
    assert "\n" not in str(error)


def beyond(case: Case, error: BaseException | None) -> None:
    _, place, message = case
    if place.method.kind is MethodKind.UPLOAD and isinstance(error, errors.FencedError | errors.UnavailableError):
        with pytest.raises(errors.ProtocolError, match="is out of bounds"):  # nothing of it was read
            fields.check_numbers(message)
        return
    assert place.field.containing_type is not None
    assert isinstance(error, errors.ProtocolError), f"{told(case)}: {error!r}"
    assert f"{place.field.containing_type.name}.{place.field.name}" in str(error), error
    assert "is out of bounds" in str(error)


Work = Callable[[Sockets], Awaitable[None]]


def with_sockets(directory: Path | None, work: Work) -> None:
    async def go() -> None:
        async with sockets(credentials(directory)) as one:
            await work(one)

    asyncio.run(go())


@pytest.fixture(params=["certificates", "tokens"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "certs" if request.param == "certificates" else None


def test_from_every_wrong_role(directory: Path | None) -> None:
    async def work(one: Sockets) -> None:
        numbers = {name: session.member for name, session in one.sessions.items()} | {"guest": 0}
        cases = [
            (actor, place, place.message(numbers[actor]))
            for place in places()
            for actor, role in ACTORS.items()
            if role not in place.roles() and not (actor == "guest" and role_less(place))
        ]
        assert len(cases) > 1000
        await refused(one, cases, denied)

    def role_less(place: Place) -> bool:
        """A guest names no member: see `test_from_a_process_that_is_no_member`."""
        members_alone = bool({"worker", "server"} & CALLERS[place.method.name])
        joins = place.method.name == "Coordinator.Join"  # in whatever role it says
        return joins or (members_alone and place.method.name not in GUEST_METHODS)

    with_sockets(directory, work)


def test_from_the_right_role_and_another_member(directory: Path | None) -> None:
    async def work(one: Sockets) -> None:
        victims = {name: session.member for name, session in one.sessions.items()}
        cases: list[Case] = []
        for place in places():
            if not fields.own_numbers(place.message(1)) or place.method.name in ADMIN_METHODS:
                continue
            for victim in ("worker", "server"):
                cases.append(("worker-2", place, place.message(victims[victim])))
        assert len(cases) > 300
        await refused(one, cases, denied)

    with_sockets(directory, work)


def test_from_a_process_that_is_no_member(directory: Path | None) -> None:
    """It has left, and shows the secret that it had; or it never was one."""

    async def work(one: Sockets) -> None:
        gone = one.sessions["worker-gone"].member
        cases: list[Case] = []
        for place in places():
            if place.method.name in GUEST_METHODS or place.method.name in ADMIN_METHODS:
                continue
            cases.append(("worker-gone", place, place.message(gone)))
            cases.append(("guest", place, place.message(4711)))
        assert len(cases) > 500
        await refused(one, cases, strange)

    with_sockets(directory, work)


def test_beyond_the_bound(directory: Path | None) -> None:
    """From the coordinator, and from the right member."""

    async def work(one: Sockets) -> None:
        numbers = {name: session.member for name, session in one.sessions.items()}
        key = one.server.service.process.key
        if one.secure("worker").certificates is None:
            one.securities["coordinator-key"] = one.secure("coordinator")
            one.securities["coordinator-key"].secret = key
        cases: list[Case] = []
        for place in places():
            message = place.field.containing_type
            assert message is not None
            if place.field.type != FieldDescriptor.TYPE_UINT64 or place.rule.kind == fields.ANY:
                continue
            if message.name == "ModelSpec" or any(step.name == "model" for step in place.path):
                continue  # bounded by arithmetic: tests/cluster/test_hostile.py
            callers = place.roles()
            trusted = CALLERS[place.method.name] == {"coordinator"}
            actor = next((name for name in ("worker", "server") if name in callers), "")
            actor = actor or ("admin" if callers <= {"admin", "observer"} else "coordinator-key")
            most = MAX_CLAIM if place.rule.kind == fields.RISING and not trusted else MAX_COUNT
            cases.append((actor, place, place.message(numbers.get(actor, 0), most + 1)))
        assert len(cases) > 150
        await refused(one, cases, beyond)

    with_sockets(directory, work)


def test_a_worker_does_not_speak_for_servers(directory: Path | None) -> None:
    """One report made the coordinator step down, a second one left a job that nobody could start any more."""

    async def work(one: Sockets) -> None:
        worker, server = one.sessions["worker"].member, one.sessions["server"].member
        reports = [
            coordinator_pb2.SessionRequest(member=worker, shards=[shard_pb2.StatsResponse(holds="x", term=term)])
            for term in (2**62, MAX_CLAIM, 1)
        ]
        reports.append(coordinator_pb2.SessionRequest(member=server, leaving=True))
        before = state(one)
        for report in reports:
            error = await call(one, "worker", METHODS["Coordinator.Session"], report)
            assert isinstance(error, errors.DeniedError), error
        assert state(one) == before
        assert {"worker-1", "worker-2", "server-0"} <= {m.name for m in members(one)}

    def members(one: Sockets) -> list[Any]:
        job = one.coordinator.job
        return [job.members.get(session.member) for session in one.sessions.values() if session.member in job.members]

    with_sockets(directory, work)


def test_a_coordinator_steps_down_only_if_the_store_says_so(directory: Path | None) -> None:
    """A server says that it follows a newer coordinator."""

    async def work(one: Sockets) -> None:
        server = one.sessions["server"].member
        before = state(one)
        for term in (one.coordinator.job.term + 1, MAX_CLAIM):
            report = coordinator_pb2.SessionRequest(member=server, shards=[shard_pb2.StatsResponse(term=term)])
            error = await call(one, "server", METHODS["Coordinator.Session"], report)
            assert isinstance(error, errors.ProtocolError), error
            assert "the store knows of none after this one" in str(error)
        assert state(one) == before

    with_sockets(directory, work)


def test_servers_keep_no_keys(directory: Path | None) -> None:
    """The record that a server is told has the proofs of all members, and no key."""

    async def work(one: Sockets) -> None:
        kept = one.server.service.process.record
        assert {entry.member for entry in kept.members} == {
            one.sessions[name].member for name in ("server", "worker", "worker-2")
        }
        assert all(entry.proof and not entry.key for entry in kept.members)
        (server,) = (entry for entry in one.coordinator.job.journal.record_now.members if entry.key)
        assert server.key == one.server.service.process.key

    with_sockets(directory, work)


def test_the_header_of_an_upload_is_judged_wherever_it_stands(directory: Path | None) -> None:
    """Protobuf takes the fields of a frame in any order."""

    async def work(one: Sockets) -> None:
        push = shard_pb2.PushHeader(job="job", worker=one.sessions["worker"].member)
        header = shard_pb2.Frame(header=shard_pb2.FrameHeader(push=push)).SerializeToString()
        data = shard_pb2.Frame(data=b"x").SerializeToString()
        before = state(one)
        for raw in (header + data, data + header):
            with pytest.raises(errors.DeniedError, match="permission denied"):
                await one.channel("worker-2", "Shard").upload("Shard.Push", [raw], timeout=CALL_S)
        for raw in (data, b"\x0a", b"\xff" * 8):
            with pytest.raises(errors.ProtocolError):
                await one.channel("worker", "Shard").upload("Shard.Push", [raw], timeout=CALL_S)
        assert state(one) == before

    with_sockets(directory, work)
