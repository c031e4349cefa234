"""Workers of one host pull each version once, and push one sum, whatever happens to the worker with the seat."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paramserver import errors
from paramserver.core.versions.host_sums import LEAST_PATIENCE_S
from paramserver.core.versions.reduction import Node
from paramserver.transport.shm.segments import Segment
from paramserver.v1.local_pb2 import Envelope
from paramserver.worker.context import Context
from paramserver.worker.gradients.contribution import Outcomes
from paramserver.worker.gradients.leaving import Leaving
from paramserver.worker.host import guest, tier
from paramserver.worker.host.guest import Guest
from paramserver.worker.host.keeper import Keeper
from paramserver.worker.host.reader import Reader
from paramserver.worker.host.sums import Sums
from paramserver.worker.host.tier import HostTier
from paramserver.worker.links.pushes import Pushes
from tests.support.cluster.harness import Cluster, Died, Outcome, Worker, train, until
from tests.support.cluster.programs import Program, adamw, dataset, model_of, network, plain
from tests.support.contract.movers import imagine

DATA = dataset(48)
SIZES: dict[str, Any] = {"workers": 3, "servers": 2, "slices_per_step": 3}
CHUNKS: dict[str, object] = {"training.chunk_bytes": 16384}


@pytest.fixture(autouse=True)
def _small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these models were large."""
    monkeypatch.setattr(tier, "LEAST_BYTES", 0)


def tier_of(ctx: Context) -> HostTier:
    found = ctx.engine.shards.links.host
    assert found is not None
    return found


def role_of(ctx: Context) -> Keeper | Guest | None:
    return tier_of(ctx)._role


def together(program: Program, each: Callable[[Context, int], object] = lambda ctx, slices: None) -> Program:
    """The workers take their first step when they have found each other."""

    def look(ctx: Context, slices: int) -> None:
        if slices == 0:
            until("this worker shares the pulls of its host", lambda: tier_of(ctx).shares)
        each(ctx, slices)

    return Program(
        program.data, program.batch_size, program.epochs, program.model, program.optimizer, program.schedule, each=look
    )


def hosted(
    program: Program,
    settings: dict[str, object] = CHUNKS,
    each: Callable[[Context, int], object] = lambda ctx, slices: None,
) -> Outcome:
    """The same job, whose workers share a host that is not the servers'."""
    with Cluster(**SIZES, transport="bulk", host_tier=True) as cluster:
        return cluster.train(together(program, each), settings)


def wide(**options: Any) -> nn.Module:
    """Several pages."""
    return network(hidden=1500, **options)


def of_second_layer(parameters: Any) -> torch.optim.Optimizer:
    return plain(list(parameters)[2:], lr=0.1)


CASES: dict[str, tuple[Program, dict[str, object]]] = {
    "adamw": (Program(DATA, 4, model=wide, optimizer=adamw), CHUNKS),
    "odd chunks": (Program(DATA, 4, model=wide), {"training.chunk_bytes": 832}),
    "buffers": (Program(DATA, 4, model=partial(network, norm=True)), {}),
    "frozen": (Program(DATA, 4, model=wide, optimizer=of_second_layer), CHUNKS),
    "bfloat16": (Program(dataset(48, torch.bfloat16), 4, model=partial(wide, dtype=torch.bfloat16)), CHUNKS),
}


MORE = ("odd chunks", "buffers", "bfloat16")


@pytest.mark.parametrize(
    "case",
    ["adamw", "frozen", *(pytest.param(one, marks=pytest.mark.long) for one in MORE)],
)
def test_same_bits(case: str) -> None:
    program, settings = CASES[case]
    assert hosted(program, settings).digests == train(program, **SIZES, settings=settings).digests


def test_servers_send_each_version_once() -> None:
    """Three workers would pull it three times. Before they have found each other, each has pulled two versions."""
    program = Program(DATA, 4, epochs=6, model=wide)
    with Cluster(**SIZES, transport="bulk", host_tier=True) as cluster:
        outcome = cluster.train(together(program), CHUNKS)
        sent = sum(stats.bytes_pulled for stats in cluster.stats())
    weights = 4 * sum(parameter.numel() for parameter in wide().parameters())
    steps = outcome.summary["steps"]
    assert steps == 24
    assert steps * weights <= sent <= (steps + 3 * 3) * weights * 1.05


@pytest.mark.parametrize(
    "sizes", [SIZES, pytest.param({**SIZES, "workers": 4, "slices_per_step": 8}, marks=pytest.mark.long)]
)
def test_servers_receive_one_sum_per_step(sizes: dict[str, Any]) -> None:
    """Three workers would push three contributions. The first steps are before the workers have found each other."""
    program = Program(DATA, 4, epochs=6, model=wide)
    with Cluster(**sizes, transport="bulk", host_tier=True) as cluster:
        outcome = cluster.train(together(program), CHUNKS)
        received = sum(stats.bytes_pushed for stats in cluster.stats())
    gradients = 4 * sum(parameter.numel() for parameter in wide().parameters())
    steps = outcome.summary["steps"]
    assert steps * gradients <= received <= (steps + 3 * 3) * gradients * 1.05
    assert outcome.digests == train(program, **sizes, settings=CHUNKS).digests


