"""Doctor on the coordinator: answers, versions, clocks; and on the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from google.protobuf.message import Message

from paramserver.config import load_settings
from paramserver.doctor import network, storage
from paramserver.doctor.finding import Level
from paramserver.doctor.network import (
    Answer,
    StubShard,
    ask,
    check_clock,
    check_reachable,
    check_versions,
)
from paramserver.errors import (
    ConfigError,
    DeadlineError,
    DeniedError,
    NotLeaderError,
    ParamServerError,
    UnavailableError,
    VersionMismatchError,
)
from paramserver.store.base import StoreFacts
from paramserver.v1.coordinator_pb2 import ProbeResponse

WELL = Answer("127.0.0.1:8790", protocol=1, versions={"torch": "2.13.0"}, doubt_s=0.0005)
STANDBY = Answer("127.0.0.1:8791", stands_by=True)


class FakeChannel:
    """Answers probes by a function."""

    kind = "fake"
    address = ""

    def __init__(self, answer: Callable[[], Message]) -> None:
        self.answer = answer
        self.closed = False

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        assert method == "Coordinator.Probe"
        assert timeout > 0
        return self.answer()

    async def close(self) -> None:
        self.closed = True


def asked(answer: Callable[[], Message], address: str = "127.0.0.1:8790") -> Answer:
    channel = FakeChannel(answer)
    found = asyncio.run(ask(address, lambda _: channel))  # type: ignore[arg-type, return-value]
    assert channel.closed
    return found


def test_the_quickest_of_several_answers_tells_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clock is 100 s ahead; the way there and back takes most of a second, once only a fiftieth."""
    now = 1000.0
    there_and_back = iter([(0.5, 0.1), (0.01, 0.01), (0.1, 0.9), (0.4, 0.4), (0.3, 0.2)])
    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now + 5.0))

    def answer() -> Message:
        nonlocal now
        there, back = next(there_and_back)
        response = ProbeResponse(wall_time_s=now + there + 105.0, protocol=1, versions={"torch": "2"})
        now += there + back
        return response

    found = asked(answer)
    assert next(there_and_back, None) is None
    assert (found.protocol, found.versions, found.usable) == (1, {"torch": "2"}, True)
    assert found.doubt_s == pytest.approx(0.01)
    assert found.offset_s == pytest.approx(100.0)


@pytest.mark.parametrize("error", [DeniedError("no"), UnavailableError("nobody"), DeadlineError("late")])
def test_an_error_is_taken_down(error: ParamServerError) -> None:
    def answer() -> Message:
        raise error

    found = asked(answer)
    assert (found.error, found.usable) == (error, False)


def test_a_coordinator_that_stands_by_is_no_error() -> None:
    def answer() -> Message:
        raise NotLeaderError("ask the other one")

    assert asked(answer) == Answer("127.0.0.1:8790", stands_by=True)


def test_a_name_that_nobody_knows() -> None:
    found = asyncio.run(ask("no such host:1", lambda _: pytest.fail("nothing is connected")))
    assert isinstance(found.error, ConfigError)
    line = check_reachable([found])
    assert 'the name "no such host" is not known here' in line.value
    assert line.remedy == "correct cluster.coordinator, or the name service"


def test_reachable() -> None:
    found = check_reachable([WELL, STANDBY])
    assert found.level is Level.OK
    assert found.value == "127.0.0.1:8790 answers after 1.0 ms; 127.0.0.1:8791 stands by"


def test_nobody_leads() -> None:
    found = check_reachable([STANDBY])
    assert (found.level, "takes over" in found.remedy) == (Level.WARN, True)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (UnavailableError("nobody answers"), "paramserver start coordinator"),
        (DeadlineError("no answer within 5 s"), "firewalls"),
        (DeniedError("permission denied"), "use the certificates and the token of that job"),
        (VersionMismatchError("does not know this call"), "another program, or another release"),
        (ConfigError("connecting takes TLS: make certificates"), "make certificates"),
    ],
)
def test_not_reachable(error: ParamServerError, remedy: str) -> None:
    found = check_reachable([Answer("h:1", error)])
    assert found.level is Level.FAIL
    assert str(error) in found.value
    assert remedy in found.remedy
    assert check_reachable([WELL, Answer("h:1", error)]).level is Level.WARN


VERSIONS = {"paramserver": "0.2.0", "torch": "2.13.0", "grpcio": "1.85.1"}


def test_equal_versions() -> None:
    found = check_versions(Answer("h:1", protocol=1, versions=VERSIONS), 1, VERSIONS)
    assert (found.level, found.remedy) == (Level.OK, "")
    assert found.value == "the same there: protocol 1, paramserver 0.2.0, torch 2.13.0, grpcio 1.85.1"


