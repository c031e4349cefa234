"""A slice that kills each worker that computes it: named, or skipped and counted as that."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest

from paramserver import errors
from paramserver.cli.look.ledger import _lines
from paramserver.coordinator.watching.poison import PoisonWatch
from paramserver.core.job.membership import Member
from paramserver.membership import session
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.worker.context import Context
from tests.support.cluster.harness import CALL_S, JOB_S, Cluster, Died, Worker, item_of, until
from tests.support.cluster.programs import Program, dataset

SAMPLES, BATCH, EPOCHS, SLICES = 48, 4, 2, 12
BAD = 7
# Three deaths are enough to know. Of two workers the other one may be at it, too, each time, and on a busy machine one
# dies before it has heard that slices are announced now.
MOST = {1: 4, 2: 10}


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_REPORT_S", 0.1)


class Deadly:
    """Whoever computes slice 7 of the first epoch dies, and is started again."""

    def __init__(self, cluster: Cluster) -> None:
        self.deaths: list[Context] = []
        self.errors: list[BaseException] = []
        self._cluster = cluster
        self._script = Program(dataset(SAMPLES), BATCH, EPOCHS, each=self._each)

    def _each(self, ctx: Context, slices: int) -> None:
        item = item_of(ctx)
        if (item.epoch, item.index) == (0, BAD):
            self.deaths.append(ctx)
            raise Died

    def run(self, workers: int) -> None:
        """Keep so many workers alive until the job is over."""
        keepers = [threading.Thread(target=self._keep, args=(rank,)) for rank in range(workers)]
        for keeper in keepers:
            keeper.start()
        for keeper in keepers:
            keeper.join(JOB_S)
            assert not keeper.is_alive(), self._cluster.where_it_stands()

    def _keep(self, rank: int) -> None:
        while True:
            worker = Worker(self._cluster, rank, self._script, {})
            self._cluster.workers.append(worker)
            worker.end(JOB_S)
            if worker.error is not None:
                self.errors.append(worker.error)
            if worker.context not in self.deaths or len(self.deaths) > max(MOST.values()):
                return
            until("it is missed", lambda: f"worker-{rank}" in self._cluster.status().lost)
            if self._cluster.status().state == "failed":
                return


def ledger(cluster: Cluster) -> coordinator_pb2.AccountsResponse:
    request = coordinator_pb2.AccountsRequest(slices=True)
    return cluster.job.background.run(cluster.job.coordinator.ledger(request), CALL_S)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_skip(mode: str, workers: int) -> None:
    with Cluster(
        workers, 2, mode, "unbounded", slices_per_step=4 if mode == "sync" else 0, poison="skip", grace_s=0.1
    ) as cluster:
        deadly = Deadly(cluster)
        deadly.run(workers)
        assert 3 <= len(deadly.deaths) <= MOST[workers]
        account = ledger(cluster)
        status = cluster.status()
        summary = cluster.outcome().summary
    assert [(one.once, one.skipped, one.twice, one.never) for one in account.epochs] == [
        (SAMPLES - BATCH, BATCH, 0, 0),
        (SAMPLES, 0, 0, 0),
    ]
    assert "4 skipped: their slices kill the workers that compute them" in _lines(account, False)[1]
    assert summary["samples"] == EPOCHS * SAMPLES - BATCH
    assert summary["contributions_applied"] == EPOCHS * SLICES
    assert len(status.poisoned) == 1
    assert status.poisoned[0].startswith("slice 7 of epoch 1 (samples ")
    assert summary["poisoned_slices"] == list(status.poisoned)


def test_fail_names_the_slice() -> None:
    with Cluster(2, 1, slices_per_step=4, grace_s=0.1) as cluster:
        deadly = Deadly(cluster)
        deadly.run(2)
        assert 3 <= len(deadly.deaths) <= MOST[2]
        status = cluster.status()
    assert status.state == "failed"
    assert re.match(
        r"each worker that computes slice 7 of epoch 1 \(step 1; samples \d+, .*\) dies, worker-", status.reason
    )
    assert all(isinstance(error, errors.JobFailedError) for error in deadly.errors)


def test_a_worker_that_waits_for_permission_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two workers that wait would each wait for the other, and then die together."""
    waiting: set[int] = set()
    heard: list[bool] = []
    begin, hear = PoisonWatch.begin, PoisonWatch.hear

    async def slowly(self: PoisonWatch, member: int, slice_: types_pb2.SliceRef) -> bool:
        waiting.add(member)
        await asyncio.sleep(0.5)  # several reports come meanwhile
        waiting.discard(member)
        return await begin(self, member, slice_)

    def listen(self: PoisonWatch, member: Member, report: coordinator_pb2.WorkerReport) -> None:
        if member.ident in waiting:
            heard.append(report.HasField("computing"))
        hear(self, member, report)

    monkeypatch.setattr(PoisonWatch, "begin", slowly)
    monkeypatch.setattr(PoisonWatch, "hear", listen)
    with Cluster(1, 1, slices_per_step=4, grace_s=0.1) as cluster:
        Deadly(cluster).run(1)
    assert heard
    assert not any(heard)
