"""Another number of servers while a job trains: the same bits, every slice once, done or undone."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paramserver import errors
from paramserver.coordinator.leadership.journal import Journal
from paramserver.core.layout.plan import Plan
from paramserver.server.replicas.filling import fill
from paramserver.server.replicas.parts import Parts
from paramserver.server.rpc import setup
from paramserver.server.rpc.process import Process
from paramserver.server.running import RunningShard
from paramserver.transport.addresses import shard_address
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.worker.context import Context
from tests.support.cluster.harness import CALL_S, Cluster, train, until, wait
from tests.support.cluster.processes import Killed, running_process
from tests.support.cluster.programs import LedgerProgram, Program, adamw, dataset, network, sgd
from tests.support.cluster.small_job import SLICES, program
from tests.support.failover.held import Held
from tests.support.failover.kills import exact
from tests.support.failover.ledger import BATCH, CELLS
from tests.support.failover.resizing import Between, Wish, resize
from tests.support.failover.rollback import Rig, Strike, same, twin
from tests.support.failover.takeover import JOB

SMALL: dict[str, Any] = {"training__chunk_bytes": 256}


class Own:
    """A script without a loader: each worker hands in ``slices`` batches, which its rank and their number determine."""

    def __init__(self, slices: int, held: Held | None) -> None:
        self.slices, self.held = slices, held

    def __call__(self, ctx: Context) -> None:
        x, y = dataset(500).tensors
        model: Any = network(norm=True)
        optimizer: Any = sgd(model.parameters())
        model, optimizer = ctx.prepare(model, optimizer)
        for number in range(self.slices):
            rows = torch.arange(8) + 16 * number + 8 * ctx.rank
            loss: Any = F.cross_entropy(model(x[rows % len(x)]), y[rows % len(x)])
            loss.backward()
            if self.held is not None:
                self.held(ctx, number)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("first", "then", "replicas", "transport"),
    [
        (2, (4,), 0, "grpc"),
        pytest.param(2, (3, 2), 1, "grpc", marks=pytest.mark.long),
        pytest.param(1, (3,), 0, "grpc", marks=pytest.mark.long),
        pytest.param(4, (2,), 0, "shm", marks=pytest.mark.long),
        pytest.param(2, (3, 2), 1, "shm", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_same_bits(first: int, then: tuple[int, ...], replicas: int, transport: str, tmp_path: Path) -> None:
    wanted = twin("resized", program(), 256, slices_per_step=SLICES)
    held = Between(len(then))
    options: dict[str, Any] = {"cluster__replicas": replicas, "cluster__transport": transport, **SMALL}
    with Rig(tmp_path, 0, servers=first, **options) as rig:
        rig.begin(program(held))
        resize(rig, held, then)
        summary = rig.finish()
        assert rig.rollbacks == 0
    same(summary, wanted)


def test_older_news_drop_no_shard_of_the_present_plan(tmp_path: Path) -> None:
    """Two messages may be on their way to a server at once. The older one may come last."""
    wanted = twin("resized", program(), 256, slices_per_step=SLICES)
    held = Between(1)
    with Rig(tmp_path, 0, **SMALL) as rig:
        rig.begin(program(held))
        resize(rig, held, (3,))
        news = shard_pb2.SetMembersRequest(job=JOB, term=1, generation=1, plan=0, settled=0)
        for keeper in rig.keepers:
            shards = set(keeper.service.shards)
            assert shards
            address = shard_address(keeper.address, min(shards))
            rig.run(rig.network.connect(address).call("Shard.SetMembers", news, timeout=CALL_S))
            assert set(keeper.service.shards) == shards
        summary = rig.finish()
        assert rig.rollbacks == 0
    same(summary, wanted)


@pytest.mark.long
def test_batches_of_the_script_itself_count_once() -> None:
    """Without a data set nobody can compute a slice again, and nothing has to be."""
    slices, settings = 16, {"training.chunk_bytes": 256}
    wanted = train(Own(slices, None), 2, 2, settings, slices_per_step=4)
    held = Held()
    with Cluster(2, 2, slices_per_step=4) as cluster:
        for _ in range(2):
            cluster.start(Own(slices, held), settings)
        wait(held.reached, "the workers in their third slice")
        coordinator = cluster.job.coordinator
        asked = cluster.job.background.submit(coordinator.scale(coordinator_pb2.ScaleRequest(servers=1, wait_s=20.0)))
        until("the change is prepared", lambda: coordinator.job.record().newest_plan == 1)
        held.released.set()
        assert asked.result(30.0).servers == 1
        cluster.join()
        outcome = cluster.outcome()
        assert not cluster.status().broken_promises
    assert outcome.digests == wanted.digests
    assert outcome.summary["contributions_applied"] == wanted.summary["contributions_applied"] == 2 * slices


@pytest.mark.long
def test_a_norm_over_another_number_of_servers(tmp_path: Path) -> None:
    held = Between(1)

    def clipping(ctx: Context, slices: int) -> None:
        ctx.clip_grad_norm(0.3)
        held(ctx, slices)

    script = Program(dataset(107), 8, 2, lambda: network(norm=True), adamw, each=clipping)
    calm = Program(dataset(107), 8, 2, lambda: network(norm=True), adamw, each=lambda ctx, _: ctx.clip_grad_norm(0.3))
    wanted = twin("clipped", calm, 256, slices_per_step=SLICES)
    with Rig(tmp_path, 0, cluster__replicas=1, **SMALL) as rig:
        rig.begin(script)
        resize(rig, held, (3,))
        summary = rig.finish()
    same(summary, wanted)


@pytest.mark.parametrize(
    ("first", "then", "replicas"), [(3, (2,), 1), pytest.param(2, (4, 3), 0, marks=pytest.mark.long)], ids=str
)
def test_asynchronous_slices_count_once(first: int, then: tuple[int, ...], replicas: int, tmp_path: Path) -> None:
    epochs, held = 4, Between(len(then))
    options: dict[str, Any] = {"cluster__replicas": replicas, "training__chunk_bytes": 64}
    with Rig(tmp_path, 0, servers=first, mode="async", **options) as rig:
        rig.begin(LedgerProgram(CELLS, BATCH, epochs, each=held))
        resize(rig, held, then)
        summary = rig.finish()
        exact(rig, summary, epochs)
        assert rig.rollbacks == 0
        assert rig.record().expected_servers == then[-1]


@pytest.mark.long
def test_checkpoints_go_on_and_the_job_can_go_back_to_them(tmp_path: Path) -> None:
    """A server dies after the change: all shards of the new plan go back, also to a checkpoint of the former plan."""
    wanted = twin("resized", program(), 256, slices_per_step=SLICES)
    held = Between(1)
    with Rig(tmp_path, 2, [Strike("push.recv", "server-2", 6)], **SMALL) as rig:
        rig.begin(program(held))
        resize(rig, held, (3,))
        summary = rig.finish()
        assert rig.rollbacks == 1
        newest = tmp_path / "ckpt" / rig.record().checkpoint
        assert len(list(newest.glob("model-*-of-00003.safetensors"))) == 3
    same(summary, wanted)


def strike_while_filling(monkeypatch: pytest.MonkeyPatch, rig: Rig, *who: str) -> None:
    """Kill processes when the first new shard is about to be filled."""
    left = [*who]

    async def struck(
        made: RunningShard, filling: shard_pb2.Filling, former: Plan, process: Process, brought: Parts | None
    ) -> None:
        while left:
            rig.strike(left.pop())
        mine = running_process()
        if mine is not None and mine.killed:
            raise Killed
        await fill(made, filling, former, process, brought)

    monkeypatch.setattr(setup, "fill", struck)


@pytest.mark.parametrize(
    ("who", "replicas", "every"),
    [
        ("server-1", 1, 0),
        pytest.param("server-1", 0, 2, marks=pytest.mark.long),
        pytest.param("leader", 0, 0, marks=pytest.mark.long),
        pytest.param("leader", 1, 2, marks=pytest.mark.long),
    ],
)
def test_somebody_dies_while_new_shards_are_filled(
    who: str, replicas: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is undone: the job has the servers that it had, and the same bits."""
    wanted = twin("resized", program(), 256, slices_per_step=SLICES)
    held = Held()
    with Rig(tmp_path, every, servers=3, cluster__replicas=replicas, **SMALL) as rig:
        strike_while_filling(monkeypatch, rig, who)
        rig.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        wish = Wish(rig, 2)
        until("the change is prepared", lambda: rig.record().newest_plan == 1)
        held.released.set()
        summary = rig.finish()
        wish.join()
        assert isinstance(wish.error, errors.ParamServerError)
        record = rig.record()
        assert (record.plan, record.expected_servers, record.wanted_servers) == (0, 3, 3)
        assert rig.rollbacks == (who == "server-1" and not replicas)
    same(summary, wanted)


