"""A shard moves to another server on the same timeline: workers go on there, with the same bits and counts."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from paramserver.errors import StaleViewError
from paramserver.transport.base import Channel
from paramserver.transport.shm.segments import Foreign
from paramserver.worker.context import Context
from paramserver.worker.gradients import early
from paramserver.worker.links import ShardLinks, exchange
from paramserver.worker.memory.shared import SharedMemory
from paramserver.worker.weights import rest
from paramserver.worker.weights.incoming import IncomingWeights
from paramserver.worker.weights.rest import Rest
from tests.support.cluster import small_job
from tests.support.cluster.early import OPTIONS, clip, script
from tests.support.cluster.harness import Cluster, Outcome, at_once, recorded, train, until
from tests.support.cluster.programs import LedgerProgram, Program, adamw, dataset, model_of, network
from tests.support.cluster.small_job import SLICES, calm
from tests.support.failover.ledger import BATCH, CELLS, PER_EPOCH, counted_once
from tests.support.failover.moving import Moving, computed_once, pushed_again
from tests.support.marks import long_but

PAGES = {"training__chunk_bytes": 16384}
# A worker that waits for what never comes ends the test with a sentence.
WAIT_S = 8.0


def with_losses(
    program: Program,
    losses: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    settings: Any = None,
    **options: Any,
) -> tuple[Outcome, Moving]:
    """Train while servers die with what they have counted of these steps: (shard, step)."""
    options = {"workers": 3, "servers": 2, "slices_per_step": SLICES, "wait_timeout_s": WAIT_S, **options}
    with Cluster(**options) as cluster, monkeypatch.context() as patch:
        moving = Moving(cluster, patch)
        for shard, step in losses:
            moving.lose(shard, step)
        for _ in range(options["workers"]):
            cluster.start(program, settings)
        for shard, step in losses:
            moving.loss(shard, step, options["workers"])
        cluster.join()
        outcome = cluster.outcome()
    assert moving.lost_steps() == {*losses}
    return outcome, moving


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_contributions_that_die_with_a_server_are_brought_again(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, moving = with_losses(small_job.program(), [(0, 2), (1, 5)], monkeypatch, transport=transport)
    calm(outcome)
    # On one host, the call that pushes and pulls breaks; then the contribution is pushed as another one of its name.
    assert pushed_again(moving) if transport == "grpc" else computed_once(moving)


def test_contributions_of_the_thread_that_trains_are_brought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MOST_S", 0.0)
    program = Program(dataset(48), 8, model=lambda: network(hidden=1500))
    quiet = train(program, workers=2, servers=2, settings=PAGES).digests
    options = {"workers": 2, "slices_per_step": 2, "transport": "shm", "settings": PAGES}
    outcome, moving = with_losses(program, [(0, 1), (1, 3)], monkeypatch, **options)
    assert outcome.digests == quiet
    assert pushed_again(moving)


def test_compressed_contributions_are_brought_again_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"training__push_compression": "int8", "training__chunk_bytes": 832}
    quiet = train(script(), 2, 2, settings, slices_per_step=SLICES).digests
    outcome, moving = with_losses(script(), [(0, 1), (1, 2)], monkeypatch, settings, workers=2)
    assert outcome.digests == quiet
    assert pushed_again(moving)


def test_contributions_that_left_early_are_brought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "LEAST_BYTES", 0)
    options = {**OPTIONS, "slices_per_step": 2}
    quiet = train(script(), **options).digests
    outcome, moving = with_losses(script(), [(0, 3), (1, 4)], monkeypatch, **options)
    assert outcome.digests == quiet
    assert pushed_again(moving)


@pytest.mark.parametrize("transport", ["grpc", "shm"])
@pytest.mark.parametrize("hidden", [37, 1500])
def test_moves_at_any_moment(hidden: int, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former server's contributions are there: what is brought again is a duplicate."""

    def each(ctx: Context, slices: int) -> None:
        if slices % 2:
            moving.move((ctx.rank + slices // 2) % 2)

    program = Program(dataset(107), 8, 2, lambda: network(norm=True, hidden=hidden), adamw)
    settings = PAGES if hidden == 1500 else {}
    quiet = train(program, 3, 2, settings, slices_per_step=SLICES).digests
    program.each = each
    with Cluster(3, 2, slices_per_step=SLICES, transport=transport, wait_timeout_s=WAIT_S) as cluster:
        moving = Moving(cluster, monkeypatch)
        outcome = cluster.train(program, settings)
        kinds = {worker.context.engine.shards.links.near.kind for worker in cluster.workers if worker.context}
    assert moving.moves.total() >= 6
    assert outcome.digests == quiet
    assert outcome.summary["contributions_applied"] == 28
    assert kinds <= ({"shm", "shm+memory"} if transport == "shm" else {"memory"})


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_asynchronous_slices_count_once(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def each(ctx: Context, slices: int) -> None:
        if slices % 3 == 1:
            moving.move((ctx.rank + slices // 3) % 2)

    epochs = 2
    with recorded() as log, Cluster(3, 2, "async", transport=transport, wait_timeout_s=WAIT_S) as cluster:
        moving = Moving(cluster, monkeypatch)
        outcome = cluster.train(LedgerProgram(CELLS, BATCH, epochs, each), {"training__chunk_bytes": 64})
    assert moving.moves.total() >= 6
    counted_once(log, epochs)
    assert outcome.summary["contributions_applied"] == PER_EPOCH * epochs


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_a_worker_that_is_idle_says_so_to_the_next_server(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may believe that the worker is at work, and would have all others wait for it."""
    holder: list[int] = []
    with Cluster(2, 1, "async", 0, transport=transport, wait_timeout_s=WAIT_S) as cluster:
        moving = Moving(cluster, monkeypatch)

        def others() -> list[int]:
            workers = cluster.job.coordinator.job.worker_infos()
            return [worker.member for worker in workers if worker.member not in holder]

        def alone() -> bool:
            return {*others()} == {*moving.idle} and [*moving.running(0).state.pulls.clocks] == holder

        def each(ctx: Context, slices: int) -> None:
            if not holder:  # it has the only slice
                holder.append(ctx.engine.member.session.member)
                until("the other worker is idle", alone)
                moving.move(0, others())

        outcome = cluster.train(LedgerProgram(2, 2, 1, each))
        assert len(moving.idle) >= 2
    assert outcome.summary["contributions_applied"] == 1


def test_clients_and_readers_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that becomes a worker after it has looked on."""
    with Cluster(1, 2, wait_timeout_s=WAIT_S) as cluster:
        moving = Moving(cluster, monkeypatch)
        client = cluster.client(0)
        client.init({"w": np.zeros(64, np.float32)})
        reader = cluster.reader()
        total = 0.0
        for shard in (0, 1, 0):
            assert reader.pull()["w"].tolist() == [total] * 64
            moving.move(shard)
            client.push({"w": np.ones(64, np.float32)})
            total += 1.0
        assert reader.pull()["w"].tolist() == [total] * 64
        client.close()
        reader.push({"w": np.ones(64, np.float32)})
        moving.move(1)
        assert reader.pull()["w"].tolist() == [total + 1] * 64
        reader.push({"w": np.ones(64, np.float32)})
        reader.close()


def test_contributions_without_a_data_set_are_brought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else could compute them. The accounts of the job hold."""
    with Cluster(2, 1, wait_timeout_s=WAIT_S) as cluster:
        moving = Moving(cluster, monkeypatch)
        clients = [cluster.client(index) for index in range(2)]
        at_once(cluster, *(partial(client.init, {"w": np.zeros(8, np.float32)}) for client in clients))
        moving.lose(0, 1)
        for step in range(3):
            pushes = [partial(client.push, {"w": np.ones(8, np.float32)}) for client in clients]
            loss = [partial(moving.loss, 0, 1, 2)] if step == 1 else []
            assert at_once(cluster, *pushes, *loss)[:2] == [step + 1] * 2
        assert clients[0].pull()["w"].tolist() == [6.0] * 8
        for client in clients:
            client.close()
        assert cluster.outcome().summary["contributions_applied"] == 6
    assert len(moving.lost) == 2
    assert pushed_again(moving)


@pytest.mark.parametrize("where", long_but({"there and back"}, ["on this host", "elsewhere", "there and back"]))
def test_weights_that_lie_in_memory_of_servers_that_are_gone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With frozen weights, buffers, and writes of the script, which the worker looks up in the weights at hand."""
    attach = SharedMemory.attach

    async def refusing(self: SharedMemory, shard: int, channel: Channel, *about: Any) -> str:
        moves = moving.moves[shard]
        if moves and (where == "elsewhere" or (where == "there and back" and moves % 2)):
            return "it is on another host"
        return await attach(self, shard, channel, *about)

    def each(ctx: Context, slices: int) -> None:
        for parameter in model_of(ctx).parameters():
            with torch.no_grad():  # what is put back is no change
                mine = parameter.detach().clone()
                parameter.data.zero_()
                parameter.data.copy_(mine)
        if moves and slices in (1, 2, 4):
            moving.move((ctx.rank + slices) % 2)
        near = ctx.engine.shards.links.near
        if slices == 0:
            first.extend(weakref.ref(found.weights) for shard in (0, 1) if (found := near.attached(shard)))
        if slices == 10:
            gc.collect()
            left.append(sum(weights() is not None for weights in first))

    def second_layer(parameters: Any) -> torch.optim.Optimizer:
        return adamw([*parameters][2:])

    program = Program(dataset(48), 8, 4, lambda: network(hidden=1500, norm=True), second_layer, each=each)
    first: list[weakref.ref[Foreign]] = []
    left: list[int] = []
    moves = False
    quiet = train(program, 2, 2, PAGES).digests
    moves = True
    monkeypatch.setattr(SharedMemory, "attach", refusing)
    with Cluster(2, 2, transport="shm", wait_timeout_s=WAIT_S) as cluster:
        moving = Moving(cluster, monkeypatch)
        outcome = cluster.train(program, PAGES)
        kinds = {worker.context.engine.shards.links.near.kind for worker in cluster.workers if worker.context}
    assert min(moving.moves.values()) >= 2
    assert outcome.digests == quiet
    assert left[2:] == [0, 0] if where != "elsewhere" else True, "memory of servers that are gone is let go"
    assert kinds == {"on this host": {"shm"}, "elsewhere": {"memory"}}.get(where, kinds)


def test_memory_of_a_contribution_is_not_used_again_before_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has two contributions in a step, whose bytes are those of its memory: int8 leaves float64 alone."""
    program = Program(dataset(64, torch.float64), 8, 1, lambda: network(dtype=torch.float64), adamw)
    settings = {"training__push_compression": "int8"}
    options = {"workers": 1, "servers": 1, "slices_per_step": 2}
    quiet = train(program, settings=settings, **options).digests
    outcome, moving = with_losses(program, [(0, 1), (0, 2)], monkeypatch, settings, **options)
    assert len(moving.lost) == 4
    assert outcome.digests == quiet
    assert pushed_again(moving)


def test_a_shard_moves_while_a_worker_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has attached to the former server, and not to the others yet."""
    attach, move = SharedMemory.attach, ShardLinks.move
    moved: list[int] = []

    async def attached(self: SharedMemory, shard: int, *about: Any) -> str:
        refusal = await attach(self, shard, *about)
        if shard == 0 and not moving.moves:
            await asyncio.to_thread(moving.move, 0)
            async with asyncio.timeout(WAIT_S):
                while not moved:
                    await asyncio.sleep(0.001)
        return refusal

    async def follows(self: ShardLinks, shard: int, *about: Any) -> None:
        await move(self, shard, *about)
        moved.append(shard)

    program = Program(dataset(48), 8, 1, lambda: network(hidden=1500, norm=True), adamw)
    quiet = train(program, 1, 2, PAGES).digests
    monkeypatch.setattr(SharedMemory, "attach", attached)
    monkeypatch.setattr(ShardLinks, "move", follows)
    with Cluster(1, 2, transport="shm", wait_timeout_s=WAIT_S) as cluster:
        moving = Moving(cluster, monkeypatch)
        outcome = cluster.train(program, PAGES)
        kinds = {worker.context.engine.shards.links.near.kind for worker in cluster.workers if worker.context}
    assert outcome.digests == quiet
    assert kinds == {"shm"}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_weights_on_their_way_come_from_the_next_server(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script computes with the first of them. In synchronous mode nothing is computed again."""
    monkeypatch.setattr(rest, "LEAST_BYTES", 0)
    monkeypatch.setattr("paramserver.server.versions.version._FRAME_BYTES", 1)
    came, settle = Rest.came, IncomingWeights.settle
    begun: list[Rest] = []
    broken: list[int] = []
    in_vain: list[Exception] = []

    def cut(self: Rest, chunk: int, data: memoryview) -> None:
        came(self, chunk, data)
        if self not in begun:
            begun.append(self)
            if len(begun) % 3 == 0:
                moving.kill(0)
                broken.append(len(self.left))
                threading.Thread(target=moving.announce, args=(0,)).start()

    def settled(self: IncomingWeights) -> None:
        try:
            settle(self)
        except StaleViewError as error:
            in_vain.append(error)
            raise

    options: dict[str, Any] = {"workers": 2, "servers": 1, "mode": mode}
    quiet = train(script(clip), settings=OPTIONS["settings"], **options).digests
    monkeypatch.setattr(Rest, "came", cut)
    monkeypatch.setattr(IncomingWeights, "settle", settled)
    with Cluster(**options, wait_timeout_s=WAIT_S) as cluster:
        moving = Moving(cluster, monkeypatch)
        outcome = cluster.train(script(clip), OPTIONS["settings"])
    assert moving.moves[0] >= 3
    assert min(broken) > 4, "more than what is on its way at the moment"
    if mode == "sync":
        assert outcome.digests == quiet
        assert not in_vain
    assert outcome.summary["contributions_applied"] == 12
