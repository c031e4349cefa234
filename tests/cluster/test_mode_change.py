"""Mode and staleness change while workers train: at one version on all servers, and every sample still counts once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from paramserver import errors
from paramserver.alone.job import COORDINATOR, worker_options
from paramserver.core.versions.names import AsyncName, SyncName
from paramserver.membership.joining import JoinOptions
from paramserver.membership.settings import consistency_of
from paramserver.transport.base import Channel
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.worker.context import Context
from paramserver.worker.engine import Engine
from tests.support.cluster.harness import CALL_S, Applied, Cluster, Died, Outcome, recorded, until, wait
from tests.support.cluster.pacer import Pacer
from tests.support.cluster.programs import LedgerProgram
from tests.support.marks import long_but

SAMPLES, BATCH = 48, 2  # 24 slices an epoch
SLICES = SAMPLES // BATCH


def counted(outcome: Outcome, log: Sequence[Applied]) -> torch.Tensor:
    """How often each sample is in what the shards have applied."""
    cells = torch.zeros(SAMPLES)
    for applied in log:
        for index, data in applied.contribution.chunks.items():
            (piece,) = outcome.result.layout.chunks[index].pieces
            where = slice(piece.tensor_start, piece.tensor_start + piece.elements)
            # Minus one for each sample of the slice, times the samples of the slice.
            cells[where] -= data[piece.chunk_start : piece.chunk_start + piece.elements] / BATCH
    return cells


CHANGES: dict[str, list[tuple[str, int | str]]] = {
    "there and back": [("async", 2), ("sync", 0)],
    "twice": [("async", "unbounded"), ("sync", 0), ("async", 0), ("sync", 0)],
    "staleness": [("async", 0), ("async", "unbounded"), ("async", 1), ("sync", 0)],
}


@pytest.mark.parametrize("slices_per_step", [pytest.param(3, marks=pytest.mark.long), 5])
@pytest.mark.parametrize("name", long_but(["twice", "staleness"], CHANGES))
def test_every_sample_counts_once_per_epoch_across_changes(name: str, slices_per_step: int) -> None:
    epochs, pacer = 14, Pacer()
    with recorded() as log, Cluster(3, 2, slices_per_step=slices_per_step) as cluster:
        script = LedgerProgram(SAMPLES, BATCH, epochs, pacer)
        workers = [cluster.start(script, {"training__chunk_bytes": 64}) for _ in range(3)]
        boundaries = []
        for mode, staleness in CHANGES[name]:
            pacer.go(23)  # not a whole number of steps
            pacer.free()
            reply = cluster.set_consistency(mode, staleness)
            boundaries.append(reply.consistency.from_version)
            now = [server.consistency for server in cluster.stats()]
            assert now == [reply.consistency] * 2, "both servers have the same setting from the same version"
        before = [server.version for server in cluster.stats()]
        pacer.free()
        cluster.join(workers)
        outcome = cluster.outcome()
        after = cluster.stats()
    modes = [boundary for boundary in boundaries if boundary]  # another bound is not tied to a version
    assert modes == sorted(modes)
    assert modes
    assert outcome.summary["mode"] == CHANGES[name][-1][0]
    assert outcome.summary["steps"] > max(before), "it went on after the last change"
    assert torch.equal(counted(outcome, log), torch.full((SAMPLES,), float(epochs)))
    assert [server.applied for server in after] == [SLICES * epochs] * 2
    assert len({server.version for server in after}) == 1
    # Both servers applied the same names; each mode names its own.
    names = [{a.contribution.name for a in log if a.shard == shard} for shard in (0, 1)]
    assert names[0] == names[1]
    assert {type(one) for one in names[0]} == {SyncName, AsyncName}


def test_an_asynchronous_job_becomes_synchronous_and_stays() -> None:
    epochs, pacer = 8, Pacer()
    with recorded() as log, Cluster(2, 2, "async", "unbounded", slices_per_step=4) as cluster:
        workers = [cluster.start(LedgerProgram(SAMPLES, BATCH, epochs, pacer)) for _ in range(2)]
        pacer.go(29)
        pacer.free()
        reply = cluster.set_consistency("sync")
        cluster.join(workers)
        outcome = cluster.outcome()
    assert reply.consistency.from_version >= 28
    assert torch.equal(counted(outcome, log), torch.full((SAMPLES,), float(epochs)))
    # Contributions before the boundary are one version each, then there is one for each step of up to 4 slices.
    assert outcome.summary["steps"] < SLICES * epochs


class Held:
    """Holds worker 0 before it hands in its third slice."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, ctx: Context, slices: int) -> None:
        if ctx.rank == 0 and slices == 2:
            self.reached.set()
            wait(self.released, "the release of worker 0", 60.0)


