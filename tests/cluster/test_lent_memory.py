"""A backup on its primary's host reads what versions are made of in the primary's memory."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paramserver.server.replicas.lent import Lent
from paramserver.server.replicas.outbox import Outbox
from paramserver.server.running import RunningShard
from paramserver.transport.base import Channel
from paramserver.transport.shm.segments import Foreign, Segment
from paramserver.v1 import shard_pb2
from tests.support.cluster.programs import LedgerProgram
from tests.support.cluster.small_job import SLICES, program
from tests.support.failover.kills import exact
from tests.support.failover.ledger import BATCH, CELLS
from tests.support.failover.lending import CHUNKS, PLAN, value
from tests.support.failover.moments import LAST, fresh
from tests.support.failover.rollback import Rig, Strike, same, twin

LENDER = Path(__file__).parents[1] / "support" / "failover" / "lending.py"
STEP = 5
MOMENTS = {
    "before it forwards": [Strike("forward.before", "server-1", STEP)],
    "the backup has received": [Strike("forward.received", "server-0", STEP)],
    "after the answer of the backup": [Strike("forward.after_ack", "server-0", STEP)],
    "last step": [Strike("forward.after_ack", "server-1", LAST)],
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks were read in place, each time."""
    found: list[int] = []
    chunks = Lent.chunks

    def counted(self: Lent, wanted: Any) -> Any:
        views = chunks(self, wanted)
        found.append(len(views))
        return views

    monkeypatch.setattr(Lent, "chunks", counted)
    return found


def trained(place: Path, strikes: list[Strike] | None = None, transport: str = "shm") -> Rig:
    """A run with backups that has come out with the bits of a quiet one."""
    with Rig(place, 0, strikes or [], cluster__replicas=1, cluster__transport=transport) as rig:
        rig.begin(program())
        same(rig.finish(), twin("replicas", program(), slices_per_step=SLICES))
        assert rig.rollbacks == 0
    return rig


@pytest.mark.parametrize("transport", ["shm", "auto", "grpc"])
def test_the_same_bits_in_memory_and_over_the_network(transport: str, read: list[int], tmp_path: Path) -> None:
    trained(tmp_path, transport=transport)
    assert any(read) == (transport != "grpc")


@pytest.mark.parametrize("when", MOMENTS)
def test_a_server_dies(when: str, read: list[int], tmp_path: Path) -> None:
    rig = trained(tmp_path, fresh(MOMENTS[when]))
    assert rig.record().promotions >= 1
    assert any(read)


def test_asynchronous_slices_count_once(read: list[int], tmp_path: Path) -> None:
    strikes = [Strike("forward.after_ack", "server-1", 9)]
    with Rig(tmp_path, 0, strikes, cluster__replicas=1, cluster__transport="shm", mode="async") as rig:
        rig.begin(LedgerProgram(CELLS, BATCH, 2))
        exact(rig, rig.finish(), 2)
        assert rig.rollbacks == 0
    assert any(read)


def test_a_backup_on_another_host_is_sent_everything(
    read: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(*_: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("paramserver.server.replicas.lent.Visit", elsewhere)
    trained(tmp_path)
    assert not read


def test_without_memory_a_backup_is_sent_everything(
    read: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Segment, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Segment, "reserve", full)
    trained(tmp_path)
    assert not read


def test_a_backup_that_cannot_map_the_memory_is_sent_everything(
    read: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, lent = [], []
    lend = Outbox.lend

    def refused(self: Foreign, fd: int, nbytes: int) -> None:
        tried.append(nbytes)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    async def counted(self: Outbox, channel: Channel, *about: Any) -> Any:
        lent.append(channel.address)
        return await lend(self, channel, *about)

    monkeypatch.setattr("paramserver.server.replicas.lent.Foreign", type("NoForeign", (), {"__init__": refused}))
    monkeypatch.setattr(Outbox, "lend", counted)
    trained(tmp_path)
    assert (len(tried), len(lent)) == (2, 2), "each backup says so once, and none begins anew"
    assert not read


class Behind:
    """Backups are slow: each makes a version only when its primary has gone on as far as it can."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.most, self.held = rig, 0, 0

    def primary(self, backup: RunningShard) -> RunningShard | None:
        """The primary of the same shard."""
        services = [s for keeper in self.rig.keepers for s in keeper.service.shards.values()]
        shards = [service.host.shard for service in services]
        found = [s for s in shards if s and s.config.shard == backup.config.shard and not s.state.backup]
        return found[0] if found else None

    async def hold(self, shard: RunningShard) -> None:
        """Wait until the primary has published more than it may, or for a while."""
        began = time.monotonic()
        self.held += 1
        while time.monotonic() < began + 0.1 and (primary := self.primary(shard)) is not None:
            self.most = max(self.most, primary.state.version - shard.state.version)
            if self.most > 1:
                return
            await asyncio.sleep(0.002)


def test_the_memory_is_not_written_while_the_backup_reads_it(
    read: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A primary is at most one version ahead of its backup, and then waits with the next content."""
    changed: list[bool] = []
    with Rig(tmp_path, 0, [], cluster__replicas=1, cluster__transport="shm") as rig:
        behind, arithmetic = Behind(rig), RunningShard.arithmetic

        async def slow(self: RunningShard, work: Callable[[], Any]) -> Any:
            if not (self.state.backup and self.state.active and 2 <= self.state.version < 6):
                return await arithmetic(self, work)
            held = [tensor for one in self.buffers.values() for tensor in one.chunks.values()]
            before = [tensor.clone() for tensor in held]
            await behind.hold(self)
            made = await arithmetic(self, work)
            changed.extend(not torch.equal(*both) for both in zip(held, before, strict=True))
            return made

        monkeypatch.setattr(RunningShard, "arithmetic", slow)
        rig.begin(program())
        same(rig.finish(), twin("replicas", program(), slices_per_step=SLICES))
    assert behind.held
    assert behind.most == 1
    assert changed
    assert not any(changed)
    assert any(read)


def test_the_memory_outlives_the_primary() -> None:
    """A process that is killed after it has lent its memory: what it has written is still there."""
    words = [sys.executable, str(LENDER)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            request = shard_pb2.LendRequest.FromString(bytes.fromhex(process.stdout.readline().decode()))
            with pytest.raises(ValueError, match="lays its memory out differently"):
                Lent(PLAN, shard_pb2.LendRequest(meeting=request.meeting, bytes=request.bytes + 64), 0)
            ours, theirs = socket.socketpair()
            with ours, theirs:
                lent = Lent(PLAN, request, theirs.fileno())
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"written\n"
        finally:
            process.kill()
        assert process.wait(20) == -signal.SIGKILL
    for index, tensor in lent.chunks(CHUNKS).items():
        assert torch.equal(tensor, torch.full_like(tensor, value(index)))
    lent.close()