def test_versions_that_differ_are_a_table() -> None:
    theirs = {**VERSIONS, "torch": "2.12.1", "grpcio": "1.76.0"}
    found = check_versions(Answer("h:1", protocol=1, versions=theirs), 1, VERSIONS)
    assert found.level is Level.WARN
    assert found.value.splitlines() == [
        "2 of 4 differ",
        "          here    coordinator",
        "  torch   2.13.0  2.12.1",
        "  grpcio  1.85.1  1.76.0",
    ]
    assert found.remedy.startswith("install the same torch on all machines")


@pytest.mark.parametrize(
    ("protocol", "theirs", "level"),
    [
        (2, VERSIONS, Level.FAIL),
        (1, {**VERSIONS, "paramserver": "0.1.0"}, Level.WARN),
        (1, {**VERSIONS, "torch": "2.13.0+cpu"}, Level.NOTE),
        (1, {**VERSIONS, "grpcio": "1.80.0"}, Level.NOTE),
        (1, {}, Level.WARN),
    ],
    ids=["protocol", "paramserver", "another build", "grpcio", "nothing said"],
)
def test_how_bad_a_difference_is(protocol: int, theirs: dict[str, str], level: Level) -> None:
    found = check_versions(Answer("h:1", protocol=protocol, versions=theirs), 1, VERSIONS)
    assert found.level is level
    if level is Level.FAIL:
        assert found.remedy == "install the same version of paramserver on all machines"


@pytest.mark.parametrize(
    ("offset", "doubt", "level"),
    [(0.9, 0.0, Level.OK), (-0.9, 0.0, Level.OK), (1.2, 0.3, Level.OK), (1.2, 0.1, Level.WARN), (-60, 0.1, Level.WARN)],
)
def test_clock(offset: float, doubt: float, level: Level) -> None:
    found = check_clock(Answer("h:1", offset_s=offset, doubt_s=doubt))
    assert found.level is level
    assert f"{offset:+.3f} s from ours" in found.value
    assert ("NTP" in found.remedy) is (level is Level.WARN)


def test_the_stub_answers_who_asks_for_its_health_and_nobody_else() -> None:
    stub = StubShard()
    with pytest.raises(ConfigError, match="this is paramserver doctor"):
        stub.push(None)
    with pytest.raises(ConfigError, match="this is paramserver doctor"):
        stub.pull(None)
    assert stub.calls == 0


def test_a_way_back_that_cannot_be_listened_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(*_: object) -> network.Listening:
        raise ConfigError("cannot listen on port 9 of h: choose another port or host")

    monkeypatch.setattr(network, "server_place", lambda _: ("h", 9, "h"))
    settings = load_settings(environ={})
    connect: Callable[..., FakeChannel] = lambda _: pytest.fail("nothing is connected")  # noqa: E731
    found = asyncio.run(network.check_way_back("h:1", connect, serve, settings))  # type: ignore[arg-type]
    assert (found.level, found.value) == (Level.WARN, "not tried: cannot listen on port 9 of h")
    assert found.remedy == "choose another port or host"


# ---- the store


def test_a_store_that_is_well() -> None:
    facts = StoreFacts("valkey", "9.1.2", 256 << 20, "noeviction", True, 0.01)
    (found,) = storage.check_store(facts)
    assert found.level is Level.OK
    assert found.value == (
        "valkey 9.1.2, memory: 256 MiB, noeviction, writes every change to disk, clock +0.010 s from ours"
    )


def test_a_store_with_warnings_says_what_to_do_about_each() -> None:
    facts = StoreFacts("redis", "7.0.1", persistence=False, warnings=["it is old: update it", "not on disk: mend it"])
    plain, old, disk = storage.check_store(facts)
    assert (plain.level, "does not write every change to disk" in plain.value) == (Level.OK, True)
    assert (old.level, old.value, old.remedy) == (Level.WARN, "it is old", "update it")
    assert (disk.level, disk.remedy) == (Level.WARN, "mend it")


def test_a_store_that_must_not_be_used() -> None:
    facts = StoreFacts("redis", "8.2.2", 1, "allkeys-lru", refusal="it removes keys: set maxmemory-policy noeviction")
    (found,) = storage.check_store(facts)
    assert (found.level, found.value) == (Level.FAIL, "it removes keys")
    assert found.remedy == "set maxmemory-policy noeviction"


@pytest.mark.parametrize(("url", "says"), [("auto", "not configured here"), ("memory", "in the coordinator's memory")])
def test_no_store_here_is_nothing_to_worry_about(url: str, says: str) -> None:
    settings = load_settings(overrides={"cluster.store": url}, environ={})
    (found,) = asyncio.run(storage.look_at_store(settings))
    assert (found.level, found.remedy) == (Level.NOTE, "")
    assert says in found.value


def test_a_store_address_that_makes_no_sense_fails_without_its_password() -> None:
    settings = load_settings(overrides={"cluster.store": "redis://:hunter2@h:port/0"}, environ={})
    (found,) = asyncio.run(storage.look_at_store(settings))
    assert found.level is Level.FAIL
    assert "hunter2" not in str(found)
    assert found.remedy
