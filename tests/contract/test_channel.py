"""One suite for every transport: what callers and services may rely on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from paramserver import errors
from paramserver.transport.base import MAX_MESSAGE_BYTES
from paramserver.transport.failures import CLASSES
from paramserver.v1 import coordinator_pb2, shard_pb2
from tests.support.contract.channels import WIRES, Parked, Stub, Wires, echo, run, spawn
from tests.support.contract.requests import (
    ASK,
    MIB,
    PULL,
    PUSH,
    SESSION,
    STATUS,
    WANT,
    T,
    collect,
    one_of_each,
    reporting,
    silence,
)

# Frames of 4 MiB that may be under way: gRPC's windows and the kernel's buffers, never a whole transfer.
AHEAD = 24


@pytest.fixture(params=WIRES, ids=lambda wires: wires.kind)
def wires(request: pytest.FixtureRequest) -> type[Wires]:
    """Each transport in turn."""
    kind: type[Wires] = request.param
    return kind


async def requests(*messages: coordinator_pb2.SessionRequest) -> AsyncIterator[coordinator_pb2.SessionRequest]:
    for message in messages:
        yield message


def failing(error: Callable[[], BaseException]) -> tuple[tuple[str, object], tuple[str, object]]:
    """Services all of whose methods fail."""

    async def unary(_: object) -> Any:
        raise error()

    async def stream(_: object) -> AsyncIterator[Any]:
        for _ in range(1):
            raise error()
        yield

    return (
        ("Coordinator", Stub(status=unary, session=stream)),
        ("Shard", Stub(push=unary, pull=stream)),
    )


# ---- what travels


def test_unary_gives_a_copy_of_the_message(wires: type[Wires]) -> None:
    kept: list[Any] = []

    async def status(request: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
        kept.append(request)
        reply = coordinator_pb2.StatusResponse(job="before")
        kept.append(reply)
        return reply

    async def test(w: Wires) -> None:
        _, channel = await w.pair(("Coordinator", Stub(status=status)))
        request = coordinator_pb2.StatusRequest(model=True)
        reply = await channel.call(STATUS, request, timeout=T)
        assert reply == coordinator_pb2.StatusResponse(job="before")
        assert kept[0] == request
        assert kept[0] is not request
        assert kept[1] is not reply
        assert channel.kind == w.kind

    run(wires, test)


@pytest.mark.parametrize("sent", [[], [b"\x00"], [b"one", b"two", b"three"], [bytes([n]) * 1000 for n in range(256)]])
def test_upload_brings_all_frames_in_order(wires: type[Wires], sent: list[bytes]) -> None:
    got: list[bytes] = []

    async def push(frames: AsyncIterator[bytes]) -> shard_pb2.PushResponse:
        async for frame in frames:
            got.append(frame)
        return shard_pb2.PushResponse(version=len(got))

    async def test(w: Wires) -> None:
        _, channel = await w.pair(("Shard", Stub(push=push)))
        reply = await channel.upload(PUSH, iter(sent), timeout=T)
        assert reply == shard_pb2.PushResponse(version=len(sent))
        assert got == sent

    run(wires, test)


@pytest.mark.parametrize("sent", [[], [b"one", b"two", b"three"]])
def test_download_brings_all_frames_in_order(wires: type[Wires], sent: list[bytes]) -> None:
    async def pull(request: shard_pb2.PullRequest) -> AsyncIterator[bytes]:
        assert request == WANT
        for frame in sent:
            yield frame

    async def test(w: Wires) -> None:
        _, channel = await w.pair(("Shard", Stub(pull=pull)))
        assert await collect(channel) == sent

    run(wires, test)


def test_session_is_a_conversation(wires: type[Wires]) -> None:
    """Each answer depends on the request before it, and the end of the requests reaches the service."""

    async def session(asked: AsyncIterator[Any]) -> AsyncIterator[coordinator_pb2.SessionResponse]:
        async for request in asked:
            yield answer(request.member)
        yield answer(99)

    def answer(number: int) -> coordinator_pb2.SessionResponse:
        reply = coordinator_pb2.SessionResponse()
        reply.view.generation = number
        return reply

    async def test(w: Wires) -> None:
        _, channel = await w.pair(("Coordinator", Stub(session=session)))
        queue: asyncio.Queue[int] = asyncio.Queue()

        async def asking() -> AsyncIterator[coordinator_pb2.SessionRequest]:
            while (number := await queue.get()) > 0:
                yield coordinator_pb2.SessionRequest(member=number)

        queue.put_nowait(5)
        seen = []
        async for reply in channel.session(SESSION, asking()):
            assert isinstance(reply, coordinator_pb2.SessionResponse)
            seen.append(reply.view.generation)
            queue.put_nowait({5: 6, 6: 0}.get(reply.view.generation, 0))
        assert seen == [5, 6, 99]

    run(wires, test)


def test_a_large_upload_waits_for_its_reader(wires: type[Wires]) -> None:
    """The sender stops a few frames ahead of a service that does not read, and everything arrives once it does."""
    frame, count = bytes(4 * MIB), 40
    taken = 0
    ahead = asyncio.Event()
    gate = asyncio.Event()

    def frames() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(count):
            taken += 1
            if taken > AHEAD:
                ahead.set()
            yield frame

    async def push(asked: AsyncIterator[bytes]) -> shard_pb2.PushResponse:
        got = 0
        async for item in asked:
            got += len(item)
            await gate.wait()
        return shard_pb2.PushResponse(version=got)

    async def test(w: Wires) -> None:
        _, channel = await w.pair(("Shard", Stub(push=push)))
        upload = spawn(channel.upload(PUSH, frames(), timeout=T))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ahead.wait(), 0.3)
        gate.set()
        assert await upload == shard_pb2.PushResponse(version=count * len(frame))
        assert taken == count

    run(wires, test)


def test_a_large_download_waits_for_its_reader(wires: type[Wires]) -> None:
    frame, count = bytes(4 * MIB), 40
    made = 0
    ahead = asyncio.Event()

    async def pull(_: object) -> AsyncIterator[bytes]:
        nonlocal made
        for _ in range(count):
            made += 1
            if made > AHEAD:
                ahead.set()
            yield frame

    async def test(w: Wires) -> None:
        _, channel = await w.pair(("Shard", Stub(pull=pull)))
        got = 0
        async for item in channel.download(PULL, WANT, timeout=T):
            if not got:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(ahead.wait(), 0.3)
            got += len(item)
        assert got == count * len(frame)

    run(wires, test)


def test_64_parked_calls_hold_up_nobody(wires: type[Wires]) -> None:
    async def test(w: Wires) -> None:
        parked = Parked()
        _, channel = await w.pair(("Shard", Stub(pull=parked.download)), ("Coordinator", Stub(status=echo)))
        calls = [spawn(collect(channel)) for _ in range(64)]
        await parked.until(lambda: parked.arrived == 64)
        for _ in range(5):
            await channel.call(STATUS, ASK, timeout=T)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await parked.until(lambda: parked.left == 64)
        assert all(call.cancelled() for call in calls)

    run(wires, test)


# ---- errors of services


def test_every_error_class_survives_every_kind_of_call(wires: type[Wires]) -> None:
    current: list[type[errors.ParamServerError]] = []

    async def test(w: Wires) -> None:
        _, channel = await w.pair(*failing(lambda: current[-1](f"{current[-1].__name__}: größer\nals 3 × 4 %20")))
        for kind in CLASSES.values():
            current.append(kind)
            for call in await one_of_each(channel):
                with pytest.raises(errors.ParamServerError) as caught:
                    await call()
                assert type(caught.value) is kind
                assert str(caught.value) == f"{kind.__name__}: größer\nals 3 × 4 %20"

    run(wires, test)


def test_a_class_from_elsewhere_arrives_as_its_nearest_known_ancestor(wires: type[Wires]) -> None:
    class MyGone(errors.GoneError):
        pass

    async def test(w: Wires) -> None:
        _, channel = await w.pair(*failing(lambda: MyGone("version 3")))
        with pytest.raises(errors.GoneError) as caught:
            await channel.call(STATUS, ASK, timeout=T)
        assert type(caught.value) is errors.GoneError

    run(wires, test)


def test_a_very_long_text_is_cut_not_lost(wires: type[Wires]) -> None:
    async def test(w: Wires) -> None:
        _, channel = await w.pair(*failing(lambda: errors.GoneError("ü" * 100_000)))
        with pytest.raises(errors.GoneError) as caught:
            await channel.call(STATUS, ASK, timeout=T)
        assert str(caught.value).startswith("üüüü")
        assert str(caught.value).endswith(" …")

    run(wires, test)


@pytest.mark.parametrize("kind", [KeyError, ZeroDivisionError, TimeoutError, asyncio.CancelledError])
def test_a_foreign_exception_is_logged_here_and_hidden_there(
    wires: type[Wires], kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    async def test(w: Wires) -> None:
        _, channel = await w.pair(*failing(lambda: kind("secret")))
        for call in await one_of_each(channel):
            with pytest.raises(errors.ParamServerError, match="internal error in") as caught:
                await call()
            assert type(caught.value) is errors.ParamServerError
            assert "secret" not in str(caught.value)
            assert caught.value.__cause__ is None or "secret" not in str(caught.value.__cause__)

    with caplog.at_level(logging.ERROR, "paramserver"):
        run(wires, test)
    ours = [record for record in caplog.records if record.name.startswith("paramserver")]
    assert len(ours) == 4
    assert all("secret" in (record.exc_text or str(record.exc_info)) for record in ours)


def test_a_service_that_is_not_there(wires: type[Wires]) -> None:
    async def test(w: Wires) -> None:
        server, channel = await w.pair(("Coordinator", Stub(status=echo)))
        with pytest.raises(errors.VersionMismatchError, match="does not know this call") as caught:
            await channel.upload(PUSH, [b"x"], timeout=T)
        assert PUSH in str(caught.value)
        assert server.address in str(caught.value)

    run(wires, test)


# ---- peers that are not there


def test_nobody_answers(wires: type[Wires]) -> None:
    async def test(w: Wires) -> None:
        channel = w.connect(w.nowhere())
        for call, name in zip(await one_of_each(channel), (STATUS, PUSH, PULL, SESSION), strict=True):
            with pytest.raises(errors.UnavailableError, match="nobody answers") as caught:
                await call()
            assert name in str(caught.value)
            assert w.nowhere() in str(caught.value)

    run(wires, test)


def test_stopping_a_server_cancels_what_is_parked(wires: type[Wires]) -> None:
    async def test(w: Wires) -> None:
        parked = Parked()
        shard = Stub(push=parked.upload, pull=parked.download)
        coordinator = Stub(status=parked.unary, session=parked.session)
        server, channel = await w.pair(("Shard", shard), ("Coordinator", coordinator))
        calls = [spawn(call()) for call in await one_of_each(channel)]
        await parked.until(lambda: parked.arrived == 4)
        await server.stop()
        assert parked.ended == ["CancelledError"] * 4
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, errors.UnavailableError), result
        with pytest.raises(errors.UnavailableError):
            await channel.call(STATUS, ASK, timeout=T)

    run(wires, test)


def test_stopping_with_grace_lets_a_call_finish(wires: type[Wires]) -> None:
    arrived, gate = asyncio.Event(), asyncio.Event()

    async def status(_: object) -> coordinator_pb2.StatusResponse:
        arrived.set()
        await gate.wait()
        return coordinator_pb2.StatusResponse(job="done")

    async def test(w: Wires) -> None:
        server, channel = await w.pair(("Coordinator", Stub(status=status)))
        call = spawn(channel.call(STATUS, ASK, timeout=T))
        await arrived.wait()
        stop = spawn(server.stop(T))
        asyncio.get_running_loop().call_later(0.05, gate.set)
        assert await call == coordinator_pb2.StatusResponse(job="done")
        await stop

    run(wires, test)


def test_a_channel_finds_a_new_server_at_the_old_address(wires: type[Wires]) -> None:
    async def test(w: Wires) -> None:
        server, channel = await w.pair(("Coordinator", Stub(status=echo)))
        await channel.call(STATUS, ASK, timeout=T)
        await server.stop()
        with pytest.raises(errors.UnavailableError):
            await channel.call(STATUS, ASK, timeout=T)
        await w.serve(("Coordinator", Stub(status=echo)), again=server.address)
        while True:  # until the test's deadline
            try:
                await channel.call(STATUS, ASK, timeout=T)
                break
            except errors.UnavailableError:
                await asyncio.sleep(0.02)

    run(wires, test)


def test_an_address_is_served_once(wires: type[Wires]) -> None:
    async def test(w: Wires) -> None:
        server = await w.serve(("Coordinator", Stub(status=echo)))
        with pytest.raises(errors.ConfigError, match="in use"):
            await w.serve(("Coordinator", Stub(status=echo)), again=server.address)
        assert await w.connect(server.address).call(STATUS, ASK, timeout=T)

    run(wires, test)


# ---- deadlines and cancellation


def test_a_deadline_ends_the_call_on_both_sides(wires: type[Wires]) -> None:
    async def test(w: Wires) -> None:
        parked = Parked()
        shard = Stub(push=parked.upload, pull=parked.download)
        server, channel = await w.pair(("Shard", shard), ("Coordinator", Stub(status=parked.unary)))

        async def pull() -> None:
            async for _ in channel.download(PULL, WANT, timeout=0.2):
                pass

        for name, call in (
            (STATUS, channel.call(STATUS, ASK, timeout=0.2)),
            (PUSH, channel.upload(PUSH, (b"x" * MIB for _ in range(50)), timeout=0.2)),
            (PULL, pull()),
        ):
            with pytest.raises(errors.DeadlineError, match=r"no answer within 0\.2 s") as caught:
                await call
            assert f"{name} at {server.address}" in str(caught.value)
        await parked.until(lambda: parked.left == 3)
        assert parked.ended == ["CancelledError"] * 3

    run(wires, test)


def test_cancelling_a_call_cancels_it_at_the_peer(wires: type[Wires]) -> None:
    async def test(w: Wires) -> None:
        parked = Parked()
        shard = Stub(push=parked.upload, pull=parked.download)
        coordinator = Stub(status=parked.unary, session=parked.session)
        _, channel = await w.pair(("Shard", shard), ("Coordinator", coordinator))
        calls = [spawn(call()) for call in await one_of_each(channel)]
        await parked.until(lambda: parked.arrived == 4)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        await parked.until(lambda: parked.left == 4)
        assert parked.ended == ["CancelledError"] * 4

    run(wires, test)


def test_closing_a_download_or_session_cancels_it_at_the_peer(wires: type[Wires]) -> None:
    async def test(w: Wires) -> None:
        parked = Parked()
        shard, coordinator = Stub(pull=parked.download), Stub(session=parked.session)
        _, channel = await w.pair(("Shard", shard), ("Coordinator", coordinator))
        for number, stream in enumerate(
            (channel.download(PULL, WANT, timeout=T), channel.session(SESSION, silence())), 1
        ):
            async with aclosing(stream):
                async for _ in stream:
                    break
                await parked.until(lambda number=number: parked.arrived == number)  # type: ignore[misc]
            await parked.until(lambda number=number: parked.left == number)  # type: ignore[misc]

    run(wires, test)


def test_closing_a_channel_ends_its_calls(wires: type[Wires]) -> None:
    async def test(w: Wires) -> None:
        parked = Parked()
        shard = Stub(push=parked.upload, pull=parked.download)
        coordinator = Stub(status=parked.unary, session=parked.session)
        _, channel = await w.pair(("Shard", shard), ("Coordinator", coordinator))
        calls = [spawn(call()) for call in await one_of_each(channel)]
        await parked.until(lambda: parked.arrived == 4)
        await channel.close()
        await channel.close()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, errors.UnavailableError), result
            assert "this channel is closed" in str(result)
        await parked.until(lambda: parked.left == 4)
        for call in await one_of_each(channel):
            with pytest.raises(errors.UnavailableError, match="this channel is closed"):
                await call()

    run(wires, test)


# ---- uploads that break


def test_an_upload_whose_frames_fail_never_ends_normally(wires: type[Wires]) -> None:
    """1. Two frames arrive. 2. The iterator fails. 3. Its error reaches the caller, the service's loop is torn down."""
    ended: asyncio.Queue[str] = asyncio.Queue()

    def broken() -> Iterator[bytes]:
        yield b"one"
        yield b"two"
        raise LookupError("the disk is gone")

    async def test(w: Wires) -> None:
        _, channel = await w.pair(("Shard", Stub(push=reporting(ended, asyncio.Event()))))
        for _ in range(50):
            with pytest.raises(LookupError, match="the disk is gone"):
                await channel.upload(PUSH, broken(), timeout=T)
        await channel.upload(PUSH, [b"one", b"two"], timeout=T)
        outcomes: list[str] = []
        while "normally" not in outcomes:
            outcomes.append(await ended.get())
        assert set(outcomes) <= {"CancelledError", "UnavailableError", "normally"}
        assert outcomes.count("normally") == 1
        assert len(outcomes) <= 51

    run(wires, test)


