"""No error class and no status code is without a counterpart, and errors survive the trip."""

from __future__ import annotations

import asyncio
import logging
import pickle

import pytest

from paramserver import errors
from paramserver.transport.addresses import join, target
from paramserver.transport.base import MAX_MESSAGE_BYTES, METHODS, MethodKind
from paramserver.transport.failures import (
    CLASSES,
    CODES,
    MAX_TEXT_CHARS,
    MEANINGS,
    answered,
    from_code,
    remote_error,
    travelling,
)
from paramserver.transport.grpcio import grpc

WHERE = "Shard.Push at host:1"


def descendants(kind: type[errors.ParamServerError]) -> set[type[errors.ParamServerError]]:
    """All classes of the tree in errors.py below and with ``kind``."""
    below = {kind for kind in kind.__subclasses__() if kind.__module__ == errors.__name__}
    return {kind}.union(*(descendants(child) for child in below))


def test_every_class_has_a_code_and_travels() -> None:
    everything = descendants(errors.ParamServerError)
    assert set(CODES) == everything
    assert set(CLASSES.values()) == everything
    for kind in everything:
        assert CODES[kind] is not grpc.StatusCode.OK
        name, text = (lambda pair: (pair[0].__name__, pair[1]))(travelling(kind("a × b"), WHERE))
        error = remote_error(name, text)
        assert type(error) is kind
        assert str(error) == "a × b"


def test_every_code_has_a_meaning() -> None:
    """OK, too: a peer may end a call properly while the caller is not through with it."""
    assert set(MEANINGS) == set(grpc.StatusCode)
    for code in MEANINGS:
        error = from_code(code, "some details", WHERE, 3.0)
        assert type(error) is MEANINGS[code]
        assert WHERE in str(error)
        assert "\n" not in str(error)


def test_a_code_means_a_relative_of_the_classes_that_use_it() -> None:
    """Who reads only the code, such as a proxy, must not take one kind of error for another kind of reaction."""
    for kind, code in CODES.items():
        apart = (errors.StoreError, errors.JobFailedError, errors.EndedError, errors.UserError)
        if issubclass(kind, apart):
            continue
        assert issubclass(kind, MEANINGS[code]), kind


def test_errors_survive_pickling() -> None:
    for kind in CLASSES.values():
        copy = pickle.loads(pickle.dumps(kind("text")))
        assert type(copy) is kind
        assert str(copy) == "text"
        assert copy.exit_code == kind.exit_code


def test_an_unknown_name_gives_the_base_class() -> None:
    for name in ("", "SystemExit", "os.system", "ParamServerError2", "annotations"):
        assert type(remote_error(name, "text")) is errors.ParamServerError


def test_a_foreign_class_of_the_same_name_is_no_class_of_ours() -> None:
    fake = type("GoneError", (errors.StoreError,), {})
    assert travelling(fake("text"), WHERE) == (errors.StoreError, "text")


def test_long_texts_are_cut() -> None:
    kind, text = travelling(errors.GoneError("x" * 10_000), WHERE)
    assert kind is errors.GoneError
    assert len(text) == MAX_TEXT_CHARS
    assert text.endswith("x …")


def test_foreign_exceptions_are_hidden_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "paramserver"):
        kind, text = travelling(ValueError("secret"), WHERE)
    assert kind is errors.ParamServerError
    assert text == f"internal error in {WHERE}: ValueError; the log of that process tells more"
    assert "secret" in str(caplog.records[0].exc_info)


def test_a_new_error_does_not_refer_to_the_old_one() -> None:
    async def work() -> None:
        raise errors.GoneError("text")

    with pytest.raises(errors.GoneError, match="text") as caught:
        asyncio.run(answered(WHERE, work))
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_cancellation_passes_unless_nobody_asked_for_it() -> None:
    async def spontaneous() -> None:
        raise asyncio.CancelledError

    async def asked() -> None:
        async def work() -> None:
            await asyncio.Event().wait()

        task = asyncio.get_running_loop().create_task(answered(WHERE, work))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    with pytest.raises(errors.ParamServerError, match="internal error"):
        asyncio.run(answered(WHERE, spontaneous))
    asyncio.run(asked())


