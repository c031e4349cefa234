"""Workers of one host pull each version once, whatever happens to the one that pulls: same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paramserver import errors
from paramserver.transport.shm.segments import Segment
from paramserver.worker.context import Context
from paramserver.worker.host import tier
from paramserver.worker.host.guest import Guest
from paramserver.worker.host.keeper import Keeper
from paramserver.worker.host.tier import HostTier
from tests.support.cluster.harness import Cluster, Died, Outcome, Worker, train, until
from tests.support.cluster.programs import Program, adamw, dataset, model_of, network, plain
from tests.support.contract.movers import LateMover

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
    movers: list[LateMover] = []
    taken: list[int] = []

    def imagined(_: object) -> LateMover:
        movers.append(LateMover())
        return movers[-1]

    async def take(self: HostTier, version: int) -> object:
        found = await original(self, version)
        if found is not None:
            taken.append(found[0])
        return found

    original = HostTier.take
    monkeypatch.setattr(HostTier, "take", take)
    monkeypatch.setattr("paramserver.worker.memory.places.mover_for", imagined)
    assert hosted(program).digests == wanted
    assert len(movers) == 3
    assert [mover.mistakes for mover in movers] == [[]] * 3
    assert len(taken) >= 3 * 5