def applied(cluster: Cluster) -> int:
    return min(server.applied for server in cluster.stats())


def standing(cluster: Cluster) -> bool:
    """All but one worker wait for the slowest clock, on both servers."""
    return all("worker-0" in server.waiting_for and server.clocks for server in cluster.stats())


def test_a_larger_bound_lets_waiting_workers_go_and_a_smaller_one_holds_them() -> None:
    held = Held()
    with recorded() as log, Cluster(2, 2, "async", 0) as cluster:
        workers = [cluster.start(LedgerProgram(SAMPLES, BATCH, 4, held)) for _ in range(2)]
        wait(held.reached, "worker 0 in its third slice")
        until("worker 1 waits", lambda: standing(cluster))
        before = applied(cluster)
        cluster.set_consistency("async", 5)
        until("worker 1 has done five more", lambda: applied(cluster) == before + 5 and standing(cluster))
        cluster.set_consistency("async", 1)  # it is further ahead than that, and must wait
        assert applied(cluster) == before + 5
        cluster.set_consistency("async", "unbounded")
        until("worker 1 went on", lambda: applied(cluster) > before + 5)
        held.released.set()
        cluster.join(workers)
        outcome = cluster.outcome()
    assert torch.equal(counted(outcome, log), torch.full((SAMPLES,), 4.0))