def test_a_caller_that_goes_away_in_an_upload_never_ends_it_normally(wires: type[Wires]) -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()
    arrived = asyncio.Event()

    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(MIB)

    async def test(w: Wires) -> None:
        server = await w.serve(("Shard", Stub(push=reporting(ended, arrived))))
        for _ in range(10):
            arrived.clear()
            channel = w.connect(server.address)
            call = spawn(channel.upload(PUSH, endless(), timeout=T))
            await arrived.wait()
            await channel.close()
            with pytest.raises(errors.UnavailableError):
                await call
            assert await ended.get() in ("CancelledError", "UnavailableError")

    run(wires, test)


def test_a_service_may_answer_before_the_last_frame(wires: type[Wires]) -> None:
    taken = 0

    def frames() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield bytes(MIB)

    async def push(asked: AsyncIterator[bytes]) -> shard_pb2.PushResponse:
        assert await anext(asked)
        return shard_pb2.PushResponse(version=7)

    async def refuse(asked: AsyncIterator[bytes]) -> shard_pb2.PushResponse:
        assert await anext(asked)
        raise errors.FencedError("too old")

    async def test(w: Wires) -> None:
        nonlocal taken
        _, channel = await w.pair(("Shard", Stub(push=push, initialize=refuse)))
        for _ in range(10):
            taken = 0
            assert await channel.upload(PUSH, frames(), timeout=T) == shard_pb2.PushResponse(version=7)
            assert taken < 200
            with pytest.raises(errors.FencedError, match="too old"):
                await channel.upload("Shard.Initialize", frames(), timeout=T)

    run(wires, test)


