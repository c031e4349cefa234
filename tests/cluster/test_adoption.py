"""The store has lost the job, and its coordinator is gone: the servers know everything needed, and are adopted."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from paramserver import errors
from paramserver.coordinator.leadership import takeover as taking
from paramserver.core.job.membership import Role
from paramserver.membership import session
from paramserver.resume import resuming
from paramserver.v1 import types_pb2
from paramserver.worker.context import Context
from tests.support.cluster.harness import Died, recorded, train, until, wait
from tests.support.cluster.programs import LedgerProgram, Program, adamw, cosine, dataset, network
from tests.support.failover.takeover import Chief, Fleet

# 14 slices an epoch, four to a step.
SAMPLES, BATCH, EPOCHS = 107, 8, 2
# The ledger: 24 slices of 2 samples.
CELLS, PAIR = 48, 2


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_REPORT_S", 0.1)
    monkeypatch.setattr(taking, "_FIND_S", 1.0)


class Hold:
    """Holds every worker before its third slice. ``doomed``: then it dies."""

    def __init__(self) -> None:
        self.doomed = False
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, ctx: Context, slices: int) -> None:
        if slices == 2:
            self.reached.set()
            wait(self.released, "the release of the workers", 60.0)
            if self.doomed:
                raise Died


def script(mode: str, each: Callable[[Context, int], None] | None = None) -> Callable[[Context], object]:
    if mode == "async":
        return LedgerProgram(CELLS, PAIR, EPOCHS, each)
    return Program(dataset(SAMPLES), BATCH, EPOCHS, lambda: network(norm=True), adamw, cosine, each=each)


@cache
def digests() -> tuple[str, str, str]:
    """Of the synchronous job without any fault."""
    found = train(script("sync"), slices_per_step=4).digests
    return found[0], found[1], found[2]


def begun(fleet: Fleet, hold: Hold, mode: str = "sync") -> Chief:
    leader = fleet.begin(script(mode, hold))
    wait(hold.reached, "the workers in their third slice")
    return leader


def lose(fleet: Fleet, leader: Chief) -> None:
    """Coordinator and store die together, and the store comes back empty."""
    service = leader.service
    assert service is not None
    until("servers know what the coordinator knows", lambda: not service.job.keeping.behind())

    def both() -> None:
        leader.die()
        fleet.store.forget()

    fleet.call(both)


def ends_with(chief: Chief) -> BaseException:
    until(f"{chief.place} ends", chief.task.done)
    error = chief.task.exception()
    assert error is not None
    return error


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("must", [True, False])
def test_the_servers_are_adopted(mode: str, must: bool) -> None:
    hold = Hold()
    with recorded() as log, Fleet(places=("leader",), mode=mode) as fleet:
        lose(fleet, begun(fleet, hold, mode))
        before = [(server.timeline, server.version) for server in fleet.stats()]
        again = fleet.coordinate("leader", resume=True, must=must)
        until("it leads the job", lambda: again.service is not None and again.service.job.registry.ready)
        assert "model" in fleet.store.entries
        # One that may begin a job does so, and finds the servers while it waits for members.
        fleet.reigns[:] = dict.fromkeys(fleet.reigns)
        hold.released.set()
        summary = fleet.finish()
    assert [term for term, _ in fleet.reigns][-1] > 1, "a term above all that servers have heard of"
    assert all(timeline == before[0][0] for timeline, _ in before)
    if mode == "sync":
        assert (summary["weights_sha256"], summary["optimizer_sha256"], summary["buffers_sha256"]) == digests()
        assert summary["samples"] == SAMPLES * EPOCHS
        return
    for shard in (0, 1):
        names = [applied.contribution.name for applied in log if applied.shard == shard]
        assert len(names) == len(set(names)) == CELLS // PAIR * EPOCHS


def test_a_first_start_does_not_wait_for_servers_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As composed and rendered coordinators are started; two leases would be a minute."""
    monkeypatch.setattr(resuming, "_KNOCK_S", 0.2)
    with Fleet(places=("leader",), lease_s=30.0, checkpoint__dir=str(tmp_path / "ckpt")) as fleet:
        fleet.begin(script("sync"), resume=True)
        assert fleet.finish()["weights_sha256"] == digests()[0]


def test_servers_are_adopted_although_the_checkpoints_are_lost_too(tmp_path: Path) -> None:
    """The directory looks as if no job had ever used it."""
    hold, place = Hold(), tmp_path / "ckpt"
    with Fleet(places=("leader",), checkpoint__dir=str(place)) as fleet:
        lose(fleet, begun(fleet, hold))
        shutil.rmtree(place)
        again = fleet.coordinate("leader", resume=True)
        until("it leads the job", lambda: again.service is not None and again.service.job.registry.ready)
        fleet.reigns[:] = dict.fromkeys(fleet.reigns)
        hold.released.set()
        assert fleet.finish()["weights_sha256"] == digests()[0]


