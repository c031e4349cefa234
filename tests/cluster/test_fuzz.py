"""Mutated messages to the coordinator: no traceback, no change of state, no memory that stays.

The messages are recorded from jobs in both modes, and from commands. A member that only looks on sends what is made of
them, while the script of the only worker waits in the middle of its training. Then the worker goes on.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from google.protobuf.message import DecodeError, Message
from structlog.testing import capture_logs

from paramserver import errors
from paramserver.alone.job import COORDINATOR
from paramserver.transport.base import METHODS, Method, MethodKind
from paramserver.transport.memory import MemoryChannel
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.wire.messages import PROTOCOL
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster
from tests.support.cluster.small_job import SLICES, program, twin
from tests.support.marks import long_but

# These calls are parked until other workers call, too, and are given up soon; the others wait for nothing.
PARKED = {"Coordinator.Load": 0.05, "Coordinator.RegisterModel": 0.05}
CALL_S = 20.0
AT_ONCE = 50
MOST_BYTES = 50 << 20
v1 = coordinator_pb2
COMMANDS: tuple[tuple[str, Message], ...] = (
    ("Coordinator.SetConsistency", v1.ChangeConsistencyRequest(mode=types_pb2.MODE_ASYNC, staleness=3, wait_s=1.0)),
    ("Coordinator.Drain", v1.DrainRequest(name="worker-7", wait_s=1.0)),
    ("Coordinator.Scale", v1.ScaleRequest(workers=1, wait_s=1.0)),
    ("Coordinator.Scale", v1.ScaleRequest(servers=2, wait_s=1.0)),
    ("Coordinator.Checkpoint", v1.CheckpointRequest(wait_s=1.0)),
    ("Coordinator.Stop", v1.StopRequest(reason="enough", state="done", said=["done: all is well"])),
    ("Coordinator.Trace", v1.TraceRequest(steps=2, wait_s=0.1)),
    ("Coordinator.Ledger", v1.AccountsRequest(slices=True)),
    ("Coordinator.Status", v1.StatusRequest(model=True, events=True, report=True)),
    ("Coordinator.Settings", v1.SettingsRequest(newcomer=5)),
    ("Coordinator.Finish", v1.FinishRequest(member=1, timeline=0, version=2, epoch=1)),
    (
        "Coordinator.Lease",
        v1.LeaseRequest(member=1, want=4, max_epoch=3, wait_s=0.1, holding=[{"epoch": 1, "index": 2}]),
    ),
    ("Coordinator.Begin", v1.BeginRequest(member=1, slice={"epoch": 1, "index": 2, "step": 3})),
    ("Coordinator.Load", v1.LoadRequest(member=1, place={"epoch": 1, "count": 1, "digest": "d"})),
    (
        "Coordinator.Agree",
        v1.AgreeRequest(member=1, name="n", mine={"name": "n", "epoch": 1, "count": 1, "value": 2.0}),
    ),
    ("Coordinator.Evaluate", v1.EvaluateRequest(member=1, epoch=1, count=1, slices=9, wants=True, wait_s=0.1)),
    ("Coordinator.Keep", v1.KeepRequest(member=1, version=1, total=2000, data=b"d" * 1000)),
    ("Coordinator.Kept", v1.KeptRequest(member=1)),
    ("Coordinator.Snapshot", v1.SnapshotRequest(member=1)),
    ("Coordinator.HandIn", v1.TracePart(member=1, number=5, pid=7, spans=[{"name": "n", "track": "t"}])),
)


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes in the place of a message."""

    raw: bytes


