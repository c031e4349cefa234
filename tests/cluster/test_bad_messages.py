"""Whatever arrives at a shard that is not right is refused with a typed error, and nothing of it is applied."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paramserver import errors
from paramserver.core.versions.events import AtLeast, Exactly, Want
from paramserver.frames import MAX_FRAME_BYTES
from paramserver.tensors.codec import split_frame
from paramserver.transport.base import MAX_MESSAGE_BYTES
from paramserver.v1 import shard_pb2, types_pb2
from paramserver.wire.messages import pack_mask, put_want
from paramserver.worker.client import RawClient
from tests.support.cluster.harness import CALL_S, Cluster, buffered
from tests.support.cluster.raw import AsyncName, Raw, SyncName
from tests.support.frames import encode_frame

A, B = 0, 1  # tensors "a" of 40 and "b" of 24 elements: chunks 0, 1, 2 and 3, 4 of at most 16
HYPERS = {"lr": 0.5, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}


@dataclass(slots=True)
class Push:
    """A proper push, to be broken."""

    raw: Raw
    header: shard_pb2.PushHeader
    parts: list[tuple[shard_pb2.ChunkRef, bytes]]
    frames: list[bytes] | None = None


@contextmanager
def job(mode: str = "sync") -> Iterator[tuple[Raw, RawClient]]:
    """One shard with two float32 arrays, trained with SGD; a step has two slices."""
    with Cluster(1, 1, mode, slices_per_step=2) as cluster:
        client = cluster.client(0, chunk_bytes=64)
        client.init({"a": torch.ones(40), "b": torch.ones(24)}, "sgd", **HYPERS)
        yield Raw(cluster), client
        client.close()


def proper(raw: Raw, mode: str) -> Push:
    name = SyncName(0, 0, 1, 2) if mode == "sync" else AsyncName(0, 3)
    values = {A: torch.full((40,), 2.0), B: torch.full((24,), 3.0)}
    return Push(raw, raw.header(name, values), raw.parts(values))


def sent(push: Push) -> shard_pb2.PushResponse:
    return push.raw.push(push.frames if push.frames is not None else push.raw.frames(push.header, push.parts))


def edit(which: int, **fields: int) -> Callable[[Push], None]:
    """Change what the frame says of one chunk."""

    def change(push: Push) -> None:
        for key, value in fields.items():
            setattr(push.parts[which][0], key, value)

    return change


def head(**fields: Any) -> Callable[[Push], None]:
    """Change the header."""

    def change(push: Push) -> None:
        for key, value in fields.items():
            setattr(push.header, key, value)

    return change


def floats(index: int, value: float) -> Callable[[Push], None]:
    """Put a number into the middle of a chunk."""

    def change(push: Push) -> None:
        data = torch.frombuffer(bytearray(push.parts[index][1]), dtype=torch.float32)
        data[7] = value
        push.parts[index] = (push.parts[index][0], data.numpy().tobytes())

    return change


def instead(frame: bytes) -> Callable[[Push], None]:
    """Send something else."""

    def change(push: Push) -> None:
        push.frames = [frame]

    return change


def cut_data(push: Push) -> None:
    ref, data = push.parts[1]
    ref.bytes -= 4
    push.parts[1] = (ref, data[:-4])


def longer_data(push: Push) -> None:
    ref, data = push.parts[1]
    ref.bytes += 4
    push.parts[1] = (ref, data + bytes(4))


def twice(push: Push) -> None:
    push.parts.append(push.parts[0])


def missing(push: Push) -> None:
    del push.parts[2]


def trailing(push: Push) -> None:
    header = shard_pb2.FrameHeader(push=push.header, chunks=[ref for ref, _ in push.parts])
    push.frames = [encode_frame(header, [*(data for _, data in push.parts), b"more"])]


def without_data(push: Push) -> None:
    push.frames = [encode_frame(shard_pb2.FrameHeader(push=push.header, chunks=[push.parts[0][0]]), [])]


def second_header(push: Push) -> None:
    first = push.raw.frames(push.header, push.parts[:2])
    push.frames = first + push.raw.frames(push.header, push.parts[2:])


def no_header(push: Push) -> None:
    push.frames = [encode_frame(shard_pb2.FrameHeader(chunks=[ref]), [data]) for ref, data in push.parts]


def other_header(push: Push) -> None:
    header = shard_pb2.FrameHeader(initialize=shard_pb2.InitializeHeader(job=push.raw.job, chunks=5))
    push.frames = [encode_frame(header, [])]


def no_frames(push: Push) -> None:
    push.frames = []


def state_in_it(push: Push) -> None:
    ref = shard_pb2.StateRef(tensor=0, key="momentum_buffer", bytes=4, dtype="float32")
    push.frames = [encode_frame(shard_pb2.FrameHeader(push=push.header, states=[ref]), [bytes(4)])]


def groups(count: int) -> Callable[[Push], None]:
    def change(push: Push) -> None:
        given = list(push.header.groups)
        del push.header.groups[:]
        push.header.groups.extend(given * count)

    return change


def hyper(name: str, **value: Any) -> Callable[[Push], None]:
    """Add a hyper-parameter, or replace the one of this name."""

    def change(push: Push) -> None:
        group = push.header.groups[0]
        kept = [one for one in group.hypers if one.name != name]
        del group.hypers[:]
        group.hypers.extend([*kept, types_pb2.Hyper(name=name, **value)])

    return change


def hyper_twice(push: Push) -> None:
    push.header.groups[0].hypers.append(types_pb2.Hyper(name="lr", number=0.1))


def nameless(push: Push) -> None:
    push.header.ClearField(push.header.WhichOneof("name"))


BROKEN: dict[str, tuple[Callable[[Push], None], type[errors.ParamServerError], str]] = {
    "dtype": (edit(1, dtype=types_pb2.DTYPE_FLOAT64), errors.ProtocolError, "chunk 1 is float32"),
    "unknown dtype": (edit(1, dtype=77), errors.ProtocolError, "chunk 1 is float32"),
    "start": (edit(1, start=15), errors.ProtocolError, "chunk 1 starts at element 16, the message says 15"),
    "short": (cut_data, errors.ProtocolError, "chunk 1 has 64 bytes, the message says 60"),
    "long": (longer_data, errors.ProtocolError, "chunk 1 has 64 bytes, the message says 68"),
    "length lies": (edit(1, bytes=1 << 40), errors.ProtocolError, "bytes, but"),
    "unknown chunk": (edit(4, index=99), errors.ProtocolError, "chunk 99 does not belong"),
    "chunk twice": (twice, errors.ProtocolError, "chunk 0 comes twice"),
    "missing chunk": (missing, errors.ProtocolError, "1 of 5 chunks are missing, the first is 2"),
    "trailing data": (trailing, errors.ProtocolError, "bytes of data follow"),
    "no data": (without_data, errors.ProtocolError, "but 0 bytes of data follow"),
    "second header": (second_header, errors.ProtocolError, "only the first frame"),
    "no header": (no_header, errors.ProtocolError, "must carry a push header"),
    "other header": (other_header, errors.ProtocolError, "must carry a push header"),
    "no frames": (no_frames, errors.ProtocolError, "ended before its first frame"),
    "state": (state_in_it, errors.ProtocolError, "optimizer state where only chunks belong"),
    "mask too long": (head(used=b"\x03\x00"), errors.ProtocolError, "mask of used tensors has 2 bytes"),
    "mask too short": (head(used=b""), errors.ProtocolError, "mask of used tensors has 0 bytes"),
    "mask names nobody": (head(used=b"\x07"), errors.ProtocolError, "beyond the 2 of the model"),
    "mask of less": (head(used=pack_mask({A}, 2)), errors.ProtocolError, "announces 5 chunks, but 3 belong"),
    "number of chunks": (head(chunks=4), errors.ProtocolError, "announces 4 chunks, but 5 belong"),
    "too few groups": (groups(0), errors.ProtocolError, "no parameter group"),
    "too many groups": (groups(2), errors.ProtocolError, "had 1 parameter groups and now has 2"),
    "unknown hyper": (hyper("__class__", number=1.0), errors.ProtocolError, "unknown hyper-parameter '__class__'"),
    "hyper twice": (hyper_twice, errors.ProtocolError, "'lr' is given twice"),
    "hyper without value": (hyper("lr"), errors.ProtocolError, "'lr' has no value"),
    "hyper of another form": (hyper("lr", flag=True), errors.ProtocolError, "lr is True"),
    "negative lr": (hyper("lr", number=-0.1), errors.ProtocolError, "lr is -0.1 and must be at least 0"),
    "lr is NaN": (hyper("lr", number=float("nan")), errors.ProtocolError, "lr is nan and must be finite"),
    "NaN": (floats(3, float("nan")), errors.NonFiniteError, "of worker 999: the gradient of 'b' is not finite"),
    "infinite": (floats(2, float("-inf")), errors.NonFiniteError, "the gradient of 'a' is not finite"),
    "other job": (head(job="other"), errors.FencedError, "belongs to job 'test', the message to 'other'"),
    "other timeline": (head(timeline=1), errors.RolledBackError, "is of timeline 1, this shard is on timeline 0"),
    "overflow with gradients": (head(overflow=True), errors.ProtocolError, "must not carry gradients"),
    "gradients of no samples": (head(samples=0), errors.ProtocolError, "no samples"),
    "no name": (nameless, errors.ProtocolError, "without a name"),
    "clip to NaN": (head(clip_norm=float("nan")), errors.ProtocolError, "clip_norm"),
    "future version": (head(base_version=7), errors.ProtocolError, "version 7"),
    "junk": (lambda push: setattr(push, "frames", [b"\xff\x13junk" * 9]), errors.ProtocolError, "frame"),
    "huge": (
        lambda push: setattr(push, "frames", [bytes(MAX_FRAME_BYTES + 1)]),
        errors.ProtocolError,
        "over the limit",
    ),
}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_broken_pushes_change_nothing(mode: str) -> None:
    """One after the other at the same shard, which then takes a proper one as if nothing had been."""
    with job(mode) as (raw, _):
        before = raw.cluster.outcome()
        for what, (break_it, kind, text) in BROKEN.items():
            push = proper(raw, mode)
            break_it(push)
            with pytest.raises(errors.ParamServerError) as caught:
                sent(push)
            assert type(caught.value) is kind, f"{what}: {caught.value!r}"
            assert text in str(caught.value), what
            stats = raw.stats()
            assert (stats.version, stats.applied, stats.duplicate) == (0, 0, 0), what
        assert raw.cluster.outcome().digests == before.digests
        # Those of another job or timeline are not this one's to count.
        assert raw.stats().refused == len(BROKEN) - 2
        assert not buffered(raw.cluster.job.servers[0].service)
        assert sent(proper(raw, mode)).outcome == shard_pb2.OUTCOME_ACCEPTED
        if mode == "sync":
            raw.push(raw.contribution(SyncName(0, 1, 2, 2), {A: torch.full((40,), 2.0), B: torch.full((24,), 3.0)}))
        raw.published(1)
        after = raw.cluster.outcome()
    assert after.summary["steps"] == 1
    assert torch.equal(after.tensor("a"), torch.full((40,), 1.0 - 0.5 * 2.0))
    assert torch.equal(after.tensor("b"), torch.full((24,), 1.0 - 0.5 * 3.0))


NAMES: dict[str, tuple[SyncName, type[errors.ParamServerError], str]] = {
    "no node of the tree": (SyncName(0, 1, 3, 4), errors.ProtocolError, "no node of the reduction tree"),
    "beyond the end": (SyncName(0, 2, 3, 2), errors.ProtocolError, "no node of the reduction tree"),
    "empty": (SyncName(0, 1, 1, 2), errors.ProtocolError, "no node of the reduction tree"),
    "reversed": (SyncName(0, 2, 0, 2), errors.ProtocolError, "no node of the reduction tree"),
    "of nothing": (SyncName(0, 0, 0, 0), errors.ProtocolError, "no node of the reduction tree"),
    "a step that is not open (A10)": (SyncName(5, 0, 1, 2), errors.OutOfOrderError, "still works on step 0"),
}


@pytest.mark.parametrize("what", NAMES)
def test_names_that_mean_nothing(what: str) -> None:
    name, kind, text = NAMES[what]
    with job() as (raw, _):
        with pytest.raises(kind, match=text):
            raw.push(raw.contribution(name, {A: torch.ones(40)}))
        assert raw.stats().applied == 0
        assert raw.stats().refused == 1
        assert sent(proper(raw, "sync")).outcome == shard_pb2.OUTCOME_ACCEPTED


def test_a_step_has_one_number_of_slices() -> None:
    with job() as (raw, _):
        raw.push(raw.contribution(SyncName(0, 0, 1, 2), {A: torch.ones(40)}))
        with pytest.raises(errors.ProtocolError, match="says the step has 3 slices, earlier ones said 2"):
            raw.push(raw.contribution(SyncName(0, 2, 3, 3), {A: torch.ones(40)}))
        assert raw.stats().applied == 0
        raw.push(raw.contribution(SyncName(0, 1, 2, 2), {A: torch.ones(40)}))
        raw.published(1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_names_of_the_other_mode(mode: str) -> None:
    name = AsyncName(0, 0) if mode == "sync" else SyncName(0, 0, 1, 2)
    with job(mode) as (raw, _):
        with pytest.raises(errors.StaleViewError, match="is a"):
            raw.push(raw.contribution(name, {A: torch.ones(40)}))
        assert raw.stats().applied == 0


def pull(raw: Raw, want: Want, **fields: object) -> shard_pb2.PullHeader:
    request = shard_pb2.PullRequest(job=raw.job, timeline=raw.timeline, worker=raw.worker)
    put_want(request, want)
    for key, value in fields.items():
        setattr(request, key, value)
    return ask(raw, request)


def ask(raw: Raw, request: shard_pb2.PullRequest) -> shard_pb2.PullHeader:
    async def first() -> shard_pb2.PullHeader:
        async with aclosing(raw.channel.download("Shard.Pull", request, timeout=CALL_S)) as frames:
            return split_frame(await anext(frames))[0].pull

    return raw.run(first())


def test_pulls_that_cannot_be_answered() -> None:
    with job() as (raw, client):
        for _ in range(3):
            for _ in range(2):
                client.push({"a": torch.ones(40)})
        assert pull(raw, AtLeast(3)).version == 3
        not_yet = pull(raw, Exactly(9))
        assert (not_yet.ready, not_yet.version) == (False, 3)
        assert "step 3" in not_yet.waiting_for
        with pytest.raises(errors.GoneError, match="version 1 is dropped, the newest is 3"):
            pull(raw, Exactly(1))
        with pytest.raises(errors.FencedError, match="timeline 4"):
            pull(raw, AtLeast(0), timeline=4)
        with pytest.raises(errors.FencedError, match="job 'test'"):
            pull(raw, AtLeast(0), job="x" * 5000)
        for wait_s in (-1.0, 1e9, float("nan"), float("inf")):
            with pytest.raises(errors.ProtocolError, match="wait_s"):
                pull(raw, AtLeast(0), wait_s=wait_s)
        with pytest.raises(errors.ProtocolError, match="does not say which version"):
            ask(raw, shard_pb2.PullRequest(job=raw.job))
        assert pull(raw, AtLeast(3)).version == 3


def test_messages_over_the_limit_are_not_even_sent() -> None:
    with job() as (raw, _):
        with pytest.raises(errors.ProtocolError, match=f"over the limit of {MAX_MESSAGE_BYTES} bytes"):
            raw.push([bytes(MAX_MESSAGE_BYTES + 1)])
        with pytest.raises(errors.ProtocolError, match="over the limit"):
            raw.run(
                raw.channel.call("Shard.Stats", shard_pb2.StatsRequest(job="x" * MAX_MESSAGE_BYTES), timeout=CALL_S)
            )
        assert sent(proper(raw, "sync")).outcome == shard_pb2.OUTCOME_ACCEPTED


@pytest.mark.parametrize("seed", range(4))
def test_junk_and_mutated_messages(seed: int) -> None:
    """I12, in small: typed errors and a server that lives. What is still a proper message may be taken."""
    numbers = random.Random(seed)
    with job() as (raw, _):
        whole = raw.contribution(SyncName(0, 0, 1, 2), {A: torch.ones(40)})[0]
        refused = 0
        for attempt in range(150):
            frame = bytearray(whole)
            if attempt % 3 == 0:
                frame = bytearray(numbers.randbytes(numbers.randrange(1, 300)))
            elif attempt % 3 == 1:
                for _ in range(numbers.randrange(1, 8)):
                    frame[numbers.randrange(200)] = numbers.randrange(256)
            else:
                del frame[numbers.randrange(1, len(frame)) :]
            try:
                raw.push([bytes(frame)])
            except (errors.ProtocolError, errors.StaleViewError, errors.ModelError):
                refused += 1
        assert refused > 100
        assert raw.stats().version == 0  # its second slice is missing, whatever became of the first
        assert raw.stats().applied == 0
        # A mutated one may have been taken, and may have another learning rate, which a step has once.
        with suppress(errors.ModelError):
            other = raw.push(raw.contribution(SyncName(0, 1, 2, 2), {A: torch.ones(40)}))
            assert other.outcome in (shard_pb2.OUTCOME_ACCEPTED, shard_pb2.OUTCOME_DUPLICATE)


# ---- questions for work


def question(raw: Raw, **fields: Any) -> shard_pb2.StealResponse:
    """Ask which slice to compute, for a worker that has the second slice of the first step and is through with it."""
    request = shard_pb2.StealRequest(
        job=raw.job,
        timeline=raw.timeline,
        worker=2,
        step=0,
        of=2,
        assignment=shard_pb2.Assignment(place=1, workers=2, work_s=0.001),
        finished=[types_pb2.Range(start=1, stop=2)],
    )
    for key, value in fields.items():
        if key == "finished":
            del request.finished[:]
            request.finished.extend(value)
        elif key in ("place", "workers", "work_s"):
            setattr(request.assignment, key, value)
        else:
            setattr(request, key, value)
    reply = raw.run(raw.channel.call("Shard.Steal", request, timeout=CALL_S))
    assert isinstance(reply, shard_pb2.StealResponse)
    return reply


BAD_QUESTIONS: dict[str, tuple[dict[str, Any], type[errors.ParamServerError], str]] = {
    "another job": ({"job": "other"}, errors.FencedError, "belongs to job"),
    "another timeline": ({"timeline": 77}, errors.FencedError, "timeline 77"),
    "a step of nothing": ({"of": 0}, errors.ProtocolError, "out of bounds"),
    "a step of far too much": ({"of": 2**32 - 1}, errors.ProtocolError, "out of bounds"),
    "no workers": ({"workers": 0}, errors.ProtocolError, "makes no sense"),
    "far too many workers": ({"workers": 2**32 - 1}, errors.ProtocolError, "makes no sense"),
    "a place beyond all workers": ({"place": 2}, errors.ProtocolError, "makes no sense"),
    "a place before all workers": ({"place": -2}, errors.ProtocolError, "makes no sense"),
    "finished beyond the step": ({"finished": [types_pb2.Range(start=1, stop=3)]}, errors.ProtocolError, "outside"),
    "finished more than there is": ({"finished": [types_pb2.Range(stop=2)] * 2}, errors.ProtocolError, "more slices"),
    "no number": ({"work_s": float("nan")}, errors.ProtocolError, "makes no sense"),
    "less than no time": ({"work_s": -1.0}, errors.ProtocolError, "makes no sense"),
}


@pytest.mark.parametrize("name", BAD_QUESTIONS)
def test_a_bad_question_for_work_is_refused(name: str) -> None:
    fields, error, text = BAD_QUESTIONS[name]
    with job() as (raw, _), pytest.raises(error, match=text):
        question(raw, **fields)


def test_questions_for_work_are_answered_for_the_open_step_only() -> None:
    with job() as (raw, _):
        assert not question(raw, step=1).complete, "it has not begun here"
        assert question(raw, finished=[]).slice == 1
        sent(proper(raw, "sync"))
        with pytest.raises(errors.ProtocolError, match="of a step of 3 slices, this one has 2"):
            question(raw, of=3)
        values = {A: torch.full((40,), 2.0)}
        raw.push(raw.contribution(SyncName(0, 1, 2, 2), values))
        raw.published(1)
        assert question(raw) == shard_pb2.StealResponse(complete=True)