def test_a_worker_dies_while_the_mode_changes() -> None:
    """Its leased slices go to others, so the change comes to an end."""
    dying, go = threading.Event(), threading.Event()

    def each(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices == 5:
            dying.set()
            wait(go, "the word to die")
            raise Died

    with recorded() as log, Cluster(3, 2, "async", "unbounded", slices_per_step=4, grace_s=0.1) as cluster:
        workers = [cluster.start(LedgerProgram(SAMPLES, BATCH, 12, each)) for _ in range(3)]
        wait(dying, "worker 1 in its sixth slice")
        change = threading.Thread(target=lambda: replies.append(cluster.set_consistency("sync")), daemon=True)
        replies: list[coordinator_pb2.ChangeConsistencyResponse] = []
        change.start()
        table = cluster.job.coordinator.job.leasing.table
        until("the leasing pauses", lambda: table is not None and table.paused)
        go.set()
        change.join(CALL_S)
        assert len(replies) == 1
        assert replies[0].consistency.mode == types_pb2.MODE_SYNC
        cluster.join(workers)
        outcome = cluster.outcome()
    assert torch.equal(counted(outcome, log), torch.full((SAMPLES,), 12.0))
    assert outcome.summary["mode"] == "sync"


def test_a_change_that_cannot_be_reached_in_time_changes_nothing() -> None:
    """Asynchronous to synchronous has to wait for the slice of every worker."""
    held = Held()
    with recorded() as log, Cluster(2, 2, "async", "unbounded", slices_per_step=4) as cluster:
        workers = [cluster.start(LedgerProgram(SAMPLES, BATCH, 12, held)) for _ in range(2)]
        wait(held.reached, "worker 0 in its third slice")
        with pytest.raises(errors.DeadlineError, match=r"the change to sync was given up after 0\.3 s"):
            cluster.set_consistency("sync", wait_s=0.3)
        before = applied(cluster)
        until("worker 1 goes on", lambda: applied(cluster) > before)
        held.released.set()
        assert cluster.set_consistency("sync").consistency.mode == types_pb2.MODE_SYNC
        cluster.join(workers)
        outcome = cluster.outcome()
    assert torch.equal(counted(outcome, log), torch.full((SAMPLES,), 12.0))


def test_an_agreed_change_comes_into_force_later() -> None:
    """Synchronous to asynchronous: agreed on by the servers, but the boundary is some steps ahead."""
    held = Held()

    def each(ctx: Context, slices: int) -> None:
        if held.reached.is_set():  # else this one would do the work of the other
            wait(held.released, "the release of all", 60.0)
        held(ctx, slices)

    with recorded() as log, Cluster(2, 2, slices_per_step=4) as cluster:
        workers = [cluster.start(LedgerProgram(SAMPLES, BATCH, 6, each)) for _ in range(2)]
        wait(held.reached, "worker 0 in its third slice")
        with pytest.raises(errors.DeadlineError, match="is agreed, but its version was not reached"):
            cluster.set_consistency("async", 3, wait_s=0.3)
        held.released.set()
        cluster.join(workers)
        outcome = cluster.outcome()
    assert torch.equal(counted(outcome, log), torch.full((SAMPLES,), 6.0))
    assert (outcome.summary["mode"], outcome.summary["staleness"]) == ("async", 3)


# ---- what is refused


def test_nothing_can_be_changed_before_the_job_runs() -> None:
    with Cluster(2, 1) as cluster, pytest.raises(errors.UnavailableError, match="the job is not running yet"):
        cluster.set_consistency("async")


def test_an_unknown_mode_and_the_present_one() -> None:
    with Cluster(1, 1) as cluster:
        client = cluster.client(0)
        client.init({"x": torch.zeros(3)})
        assert cluster.set_consistency("sync").consistency.revision == 0

        async def unknown() -> None:
            channel: Channel = cluster.job.network.connect(COORDINATOR)
            request = coordinator_pb2.ChangeConsistencyRequest(mode=types_pb2.MODE_UNSPECIFIED)
            await channel.call("Coordinator.SetConsistency", request, timeout=CALL_S)

        with pytest.raises(errors.ConfigError, match=r"consistency\.mode must be sync or async"):
            cluster.job.background.run(unknown(), CALL_S)
        client.close()


def join(cluster: Cluster, options: JoinOptions) -> Engine:
    engine = Engine(
        cluster.job.background, cluster.job.network.connect, cluster.job.network.connect(COORDINATOR), options
    )
    engine.join()
    return engine


REFUSED = [
    ("sync", 0, "async", 3, r"started with consistency\.mode = async, the job runs sync: use one setting"),
    ("async", 3, "sync", 0, r"started with consistency\.mode = sync, the job runs async with staleness 3"),
    ("async", 3, "async", 4, r"started with consistency\.staleness = 4, the job runs async with staleness 3"),
    (
        "async",
        3,
        "async",
        "unbounded",
        r"started with consistency\.staleness = unbounded, the job runs async with staleness 3",
    ),
    (
        "async",
        "unbounded",
        "async",
        0,
        r"started with consistency\.staleness = 0, the job runs async with staleness unbounded",
    ),
]


@pytest.mark.parametrize(("mode", "staleness", "other", "others", "text"), REFUSED)
def test_another_mode_is_refused_at_registration(
    mode: str, staleness: int | str, other: str, others: int | str, text: str
) -> None:
    with Cluster(2, 1, mode, staleness) as cluster:
        with pytest.raises(errors.ConfigError, match=f"this worker was {text}") as caught:
            join(cluster, worker_options(consistency_of(other, others), cluster.options, None))
        assert "\n" not in str(caught.value)
        assert not cluster.status().view.workers
        # Somebody without an opinion takes what the job runs.
        join(cluster, JoinOptions(job="test")).close()


def test_another_seed_or_number_of_slices_is_refused() -> None:
    same = consistency_of("sync", 0)
    with Cluster(2, 1, slices_per_step=4, seed=1) as cluster:
        with pytest.raises(errors.ConfigError, match=r"training\.seed = 2, the job has 1: use one setting"):
            join(cluster, JoinOptions(job="test", consistency=same, seed=2))
        with pytest.raises(errors.ConfigError, match=r"training\.slices_per_step = 3, the job has 4"):
            join(cluster, JoinOptions(job="test", consistency=same, slices_per_step=3))
        with pytest.raises(errors.ConfigError, match="runs job 'test', not 'other'"):
            join(cluster, JoinOptions(job="other"))