def record(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Message]]:
    """The messages to the coordinator of two short jobs, and commands."""
    seen: list[tuple[str, Message]] = []
    call, session = MemoryChannel.call, MemoryChannel.session

    def note(method: str, request: Message) -> None:
        if method.startswith("Coordinator."):
            copy = type(request)()
            copy.CopyFrom(request)
            seen.append((method, copy))

    async def recorded(channel: MemoryChannel, method: str, request: Message, *, timeout: float) -> Message:
        note(method, request)
        return await call(channel, method, request, timeout=timeout)

    async def all_of(requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        async for request in requests:
            note("Coordinator.Session", request)
            yield request

    with monkeypatch.context() as patch:
        patch.setattr(MemoryChannel, "call", recorded)
        patch.setattr(MemoryChannel, "session", lambda one, method, requests: session(one, method, all_of(requests)))
        for mode in ("sync", "async"):
            with Cluster(1, 1, mode, slices_per_step=SLICES) as cluster:
                cluster.train(program(lambda ctx, _: ctx.log(loss=1.0)))
    kinds = {method for method, _ in seen}
    assert {"Coordinator.Join", "Coordinator.Session", "Coordinator.Lease", "Coordinator.RegisterModel"} <= kinds
    return [*seen, *COMMANDS]


# ---- mutations


def numbers_of(random_: random.Random) -> Any:
    return random_.choice([0, 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1])


def set_field(message: Message, random_: random.Random) -> None:
    """Give a field anywhere in the message a value that a peer may have made up."""
    chosen: Any = random_.choice(cast(Sequence[Any], message.DESCRIPTOR.fields))
    name, odd = (
        chosen.name,
        random_.choice(["", "\n\x1b]52;c;AAAA\x07", "x" * 2000, "🦜" * 300, "../../etc", "%s{}"]),
    )
    if chosen.message_type is not None:
        if chosen.message_type.GetOptions().map_entry:
            table = getattr(message, name)
            with suppress(TypeError, ValueError):
                table[odd] = odd if chosen.message_type.fields_by_name["value"].cpp_type == 9 else 1.0
            return
        inner = getattr(message, name)
        if not chosen.is_repeated:
            inner.SetInParent()
            set_field(inner, random_)
            return
        for _ in range(random_.choice([1, 3, 20])):
            set_field(inner.add(), random_)
        return
    values: dict[int, Callable[[], Any]] = {
        9: lambda: odd if chosen.type == chosen.TYPE_STRING else odd.encode(),
        7: lambda: random_.random() < 0.5,
        5: lambda: random_.choice([-1.0, 0.0, 1e308, float("inf"), float("-inf"), float("nan")]),
    }
    value = values.get(chosen.cpp_type, lambda: numbers_of(random_))()
    with suppress(ValueError, TypeError):
        if chosen.is_repeated:
            getattr(message, name).extend([value] * random_.choice([1, 3, 50]))
        else:
            setattr(message, name, value)


def mutated(one: Message, other: Message, random_: random.Random) -> bytes:
    if random_.random() < 0.5:
        copy = type(one)()
        copy.CopyFrom(one)
        for _ in range(random_.randrange(1, 4)):
            set_field(copy, random_)
        return copy.SerializeToString()
    raw = bytearray(one.SerializeToString())
    match random_.randrange(4):
        case 0:
            for _ in range(random_.randrange(1, 8)):
                if raw:
                    raw[random_.randrange(len(raw))] = random_.randrange(256)
        case 1:
            del raw[random_.randrange(len(raw) + 1) :]
        case 2:
            raw += other.SerializeToString()
        case _:
            at = random_.randrange(len(raw) + 1)
            raw[at:at] = random_.randbytes(random_.randrange(1, 60))
    return bytes(raw)


@dataclass(slots=True)
class Sender:
    """Sends what a member that looks on may send. Who it is, and what only an operator may say, is kept as it is."""

    cluster: Cluster
    random: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    # Errors that are mistakes of the coordinator itself.
    ours: list[str] = field(default_factory=list)
    member: int = 0

    def run(self, work: Any, timeout_s: float) -> Any:
        return self.cluster.job.background.run(work, timeout_s)

    async def join(self) -> None:
        """Become a member that looks on."""
        channel = self.cluster.job.network.connect(COORDINATOR)
        request = v1.JoinRequest(role=types_pb2.ROLE_OBSERVER, protocol=PROTOCOL)
        self.member = cast(v1.JoinResponse, await channel.call("Coordinator.Join", request, timeout=5.0)).member

    def allowed(self, method: str, raw: bytes) -> bytes | None:
        """The message in this member's name; None if it is a proper command, or speaks for a server."""
        kind = METHODS[method].request
        try:
            message: Any = kind.FromString(raw)
        except DecodeError:
            return raw
        if "member" in message.DESCRIPTOR.fields_by_name and message.member < 1000:
            message.member = self.member
        if "wait_s" in message.DESCRIPTOR.fields_by_name and message.wait_s > 0:
            message.wait_s = 0.0
        match message:
            case v1.JoinRequest():
                # A worker more takes slices, and a server dials: who may be one is another test's subject.
                if message.role in (types_pb2.ROLE_WORKER, types_pb2.ROLE_SERVER):
                    message.role = types_pb2.ROLE_OBSERVER
            case v1.SessionRequest():
                del message.shards[:]
            case v1.ChangeConsistencyRequest() if message.mode in (types_pb2.MODE_SYNC, types_pb2.MODE_ASYNC):
                return None
            case v1.ScaleRequest() if message.workers or message.servers:
                return None
            case v1.DrainRequest() if message.name in ("worker-0", "server-0"):
                return None
            case v1.StopRequest() if message.state in ("", "done", "failed", "stopped"):
                return None
        return bytes(message.SerializeToString())

    async def send(self, messages: Sequence[tuple[str, bytes]]) -> None:
        await asyncio.gather(*(self._send(method, raw) for method, raw in messages))
        if self.member not in self.cluster.job.coordinator.job.members:
            await self.join()

    async def _send(self, method: str, raw: bytes) -> None:
        channel = self.cluster.job.network.connect(COORDINATOR)
        request = cast(Message, Raw(raw))
        try:
            async with asyncio.timeout(PARKED.get(method, CALL_S)):
                if METHODS[method].kind is MethodKind.SESSION:

                    async def one() -> AsyncIterator[Message]:
                        yield request

                    async with aclosing(channel.session(method, one())) as replies:
                        async for _ in replies:
                            pass
                else:
                    await channel.call(method, request, timeout=CALL_S)
            self.outcomes["taken"] += 1
        except TimeoutError:
            self.outcomes["parked"] += 1
        except errors.ParamServerError as error:
            self.outcomes[type(error).__name__] += 1
            if type(error) is errors.ParamServerError:
                self.ours.append(f"{method} {raw[:300]!r}: {error}")
        finally:
            await channel.close()


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def state(cluster: Cluster) -> dict[str, Any]:
    """What must not change: all that the job is to other members, and to the coordinator that comes after this one."""
    job = cluster.job.coordinator.job
    record = job.record()
    members = [(one.name, one.member) for one in record.view.workers]
    return {
        "phase": job.life.phase,
        "timeline": record.view.timeline,
        "workers": members,
        "generation": record.view.generation,
        "consistency": str(job.consistency),
        "versions": [(one.version, one.applied) for one in cluster.stats()],
        "model": job.registry.digest,
        "registered": job.registry.registered[:1],
        "data": record.data.SerializeToString(),
        "broken": dict(record.broken_promises),
        "said": list(job.ending.said),
        "wanted": (record.wanted_workers, record.wanted_servers, record.expected_workers, record.expected_servers),
        "ended": (record.finished, record.script_ended),
        "poisoned": len(record.poisoned),
    }


@pytest.mark.parametrize("count", long_but({500}, (500, 20_000)))
def test_mutated_messages_change_nothing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = record(monkeypatch)
    encode = Method.encode_request
    monkeypatch.setattr(
        Method, "encode_request", lambda method, one: one.raw if isinstance(one, Raw) else encode(method, one)
    )
    random_ = random.Random(count)
    halfway, go_on = threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if slices == 10:
            halfway.set()
            assert go_on.wait(600.0)

    by_method: dict[str, list[Message]] = {}
    for method, message in recorded:
        by_method.setdefault(method, []).append(message)
    with Cluster(1, 1, slices_per_step=SLICES) as cluster:
        worker = cluster.start(program(each))
        try:
            assert halfway.wait(60.0)
            sender = Sender(cluster, random_)
            sender.run(sender.join(), 10.0)
            before, memory = state(cluster), 0
            with capture_logs() as logs:
                for turn in range(0, count, AT_ONCE):
                    messages: list[tuple[str, bytes]] = []
                    while len(messages) < AT_ONCE:
                        method = random_.choice(sorted(by_method))
                        one, other = random_.choice(by_method[method]), random_.choice(recorded)[1]
                        if (raw := sender.allowed(method, mutated(one, other, random_))) is not None:
                            messages.append((method, raw))
                    sender.run(sender.send(messages), 60.0)
                    if turn == AT_ONCE * 4:
                        memory = resident()
            grown = resident() - memory
            assert [one for one in logs if one["log_level"] in ("error", "critical") or one.get("exc_info")] == []
            assert sender.ours == []
            assert state(cluster) == before
            assert cluster.status().ByteSize() < 200_000
            assert cluster.job.coordinator.job.record().ByteSize() < 100_000
            assert grown < MOST_BYTES, f"{grown / 2**20:.0f} MiB more"
            assert sum(sender.outcomes.values()) == count
            assert sender.outcomes["ProtocolError"] > count / 50, sender.outcomes
            assert sender.outcomes["taken"] > count / 10, sender.outcomes
        finally:
            go_on.set()
        cluster.join([worker])
        assert cluster.outcome().digests == twin()