@pytest.mark.parametrize(
    ("code", "details", "kind", "text"),
    [
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "CLIENT: Received message larger than max (17825793 vs. 16777216)",
            errors.ProtocolError,
            f"{WHERE}: a message of 17825793 bytes is over the limit of {MAX_MESSAGE_BYTES} bytes; "
            "send it in smaller parts",
        ),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Concurrent RPC limit exceeded!",
            errors.OverloadedError,
            f"{WHERE}: the peer is overloaded, slow down (Concurrent RPC limit exceeded!)",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:1: Connection refused (111)",
            errors.UnavailableError,
            f"{WHERE}: nobody answers (Connection refused (111)); check that it runs and can be reached from here",
        ),
        (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "Deadline Exceeded",
            errors.DeadlineError,
            f"{WHERE}: no answer within 2.5 s",
        ),
        (
            grpc.StatusCode.CANCELLED,
            "CANCELLED",
            errors.UnavailableError,
            f"{WHERE}: nobody answers (it stopped or closed the connection); "
            "check that it runs and can be reached from here",
        ),
        (
            grpc.StatusCode.INTERNAL,
            "Received RST_STREAM with error code 2",
            errors.UnavailableError,
            f"{WHERE}: nobody answers (Received RST_STREAM with error code 2); "
            "check that it runs and can be reached from here",
        ),
        (
            grpc.StatusCode.UNIMPLEMENTED,
            "Method not found!",
            errors.VersionMismatchError,
            f"{WHERE}: the peer does not know this call; it runs another version, or it is something else",
        ),
        (
            grpc.StatusCode.INTERNAL,
            "",
            errors.ParamServerError,
            f"{WHERE}: the call failed with INTERNAL (no details)",
        ),
    ],
)
def test_bare_failures_in_words(
    code: grpc.StatusCode, details: str, kind: type[errors.ParamServerError], text: str
) -> None:
    error = from_code(code, details, WHERE, 2.5)
    assert type(error) is kind
    assert str(error) == text


# ---- the table of methods, and addresses


def test_the_kinds_of_methods_follow_from_the_protos() -> None:
    kinds: dict[MethodKind, list[str]] = {kind: [] for kind in MethodKind}
    for name, method in METHODS.items():
        assert name == method.name
        kinds[method.kind].append(name)
    uploads = ["Initialize", "Push", "Forward", "CatchUp", "CatchUpPart", "ForwardPart"]
    assert kinds[MethodKind.UPLOAD] == [f"Shard.{one}" for one in uploads]
    assert kinds[MethodKind.DOWNLOAD] == ["Shard.Pull", "Shard.Export", "Shard.Copied", "Shard.Collect"]
    assert kinds[MethodKind.SESSION] == ["Coordinator.Session"]
    assert METHODS["Shard.SetConsistency"].handler == "set_consistency"
    assert METHODS["Shard.SetConsistency"].path == "/paramserver.v1.ShardService/SetConsistency"
    assert METHODS["Coordinator.InitializeDone"].handler == "initialize_done"
    assert METHODS["Coordinator.InitializeDone"].request.__name__ == "InitializeDoneRequest"
    assert METHODS["Coordinator.InitializeDone"].response.__name__ == "InitializeDoneResponse"


def test_malformed_messages_are_refused() -> None:
    with pytest.raises(errors.ProtocolError, match=r"Shard\.Stats: 3 bytes that are no StatsRequest"):
        METHODS["Shard.Stats"].decode_request(b"\xff\xff\xff")


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("127.0.0.1:8790", "ipv4:127.0.0.1:8790"),
        ("[::1]:8790", "ipv6:[::1]:8790"),
        ("[fe80::1]:65535", "ipv6:[fe80::1]:65535"),
        ("localhost:1", "dns:///localhost:1"),
        ("unix:8790", "dns:///unix:8790"),
        ("ps-server.local:8790", "dns:///ps-server.local:8790"),
    ],
)
def test_addresses_become_targets(address: str, name: str) -> None:
    assert target(address) == name


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        ":8790",
        "host:0",
        "host:65536",
        "host:-1",
        "host:1x",
        "host:²",
        "::1:8790",
        "[host]:1",
        "a:b",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(errors.ConfigError, match="write host:port"):
        target(address)


def test_hosts_and_ports_are_joined() -> None:
    assert join("127.0.0.1", 1) == "127.0.0.1:1"
    assert join("::1", 8790) == "[::1]:8790"
