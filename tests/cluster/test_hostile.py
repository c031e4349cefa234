"""Messages whose numbers say far more than was sent: refused, at a cost that what was sent can account for.

Issue 14, item 15. Measured are the memory at its highest and the longest time in which nothing else could happen in the
process: a member whose lease ends meanwhile would be given up for lost.
"""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.message import Message

from paramserver import errors
from paramserver.alone.job import COORDINATOR
from paramserver.core.versions.names import AsyncName, SyncName
from paramserver.transport.base import METHODS, Channel, MethodKind
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from tests.support.cluster.harness import CALL_S, Cluster
from tests.support.cluster.raw import Raw
from tests.support.frames import encode_frame

HUGE = 2**64 - 1
NAN = float("nan")
# For the process, beside what a message's own bytes account for; laying out the largest model takes 11 MB.
SPARE_BYTES, TIMES = 16 << 20, 30
# Shorter than the shortest lease (5 s); what this is about took 20 s and more.
STILL_S = 2.5

Refusal = type[errors.ParamServerError] | None


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call took, and how it ended. ``still_s``: how long the loop computed at a stretch, of processor time."""

    peak_bytes: int
    still_s: float
    error: errors.ParamServerError | None


async def measured(cluster: Cluster, address: str, method: str, messages: list[Any]) -> Cost:
    """Make a call with a ticker beside it, all in one loop."""
    still = [0.0]

    async def tick() -> None:
        then = time.thread_time()
        while True:
            await asyncio.sleep(0.01)
            still[0], then = max(still[0], time.thread_time() - then), time.thread_time()

    channel = cluster.job.network.connect(address)
    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    error = None
    try:
        async with asyncio.timeout(CALL_S):
            await _call(channel, method, messages)
    except errors.ParamServerError as refusal:
        error = refusal
    await asyncio.sleep(0.02)
    peak = tracemalloc.get_traced_memory()[1] - before
    ticker.cancel()
    await channel.close()
    return Cost(peak, still[0], error)


async def _call(channel: Channel, method: str, messages: list[Any]) -> None:
    match METHODS[method].kind:
        case MethodKind.UNARY:
            await channel.call(method, messages[0], timeout=CALL_S)
        case MethodKind.UPLOAD:
            await channel.upload(method, messages, timeout=CALL_S)
        case MethodKind.DOWNLOAD:
            async with aclosing(channel.download(method, messages[0], timeout=CALL_S)) as frames:
                async for _ in frames:
                    pass
        case MethodKind.SESSION:

            async def requests() -> AsyncIterator[Message]:
                for message in messages:
                    yield message
                await asyncio.Event().wait()

            async with aclosing(channel.session(method, requests())) as replies:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.3):
                        async for _ in replies:
                            pass


def check(cluster: Cluster, address: str, what: str, method: str, refusal: Refusal, *messages: Message | bytes) -> None:
    """The call ends as it should, and costs no more than it may."""
    sent = sum(len(one) if isinstance(one, bytes) else one.ByteSize() for one in messages)
    cost = cluster.job.background.run(measured(cluster, address, method, list(messages)), 4 * CALL_S)
    told = f"{what}: {cost.error!r}, {cost.peak_bytes / 1e6:.1f} MB for {sent} bytes, still for {cost.still_s:.2f} s"
    if refusal is None:
        assert cost.error is None, told
    else:
        assert isinstance(cost.error, refusal), told
    assert type(cost.error) is not errors.ParamServerError, f"an error of ours: {told}"
    assert cost.peak_bytes < SPARE_BYTES + TIMES * sent, told
    assert cost.still_s < STILL_S, told


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def tensor(*shape: int, name: str = "w", **fields: Any) -> types_pb2.TensorSpec:
    return types_pb2.TensorSpec(name=name, shape=shape, dtype="float32", kind=types_pb2.TENSOR_KIND_PARAMETER, **fields)


def model(*tensors: types_pb2.TensorSpec, chunk_bytes: int = 0, optimizer: str = "sum") -> types_pb2.ModelSpec:
    return types_pb2.ModelSpec(
        tensors=tensors,
        optimizer=types_pb2.OptimizerSpec(name=optimizer, groups=[types_pb2.GroupHypers()]),
        chunk_bytes=chunk_bytes,
    )


MODELS: dict[str, tuple[types_pb2.ModelSpec, type[errors.ParamServerError]]] = {
    "terabytes": (model(tensor(1 << 40)), errors.ModelError),
    "more than 2**64 bytes": (model(tensor(*[2] * 64)), errors.ProtocolError),
    "a hundred thousand dimensions": (model(tensor(*[1 << 60] * 100_000)), errors.ProtocolError),
    "a dimension of 2**62 beside one of 0": (model(tensor(1 << 62, 0)), errors.ProtocolError),
    "many that are large together": (
        model(*(tensor(1 << 32, name=f"w{i}") for i in range(1000))),
        errors.ModelError,
    ),
    "chunks of 64 bytes": (model(tensor(1 << 28), chunk_bytes=64), errors.ModelError),
    "chunks of an odd size": (model(tensor(1 << 28), chunk_bytes=63), errors.ModelError),
    "a name of megabytes": (model(tensor(4, name="n" * (1 << 22))), errors.ProtocolError),
    "a type of megabytes": (
        model(types_pb2.TensorSpec(name="w", shape=[4], dtype="f" * (1 << 22), kind=types_pb2.TENSOR_KIND_PARAMETER)),
        errors.UserError,
    ),
    "aliases": (model(tensor(4, aliases=[f"a{i}" for i in range(20_000)] * 2)), errors.ModelError),
    "a group that is not there": (model(tensor(4, group=2**31)), errors.ModelError),
    "an optimizer of megabytes": (model(tensor(4), optimizer="o" * (1 << 22)), errors.UserError),
    "tensors of nothing": (model(*(tensor(0, name=f"w{i}") for i in range(20_000)), optimizer="x"), errors.UserError),
}


def test_models_that_are_far_too_large_are_refused_by_arithmetic() -> None:
    with Cluster(1, 2) as cluster:
        client = cluster.client(0)
        session = cluster.engines[0].member.session
        member = session.member
        with traced():
            for what, (spec, refusal) in MODELS.items():
                request = coordinator_pb2.RegisterModelRequest(member=member, model=spec)
                check(cluster, COORDINATOR, what, "Coordinator.RegisterModel", refusal, request)
                configure = shard_pb2.ConfigureRequest(job="test", shards=1, model=spec)
                if what not in ("an optimizer of megabytes", "terabytes", "many that are large together"):
                    check(cluster, "server-0/0", what, "Shard.Configure", errors.ParamServerError, configure)
            many = shard_pb2.ConfigureRequest(job="test", shards=2**32 - 1, model=model(tensor(4)))
            check(cluster, "server-0/0", "billions of shards", "Shard.Configure", errors.ModelError, many)
        client.init({"x": np.zeros(8)})
        client.push({"x": np.ones(8)})
        assert client.pull()["x"].tolist() == [1.0] * 8
        assert session.member == member, "its lease has not ended"
        client.close()


def test_the_limit_is_a_setting() -> None:
    with Cluster(1, 1, max_model_bytes=100) as cluster:
        client = cluster.client(0)
        with pytest.raises(errors.ModelError, match=r"has 104 bytes .* takes 100 .*cluster\.max_model_bytes"):
            client.init({"x": np.zeros(13)})
        client.close()


def coordinator_messages(member: int, timeline: int) -> dict[str, tuple[str, Refusal, Message]]:
    """By what is wrong: method, refusal, request."""
    v1 = coordinator_pb2
    many = [shard_pb2.AsyncName(epoch=HUGE - i, index=HUGE - i) for i in range(20_000)]

    def lease(**fields: Any) -> Message:
        return v1.LeaseRequest(member=member, timeline=timeline, **fields)

    def join(**fields: Any) -> Message:
        return v1.JoinRequest(role=types_pb2.ROLE_OBSERVER, protocol=1, **fields)

    bad = errors.ProtocolError
    return {
        "wait NaN": ("Coordinator.Lease", bad, lease(wait_s=NAN, want=1)),
        "wait -1": ("Coordinator.Lease", bad, lease(wait_s=-1.0, want=1)),
        "want 2**32": ("Coordinator.Lease", None, lease(want=2**32 - 1, max_epoch=HUGE, wait_s=0.0)),
        "done what never was": ("Coordinator.Lease", bad, lease(done=many, max_epoch=HUGE)),
        "hold what never was": ("Coordinator.Lease", bad, lease(holding=many, max_epoch=HUGE)),
        "a revision": ("Coordinator.Lease", bad, lease(revision=HUGE, want=3, max_epoch=HUGE)),
        "samples": (
            "Coordinator.RegisterData",
            bad,
            v1.RegisterDataRequest(member=member, data=types_pb2.DataSpec(samples=HUGE, slice_size=1)),
        ),
        "no slice": (
            "Coordinator.RegisterData",
            errors.DataError,
            v1.RegisterDataRequest(
                member=member, data=types_pb2.DataSpec(samples=1, slice_size=2, drop_last=True)
            ),
        ),
        "a grant": ("Coordinator.InitializeDone", None, v1.InitializeDoneRequest(member=member, grant=2**32 - 1)),
        "a version": ("Coordinator.Finish", bad, v1.FinishRequest(member=member, timeline=timeline, version=HUGE)),
        "a timeline": (
            "Coordinator.Snapshot", errors.RolledBackError, v1.SnapshotRequest(member=member, timeline=2**40)
        ),
        "mode NaN": (
            "Coordinator.SetConsistency",
            bad,
            v1.ChangeConsistencyRequest(mode=types_pb2.MODE_ASYNC, staleness=HUGE, wait_s=NAN),
        ),
        "drain NaN": ("Coordinator.Drain", bad, v1.DrainRequest(name="worker-0", wait_s=NAN)),
        "drain somebody of megabytes": ("Coordinator.Drain", errors.UserError, v1.DrainRequest(name="w" * (1 << 22))),
        "scale NaN": ("Coordinator.Scale", bad, v1.ScaleRequest(workers=1, wait_s=NAN)),
        "scale to billions": ("Coordinator.Scale", errors.UserError, v1.ScaleRequest(workers=2**32 - 1)),
        "a place": ("Coordinator.Join", bad, join(index=2**32 - 1)),
        "an address": ("Coordinator.Join", bad, join(address="a" * (1 << 22))),
        "a layout": ("Coordinator.Join", bad, join(holds="a" * (1 << 22))),
        "a job": ("Coordinator.Join", errors.UserError, join(job="a" * (1 << 22))),
        "versions": ("Coordinator.Join", bad, join(versions={f"package-{i}": "1" for i in range(20_000)})),
        "probe": ("Coordinator.Probe", None, v1.ProbeRequest(address="a" * (1 << 20))),
        "samples of a report": ("Coordinator.Session", bad, report(member, samples=HUGE)),
        "a time of NaN": ("Coordinator.Session", bad, report(member, slice_s=NAN)),
        "texts and metrics of a report": (
            "Coordinator.Session",
            None,
            report(member, waiting_for="w" * (1 << 20), metrics={f"m{i}": NAN for i in range(20_000)}),
        ),
        "a failure of megabytes": (
            "Coordinator.Session", bad, v1.SessionRequest(member=member, failure="f" * (1 << 22))
        ),
    }  # fmt: skip


def report(member: int, **fields: Any) -> Message:
    return coordinator_pb2.SessionRequest(
        member=member,
        worker=coordinator_pb2.WorkerReport(**fields),
    )


def test_messages_to_the_coordinator() -> None:
    with Cluster(1, 2, "async") as cluster:
        client = cluster.client(0, chunk_bytes=64)
        client.init({"x": np.zeros(64)})
        client.push({"x": np.ones(64)})
        looker = cluster.reader()
        looker.pull()
        sessions = [engine.member.session for engine in cluster.engines]
        timeline, members = cluster.engines[0].shards.links.timeline, [session.member for session in sessions]
        with traced():
            # In the name of one who only looks: what one says of oneself may cost oneself the session.
            for what, (method, refusal, message) in coordinator_messages(members[1], timeline).items():
                check(cluster, COORDINATOR, what, method, refusal, message)
        status = cluster.status()
        assert status.ByteSize() < 100_000
        assert {name: s.state for name, s in ((p.name, p) for p in status.processes)}["worker-0"] != "lost"
        client.push({"x": np.ones(64)})
        assert client.pull()["x"].tolist() == [2.0] * 64
        assert sessions[0].member == members[0], "its lease has not ended"
        looker.close()
        client.close()


def shard_messages(raw: Raw, mode: str) -> dict[str, tuple[str, Refusal, Message | bytes]]:
    """By what is wrong: method, refusal, request or frame."""
    v1, bad = shard_pb2, errors.ProtocolError
    base: dict[str, Any] = {"job": raw.job, "timeline": raw.timeline}
    term = raw.cluster.job.coordinator.job.term

    def pull(**fields: Any) -> v1.PullRequest:
        return v1.PullRequest(worker=raw.worker, **base, **fields)

    def cut(step: shard_pb2.CutRequest.Step, **fields: Any) -> Message:
        return v1.CutRequest(term=term, step=step, **base, **fields)

    def push(**fields: Any) -> bytes:
        values = {0: torch.ones(64, dtype=torch.float64)}
        header = raw.header(AsyncName(0, 900) if mode == "async" else SyncName(0, 0, 1, 1), values)
        for name, value in fields.items():
            if name == "name":
                put(header, value)
            else:
                setattr(header, name, value)
        frame = v1.FrameHeader(push=header, chunks=[ref for ref, _ in raw.parts(values)])
        return encode_frame(frame, [data for _, data in raw.parts(values)])

    def put(header: shard_pb2.PushHeader, name: object) -> None:
        if isinstance(name, AsyncName):
            getattr(header, "async").epoch, getattr(header, "async").index = name.epoch, name.index
        else:
            assert isinstance(name, SyncName)
            header.sync.step, header.sync.lo, header.sync.hi, header.sync.of = name.step, name.lo, name.hi, name.of

    epochs = [v1.EpochSlices(epoch=e, slices=[types_pb2.Range(start=0, stop=2**48)]) for e in range(1000)]
    reading = v1.SharedPull(attachment=7, reading=range(100_000))
    made: dict[str, tuple[str, Refusal, Message | bytes]] = {
        "pull at a clock": ("Shard.Pull", bad, pull(clock=HUGE)),
        "pull a version": ("Shard.Pull", bad, pull(min_version=HUGE)),
        "pull just that version": ("Shard.Pull", bad, pull(exact_version=HUGE)),
        "read from slots": ("Shard.Pull", None, pull(latest=True, header_only=True, shared=reading)),
        "read from slots in an exchange": (
            "Shard.Exchange",
            None,
            v1.ExchangeRequest(pull=pull(latest=True, header_only=True, shared=reading)),
        ),
        "an exchange of nothing": ("Shard.Exchange", bad, v1.ExchangeRequest()),
        "samples": ("Shard.Push", bad, push(samples=HUGE)),
        "a clock": ("Shard.Push", bad, push(clock=HUGE)),
        "a mask of half a megabyte": ("Shard.Push", bad, push(used=b"\xff" * 500_000)),
        "billions of chunks": ("Shard.Push", bad, push(chunks=2**32 - 1)),
        "a version": ("Shard.Push", bad, push(base_version=HUGE)),
        "idle": ("Shard.Idle", None, v1.IdleRequest(worker=2**32 - 1, **base)),
        "an inbox": (
            "Shard.Attach",
            None,
            v1.AttachRequest(
                worker=raw.worker, layout_digest=raw.layout.digest, meeting="m" * 100_000, inbox_bytes=2**48, **base
            ),
        ),
        "norms": ("Shard.ShareNorms", bad, v1.ShareNormsRequest(step=HUGE, shard=1, **base)),
        "release": ("Shard.Release", None, v1.ReleaseRequest(term=term, versions=range(50_000), **base)),
        "a cut of everything": ("Shard.Cut", None, cut(v1.CutRequest.STEP_REACH, number=1, slices=epochs)),
        "a cut that waits for ever": ("Shard.Cut", bad, cut(v1.CutRequest.STEP_REACH, number=1, wait_s=NAN)),
        "ranges that are none": (
            "Shard.Cut",
            bad,
            cut(v1.CutRequest.STEP_REACH, slices=[v1.EpochSlices(slices=[types_pb2.Range(start=5, stop=1)])]),
        ),
        "members": (
            "Shard.SetMembers",
            None,
            v1.SetMembersRequest(term=term, workers=[types_pb2.WorkerInfo(member=i) for i in range(20_000)], **base),
        ),
    }  # fmt: skip
    if mode == "async":
        made["epochs and slices"] = ("Shard.Push", bad, push(name=AsyncName(HUGE, HUGE)))
    else:
        made["billions of slices"] = ("Shard.Push", bad, push(name=SyncName(0, 0, 1, 2**32 - 1)))
    return made


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_messages_to_a_server(mode: str) -> None:
    with Cluster(1, 2, mode) as cluster:
        client = cluster.client(0, chunk_bytes=64)
        client.init({"x": np.zeros(64)})
        raw = Raw(cluster)
        with traced():
            for what, (method, refusal, message) in shard_messages(raw, mode).items():
                check(cluster, "server-0", what, method, refusal, message)
        assert cluster.stats()[0].version == 0, "nothing of it was applied"
        cluster.job.background.run(cluster.job.coordinator.job.keeping.tell(), CALL_S)
        client.push({"x": np.ones(64)})
        assert client.pull()["x"].tolist() == [1.0] * 64
        client.close()