def test_an_older_state_of_the_store_is_not_gone_on_from() -> None:
    """It comes back as it was before the model and the data were known, and before the second worker came."""
    hold = Hold()
    with Fleet(places=("leader",)) as fleet:
        leader = fleet.begin()
        until("the servers are written down", lambda: len(fleet.record().members) == 2)
        set_back = fleet.store.remember()
        for _ in range(2):
            fleet.work(script("sync", hold))
        wait(hold.reached, "the workers in their third slice")
        service = leader.service
        assert service is not None
        until("servers know what the coordinator knows", lambda: not service.job.keeping.behind())
        members = [member.ident for member in service.job.members.of(Role.WORKER)]

        def both() -> None:
            leader.die()
            set_back()

        fleet.call(both)
        assert not fleet.record().layout
        fleet.coordinate("leader", resume=True)
        new = fleet.took_over("leader")
        assert [member.ident for member in new.job.members.of(Role.WORKER)] == members, "workers keep their numbers"
        hold.released.set()
        summary = fleet.finish()
    assert summary["weights_sha256"] == digests()[0]


def test_a_coordinator_that_was_not_told_to_resume_says_what_it_found() -> None:
    hold = Hold()
    with Fleet(places=("leader",)) as fleet:
        lose(fleet, begun(fleet, hold))
        error = ends_with(fleet.coordinate("leader"))
        assert isinstance(error, errors.ConfigError)
        assert "job 'test' has not ended: server-0, server-1 hold shards of it" in str(error)
        assert "--resume" in str(error)
        assert "--fresh" in str(error)
        fleet.coordinate("leader", resume=True)
        hold.released.set()
        fleet.join()
        fleet.reigns[:] = dict.fromkeys(fleet.reigns)
        summary = fleet.finish()
    assert summary["weights_sha256"] == digests()[0]


def test_nothing_to_resume() -> None:
    with Fleet(places=("leader",), cluster__join_timeout_s=0.5) as fleet:
        error = ends_with(fleet.coordinate("leader", resume=True, must=True))
    assert isinstance(error, errors.ConfigError)
    assert str(error).startswith("there is nothing to resume: the store (memory) knows no job 'test'")
    assert fleet.reigns == []
    assert not fleet.store.entries


def test_a_job_that_has_ended_is_not_resumed() -> None:
    with Fleet(places=("leader",), workers=1) as fleet:
        fleet.begin(script("async"))
        fleet.finish()
        error = ends_with(fleet.coordinate("leader", resume=True, must=True))
    assert "there is nothing to resume: job 'test' has ended" in str(error)


@pytest.mark.parametrize("how", ["one shard is gone", "all shards are gone"])
def test_a_job_whose_shards_are_gone_does_not_begin_at_version_0(how: str) -> None:
    """Without checkpoints it ends, with a sentence for everybody."""
    hold = Hold()
    with Fleet(places=("leader",)) as fleet:
        leader = begun(fleet, hold)
        if how == "all shards are gone":
            fleet.kill(leader)  # the store still has the job
        else:
            lose(fleet, leader)
        gone = fleet.keepers[: 1 if how == "one shard is gone" else 2]
        for keeper in gone:
            fleet.call(keeper.die)
        again = fleet.coordinate("leader", resume=True)
        for keeper in gone:
            fleet.serve(keeper.index, keeper.address)
        until("it ends", again.task.done)
        assert again.task.result() == 1
        (said,) = [line for line in again.said if "error" in line]
        assert "begun anew" in said
        assert "--fresh" in said
        hold.released.set()
        for hand in fleet.hands:
            hand.join(20.0)
            assert isinstance(hand.error, errors.JobFailedError), hand.error
        assert fleet.record().view.state == types_pb2.JOB_STATE_FAILED


def test_a_worker_of_a_job_that_was_forgotten_is_told_so() -> None:
    hold = Hold()
    with Fleet(places=("leader",)) as fleet:
        lose(fleet, begun(fleet, hold))
        for keeper in fleet.keepers:
            fleet.call(keeper.die)
        fresh = fleet.coordinate("leader", fresh=True)
        until("it leads", lambda: fresh.service is not None)
        hold.released.set()
        for hand in fleet.hands:
            hand.join(20.0)
            assert isinstance(hand.error, errors.JobFailedError), hand.error
            assert "this worker takes part in an earlier run of job 'test': restart it" in str(hand.error)