# ---- sessions that break


def test_requests_that_fail_end_the_session(wires: type[Wires]) -> None:
    async def test(w: Wires) -> None:
        parked = Parked()

        async def broken() -> AsyncIterator[coordinator_pb2.SessionRequest]:
            await parked.until(lambda: parked.arrived == 1)
            for _ in range(1):
                raise LookupError("no report")
            yield coordinator_pb2.SessionRequest()

        _, channel = await w.pair(("Coordinator", Stub(session=parked.session)))
        with pytest.raises(LookupError, match="no report"):
            async for _ in channel.session(SESSION, broken()):
                pass
        await parked.until(lambda: parked.left == 1)

    run(wires, test)


def test_a_session_ends_when_the_service_returns(wires: type[Wires]) -> None:
    async def session(asked: AsyncIterator[Any]) -> AsyncIterator[coordinator_pb2.SessionResponse]:
        async for _ in asked:
            yield coordinator_pb2.SessionResponse()
            return

    async def test(w: Wires) -> None:
        _, channel = await w.pair(("Coordinator", Stub(session=session)))

        async def asking() -> AsyncIterator[coordinator_pb2.SessionRequest]:
            yield coordinator_pb2.SessionRequest()
            await asyncio.Event().wait()

        assert len([reply async for reply in channel.session(SESSION, asking())]) == 1

    run(wires, test)