@pytest.mark.long
def test_a_coordinator_dies_when_the_new_plan_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The change is done: the next coordinator goes on with the new plan, and tells the workers."""
    wanted = twin("resized", program(), 256, slices_per_step=SLICES)
    held, struck = Held(), threading.Event()
    with Rig(tmp_path, 2, **SMALL) as rig:

        async def dies(journal: Journal) -> None:
            await settled(journal)
            if journal.record_now.moved and not struck.is_set():
                struck.set()
                rig.strike("leader")
                raise Killed

        settled = Journal.settled
        monkeypatch.setattr(Journal, "settled", dies)
        rig.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        wish = Wish(rig, 3)
        rig.serve(2)
        until("the change is prepared", lambda: rig.record().newest_plan == 1)
        held.released.set()
        summary = rig.finish()
        wish.join()
        record = rig.record()
        assert struck.is_set()
        assert (record.plan, record.expected_servers, rig.rollbacks) == (1, 3, 0)
    same(summary, wanted)


@pytest.mark.long
def test_wishes_that_cannot_be_change_nothing(tmp_path: Path) -> None:
    wanted = twin("resized", program(), 256, slices_per_step=SLICES)
    held, mode = Held(), coordinator_pb2.ChangeConsistencyRequest(mode=types_pb2.MODE_ASYNC, staleness=2)
    with Rig(tmp_path, 0, **SMALL) as rig:
        rig.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        with pytest.raises(errors.ConfigError, match="a job has 1 to 4096 servers, not 0"):
            rig.ask("Coordinator.Scale", coordinator_pb2.ScaleRequest(servers=0))
        late = Wish(rig, 3, wait_s=3.0)
        until("the wish is known", lambda: rig.record().wanted_servers == 3)
        with pytest.raises(errors.ConfigError, match="the number of servers changes just now"):
            rig.ask("Coordinator.Scale", coordinator_pb2.ScaleRequest(servers=4))
        with pytest.raises(errors.UnavailableError, match="the number of servers changes just now"):
            rig.ask("Coordinator.SetConsistency", mode, "leader")
        late.join()
        assert isinstance(late.error, errors.DeadlineError)
        assert re.search(r"1 of 3 servers are missing \(server-2\).*start server --join leader", str(late.error))
        assert rig.record().wanted_servers == 2
        # In the middle of a step: no version is reached while the workers are held.
        stuck = Wish(rig, 1, wait_s=1.0)
        stuck.join()
        assert isinstance(stuck.error, errors.DeadlineError)
        held.released.set()
        summary = rig.finish()
    same(summary, wanted)


@pytest.mark.long
def test_the_mode_can_be_changed_afterwards(tmp_path: Path) -> None:
    epochs, held = 6, Between(1)
    with Rig(tmp_path, 0, mode="async", slices_per_step=1, training__chunk_bytes=64) as rig:
        rig.begin(LedgerProgram(CELLS, BATCH, epochs, each=held))
        resize(rig, held, (3,))
        rig.change_mode("sync")
        summary = rig.finish()
        exact(rig, summary, epochs)


@pytest.mark.long
def test_what_compression_leaves_out_is_not_lost(tmp_path: Path) -> None:
    held = Between(1)
    options: dict[str, Any] = {"training__push_compression": "int8", "training__residual_flush_every": 4, **SMALL}
    summaries = []
    for place, wishes in (("calm", ()), ("resized", (3,))):
        (tmp_path / place).mkdir()
        with Rig(tmp_path / place, 0, **options) as rig:
            rig.begin(program(held if wishes else None))
            if wishes:
                resize(rig, held, wishes)
            summaries.append(rig.finish())
    same(summaries[1], summaries[0])
