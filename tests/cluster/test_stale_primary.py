"""A primary that was given up for lost and goes on: it publishes nothing, drops its shards, and is a backup again."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from paramserver.coordinator.service import CoordinatorService
from paramserver.core.job.membership import Role
from paramserver.membership import session
from paramserver.server.running import RunningShard
from paramserver.worker.context import Context
from tests.support.cluster.faults import Fault, Rule
from tests.support.cluster.harness import until, wait
from tests.support.cluster.programs import LedgerProgram
from tests.support.cluster.small_job import SLICES, program
from tests.support.failover.kills import exact
from tests.support.failover.ledger import BATCH, CELLS
from tests.support.failover.rollback import Rig, Strike, same, twin
from tests.support.marks import long_but

STEP = 3
# Between what two moments the primary stands still, or is cut off.
MOMENTS = long_but(
    {"forward.before_ack"}, ["forward.before", "forward.before_ack", "step.after_decide", "push.after_stage"]
)


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are short here, so members report more often."""
    monkeypatch.setattr(session, "_REPORT_S", 0.1)


def expected() -> Mapping[str, Any]:
    return twin("replicas", program(), slices_per_step=SLICES)


class Stale:
    """Server-1 at the moment of the strike: the shards of which it is the primary, and their versions."""

    def __init__(self, how: Callable[[Rig], None]) -> None:
        # Until it is given up for lost, it goes on as before.
        self.publishes = how is cut_from_the_coordinator
        self.rig: Rig | None = None
        self.shards: list[RunningShard] = []
        self.versions: list[int] = []
        # Set when the server can go on, or is connected again.
        self.resumed = threading.Event()
        self._how = how

    def strike(self) -> None:
        assert self.rig is not None
        shards = [service.host.shard for service in self.rig.keepers[1].service.shards.values()]
        self.shards = [shard for shard in shards if shard is not None and not shard.state.backup]
        self.versions = [shard.state.version for shard in self.shards]
        self._how(self.rig)

    def each(self, ctx: Context, slices: int) -> None:
        """At version 7 the workers wait until the server was given up and is back, and all shards have backups."""
        if ctx.version == 7:
            wait(self.resumed, "the return of server-1", 60.0)
            until("server-1 is a member again", lambda: self.there())
            until("all shards have backups", lambda: self.job.holders.replicated)

    @property
    def job(self) -> Any:
        assert self.rig is not None
        service = self.rig.leader.service
        assert isinstance(service, CoordinatorService)
        return service.job

    def there(self) -> bool:
        return len(self.job.members.of(Role.SERVER)) == 2

    def check(self) -> None:
        """The shards are as they were: nothing was published, and they have ended."""
        assert self.shards, "server-1 was a primary"
        assert [shard.state.version for shard in self.shards] == self.versions
        assert self.rig is not None
        present = [service.host.shard for service in self.rig.keepers[1].service.shards.values()]
        assert not set(map(id, present)) & set(map(id, self.shards)), "it holds them no more"
        del present
        found = [weakref.ref(shard) for shard in self.shards]
        self.shards = []
        gc.collect()
        assert [one() for one in found] == [None] * len(found), "their memory is free"


def pause(rig: Rig) -> None:
    rig.keepers[1].process.pause()


def cut(rig: Rig) -> None:
    rig.keepers[1].cut()


def cut_from_the_coordinator(rig: Rig) -> None:
    """It reaches workers and servers, and they reach it."""
    out = rig.keepers[1].process.out
    out.rules = (Rule("Coordinator.*", Fault.DROP_REQUEST),)
    out.cut()  # ends the calls that are under way
    out.heal()


def back(rig: Rig) -> None:
    keeper = rig.keepers[1]
    keeper.process.resume()
    keeper.process.out.rules = ()
    keeper.heal()


def survives(stale: Stale, rig: Rig, script: object) -> Mapping[str, Any]:
    """The job goes on without server-1, which then comes back by itself; its summary."""
    stale.rig = rig
    leader = rig.begin(script)  # type: ignore[arg-type]
    until("it is struck", lambda: stale.shards)
    until("server-1 is given up", lambda: not stale.there())
    assert leader.service is not None
    newest = max(stale.versions)
    until("the job goes on", lambda: stale.job.reports.newest_version() > newest)
    others = rig.keepers[0].service.shards.values()
    until("all backups are promoted", lambda: not any(s.host.shard.state.backup for s in others if s.host.shard))
    if stale.publishes:  # nobody has told it that it is the primary no more
        stale.versions = [shard.state.version for shard in stale.shards]
    rig.call(lambda: back(rig))
    stale.resumed.set()
    summary = rig.finish()
    assert (rig.rollbacks, len(rig.keepers)) == (0, 2), "nobody was started again"
    assert (rig.record().takeovers, rig.record().repairs) == (1, 1)
    stale.check()
    return summary


@pytest.mark.parametrize("at", MOMENTS)
def test_a_primary_that_stood_still_for_longer_than_its_lease(at: str, tmp_path: Path) -> None:
    stale = Stale(pause)
    wanted = expected()
    with Rig(tmp_path, 0, [Strike(at, "server-1", STEP, do=stale.strike)], cluster__replicas=1, lease_s=2.0) as rig:
        same(survives(stale, rig, program(stale.each)), wanted)


@pytest.mark.parametrize(
    ("how", "transport"),
    [
        (cut, "grpc"),
        (cut_from_the_coordinator, "shm"),
        pytest.param(cut, "shm", marks=pytest.mark.long),
        pytest.param(cut_from_the_coordinator, "grpc", marks=pytest.mark.long),
    ],
)
def test_a_primary_that_was_cut_off(how: Callable[[Rig], None], transport: str, tmp_path: Path) -> None:
    stale = Stale(how)
    wanted = expected()
    strikes = [Strike("step.after_decide", "server-1", STEP, do=stale.strike)]
    options: dict[str, Any] = {"cluster__replicas": 1, "cluster__transport": transport, "lease_s": 2.0}
    with Rig(tmp_path, 0, strikes, **options) as rig:
        same(survives(stale, rig, program(stale.each)), wanted)


def test_asynchronous_slices_count_once(tmp_path: Path) -> None:
    stale, epochs = Stale(pause), 3

    def each(ctx: Context, slices: int) -> None:
        if slices == 20:
            wait(stale.resumed, "the return of server-1", 60.0)
            until("server-1 is a member again", stale.there)
            until("all shards have backups", lambda: stale.job.holders.replicated)

    strikes = [Strike("forward.before", "server-1", 9, do=stale.strike)]
    with Rig(tmp_path, 0, strikes, cluster__replicas=1, mode="async", lease_s=2.0) as rig:
        summary = survives(stale, rig, LedgerProgram(CELLS, BATCH, epochs, each=each))
        exact(rig, summary, epochs)