def test_the_weights_of_all_workers_lie_in_the_memory_of_one() -> None:
    seen: dict[int, list[bool]] = {}

    def look(ctx: Context, slices: int) -> None:
        in_place = ctx.engine.weights.in_place
        seen.setdefault(ctx.rank, []).append(in_place is not None and in_place.source is tier_of(ctx))

    hosted(Program(DATA, 4, model=wide, epochs=3), each=look)
    assert sorted(seen) == [0, 1, 2]
    assert all(all(at[1:]) for at in seen.values()), seen


def test_three_slots_are_enough_in_step() -> None:
    used: list[int] = []

    def look(ctx: Context, slices: int) -> None:
        role = role_of(ctx)
        if isinstance(role, Keeper):
            used.append(max(role._state.used, default=0))

    hosted(Program(DATA, 4, model=wide, epochs=5), each=look)
    assert max(used) == 2


@pytest.mark.parametrize("victim", [Keeper, pytest.param(Guest, marks=pytest.mark.long)])
def test_another_one_pulls_when_the_one_that_pulls_dies(victim: type) -> None:
    program = Program(DATA, 4, model=wide, epochs=4)
    dead: list[Worker] = []
    with Cluster(**SIZES, transport="bulk", host_tier=True, lease_s=2.0) as cluster:

        def look(ctx: Context, slices: int) -> None:
            worker = next(one for one in cluster.workers if one.context is ctx)
            if slices >= 3 and not dead and isinstance(role_of(ctx), victim):
                dead.append(worker)
                role = role_of(ctx)
                # The kernel would do this for a process.
                assert role is not None
                cluster.job.background.run(role.close())
                raise Died
            if dead and slices % 3 == 0:
                until("the workers that are left have found each other", lambda: tier_of(ctx).shares)

        outcome = cluster.train(together(program, look), CHUNKS)
    assert len(dead) == 1
    assert outcome.digests == train(program, **SIZES, settings=CHUNKS).digests


def test_no_memory_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(self: Segment, start: int, length: int) -> None:
        raise OSError("no space left on device")

    program = Program(DATA, 4, model=wide)
    wanted = train(program, **SIZES, settings=CHUNKS).digests
    monkeypatch.setattr(Segment, "reserve", reserve)
    assert hosted(program).digests == wanted


def test_a_pull_that_fails_is_made_by_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise errors.UnavailableError("this pull is not to succeed")

    program = Program(DATA, 4, model=wide)
    wanted = train(program, **SIZES, settings=CHUNKS).digests
    monkeypatch.setattr("paramserver.worker.links.pulls.Pulls.for_host", fail)
    assert hosted(program).digests == wanted


@pytest.mark.long
def test_a_change_of_the_mode() -> None:
    """In asynchronous mode each worker pulls what it needs; then they share again."""
    seen: set[tuple[bool, bool]] = set()
    changes: list[threading.Thread] = []
    with Cluster(**SIZES, transport="bulk", host_tier=True) as cluster:

        def each(ctx: Context, slices: int) -> None:
            weights = ctx.engine.weights
            seen.add((ctx.engine.modes.together, weights.in_place is not None))
            if ctx.rank == 0 and slices in (4, 12):
                mode = "async" if slices == 4 else "sync"
                changes.append(threading.Thread(target=cluster.set_consistency, args=(mode, 2)))
                changes[-1].start()

        outcome = cluster.train(together(Program(DATA, 4, model=wide, epochs=12), each), CHUNKS)
        for change in changes:
            change.join(20.0)
    assert outcome.summary["contributions_applied"] == 12 * 12
    assert seen >= {(True, True), (False, False)}
    assert (False, True) not in seen


def test_a_write_that_would_be_lost_is_an_error() -> None:
    def each(ctx: Context, slices: int) -> None:
        if slices == 2:
            with torch.no_grad():
                next(model_of(ctx).parameters()).add_(1.0)

    with pytest.raises(errors.UserError, match=r"the script has changed the parameter '0\.weight' itself"):
        hosted(Program(DATA, 4, model=wide), each=each)