# ---- limits


def test_a_message_over_the_limit_is_one_clear_sentence(wires: type[Wires]) -> None:
    huge = "x" * (MAX_MESSAGE_BYTES + 1)

    async def status(_: object) -> coordinator_pb2.StatusResponse:
        return coordinator_pb2.StatusResponse(job=huge)

    async def pull(_: object) -> AsyncIterator[bytes]:
        yield huge.encode()

    async def push(frames: AsyncIterator[bytes]) -> shard_pb2.PushResponse:
        async for _ in frames:
            pass
        return shard_pb2.PushResponse()

    async def test(w: Wires) -> None:
        _, channel = await w.pair(("Coordinator", Stub(status=status)), ("Shard", Stub(pull=pull, push=push)))
        sentence = rf"a message of \d+ bytes is over the limit of {MAX_MESSAGE_BYTES} bytes"
        for call in (
            lambda: channel.call(STATUS, ASK, timeout=T),
            lambda: channel.call("Coordinator.Join", coordinator_pb2.JoinRequest(job=huge), timeout=T),
            lambda: channel.upload(PUSH, [huge.encode()], timeout=T),
            lambda: collect(channel),
        ):
            with pytest.raises(errors.ProtocolError, match=sentence):
                await call()
        # The largest one that is allowed arrives.
        assert await channel.upload(PUSH, [huge.encode()[1:]], timeout=T) == shard_pb2.PushResponse()

    run(wires, test)


def test_an_empty_frame_is_a_mistake_of_ours(wires: type[Wires]) -> None:
    async def push(frames: AsyncIterator[bytes]) -> shard_pb2.PushResponse:
        async for _ in frames:
            pass
        return shard_pb2.PushResponse()

    async def test(w: Wires) -> None:
        _, channel = await w.pair(("Shard", Stub(push=push)))
        with pytest.raises(AssertionError, match="never empty"):
            await channel.upload(PUSH, [b"x", b""], timeout=T)

    run(wires, test)