@pytest.mark.long
def test_models_on_a_device_get_copies_of_the_weights_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(DATA, 4, model=wide, optimizer=adamw)
    wanted = train(program, **SIZES, settings=CHUNKS).digests
    taken: list[int] = []

    async def take(self: HostTier, version: int) -> object:
        found = await original(self, version)
        if found is not None:
            taken.append(found[0])
        return found

    original = HostTier.take
    monkeypatch.setattr(HostTier, "take", take)
    movers = imagine(monkeypatch)
    assert hosted(program).digests == wanted
    assert len(movers) == 3
    assert [mover.mistakes for mover in movers] == [[]] * 3
    assert len(taken) >= 3 * 5


# ---- sums

PROGRAM = Program(DATA, 4, model=wide, epochs=3)
MOMENTS = ("a sum is made", "one server has the sum", "all servers have the sum", "the others know")


@pytest.mark.parametrize(
    "when", [MOMENTS[1], *(pytest.param(one, marks=pytest.mark.long) for one in MOMENTS if one != MOMENTS[1])]
)
def test_the_worker_that_pushes_is_gone_when(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others push what they have, also what was counted: a server that dies may have been the only one to know."""
    wanted = train(PROGRAM, **SIZES, settings=CHUNKS).digests
    gone: list[Keeper] = []
    pushed_again: list[str] = []
    with Cluster(**SIZES, transport="bulk", host_tier=True) as cluster:
        send, again = Sums._send, HostTier._by_itself

        def tiers() -> list[HostTier]:
            return [tier_of(worker.context) for worker in cluster.workers if worker.context is not None]

        async def goes() -> None:
            (seat,) = [one for one in tiers() if isinstance(one._role, Keeper)]
            keeper = seat._role
            assert isinstance(keeper, Keeper)
            gone.append(keeper)
            while when == MOMENTS[3] and not all(one._pushed for one in tiers() if one is not seat):
                await asyncio.sleep(0.001)
            await keeper.close()  # the kernel would do this for a process
            seat._change(None)

        async def one_server(leaving: Leaving) -> frozenset[Any]:
            context = cluster.workers[0].context
            assert context is not None
            await context.engine.shards.links.pushes._push_one(0, leaving)
            raise errors.UnavailableError("the worker that pushes is gone")

        async def breaks_off(self: Sums, step: int, node: Node) -> None:
            if step < 4 or gone:
                await send(self, step, node)
                return
            if when == MOMENTS[1]:
                self._push = one_server
            if when != MOMENTS[0]:
                if when == MOMENTS[2]:
                    self._closed = True  # it answers nobody any more
                await send(self, step, node)
                self._closed = False
            asyncio.ensure_future(goes())  # noqa: RUF006

        async def by_itself(self: HostTier, leaving: Leaving) -> None:
            pushed_again.append(str(leaving.facts.name))
            await again(self, leaving)

        monkeypatch.setattr(Sums, "_send", breaks_off)
        monkeypatch.setattr(HostTier, "_by_itself", by_itself)
        assert cluster.train(together(PROGRAM), CHUNKS).digests == wanted
    assert len(gone) == 1
    assert when != MOMENTS[3] or len(pushed_again) >= 2


def test_a_sum_that_servers_do_not_take_is_pushed_in_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = train(PROGRAM, **SIZES, settings=CHUNKS).digests
    original, refused = Pushes.by_itself, []

    async def refuses(self: Pushes, leaving: Leaving) -> Outcomes:
        if leaving.facts.slot is None:
            refused.append(leaving.facts.name)
            raise errors.UnavailableError("no sum is taken")
        return await original(self, leaving)

    monkeypatch.setattr(Pushes, "by_itself", refuses)
    assert hosted(PROGRAM).digests == wanted
    assert len(refused) >= 8


def test_a_worker_with_the_seat_that_says_nothing_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = train(PROGRAM, **SIZES, settings=CHUNKS).digests
    heard, original = [], Reader.heard

    def deaf(self: Reader, envelope: Envelope) -> None:
        if envelope.method in (guest.OFFER, guest.SHARE) and not envelope.cancel:
            heard.append(envelope.method)
        else:
            original(self, envelope)

    monkeypatch.setattr(Reader, "heard", deaf)
    monkeypatch.setattr(guest, "SILENT_S", 0.3)
    monkeypatch.setattr(guest, "_LOOK_S", 0.1)
    assert hosted(PROGRAM).digests == wanted
    assert 2 <= heard.count(guest.OFFER) <= 4, "each of the two others asks once, and pauses"


def test_a_worker_that_is_late_is_not_waited_for() -> None:
    late: list[int] = []

    def look(ctx: Context, slices: int) -> None:
        if ctx.rank == 1 and slices in (2, 3):
            time.sleep(2 * LEAST_PATIENCE_S)
        role = role_of(ctx)
        if isinstance(role, Keeper):
            late.append(sum(worker.late for worker in role.sums._state._workers.values()))

    assert hosted(PROGRAM, each=look).digests == train(PROGRAM, **SIZES, settings=CHUNKS).digests
    assert max(late) >= 1
