"""What servers and the cores keep of what peers send has a limit; `test_bounded.py` has the table of all maps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paramserver import errors
from paramserver.core.collectives import rounds
from paramserver.core.collectives.rounds import RoundName, Rounds, RoundsError, Terms
from paramserver.core.shards import pulls
from paramserver.core.shards.pulls import Pulls
from paramserver.core.versions import audits
from paramserver.core.versions.audits import Comparison, Told
from paramserver.core.versions.counted import of_one
from paramserver.core.versions.events import AtLeast, PullAsked
from paramserver.core.versions.names import AsyncName
from paramserver.core.work import leases, stealing
from paramserver.core.work.leases import SliceLeases
from paramserver.core.work.stealing import Ask, Assignment, Stealing
from paramserver.server import times
from paramserver.server.collectives import collecting
from paramserver.server.collectives.collecting import Collecting
from paramserver.server.saving.brought import BroughtState
from paramserver.server.times import Times
from paramserver.server.versions import repetitions
from paramserver.server.versions.repetitions import Repetitions
from paramserver.transport.base import Caller, set_caller
from paramserver.transport.bulk import server as bulk
from paramserver.v1 import shard_pb2

# ---- audits, slices


def test_audited_slices_are_kept_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "_DIGESTS", 1000)
    monkeypatch.setattr(audits, "_PAIRS", 5)
    one = Comparison()
    for number in range(100):
        for worker in range(3):
            one.hear(1, number, 0, Told(f"worker-{number}-{worker}", (bytes([worker]),) * 50))
    assert sum(1 + len(told.digests) for kept in one._open.values() for told in kept) <= 1000
    assert len(one.unlike) == 5
    assert (one.compared, one.differ) == (100, 200)
    assert one.first is not None
    assert one.first.step == 0


def test_a_worker_holds_so_many_slices_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MOST_HELD", 100)
    table = SliceLeases(4)
    held: list[AsyncName] = []
    while granted := table.lease(1, 1 << 40, 1024, 1):
        held += granted
        table.reconcile(1, held)
    assert len(held) == leases.MOST_HELD
    assert table.lease(2, 1 << 40, 10, 1), "others go on"
    assert not table.is_done(AsyncName(1 << 40, 0))
    table.complete([AsyncName(1 << 40 | number, 1) for number in range(1000)])
    assert max(len(table._done), len(table._fresh)) < 2 * leases.MOST_HELD
    again = SliceLeases.restored(10**6, 0, of_one(0, [(0, 1), (900_000, 900_001)]))
    again.reconcile(1, [AsyncName(0, index) for index in range(1, 100_000, 5)])
    assert len(again._held_by[1]) == leases.MOST_HELD


def test_workers_that_ask_for_slices_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stealing, "_WORKERS", 10)
    monkeypatch.setattr(stealing, "_ATTEMPTS", 300)
    one = Stealing()
    one.begin(0, 0.0)
    for worker in range(1, 100):
        one.ask(Ask(Assignment(worker, 0, 4, 1.0), 0, 1000, frozenset(range(100))), [(0, 1000)], 0.0)
    assert len(one._open.asked) <= 10
    assert sum(map(len, one._open.attempts.values())) == one._open.noted <= 400
    one.keep([1])
    assert sum(map(len, one._open.attempts.values())) == one._open.noted


# ---- servers


def test_workers_at_the_bound_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "_WAITING", 10)
    one = Times(1)
    for worker in range(100):
        one.waits(worker, 5)
    assert list(one._bound) == list(range(90, 100))


def test_pulls_that_are_gone_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No version comes meanwhile, so nothing else cleans up."""
    monkeypatch.setattr(pulls, "_GONE", 10)
    one = Pulls([1])
    for call in range(1000):
        one.ask(PullAsked(call, 1, AtLeast(99), 1), gated=False)
        one.gone(call)
    assert len(one._for_version) <= 12


def test_names_of_counted_pushes_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetitions, "_REMEMBERED", 10)
    one = Repetitions()
    for number in range(100):
        one.pushed(number, AsyncName(0, number), 5)
        one.answered(number, None)
        one.note(AsyncName(0, number), 5)
    assert len(one._counted) == 10
    assert not one._pushing


def test_pieces_of_a_state_are_no_more_than_the_state() -> None:
    """Pieces of the state of a whole tensor may begin anywhere, and could lie one over the other."""
    rule = SimpleNamespace(whole=True, scalars=(), arrays=("m",), array_elements=lambda key, shape: 4)
    one: Any = object.__new__(BroughtState)
    one._trusted, one._pieces, one._owned = True, {(0, 0): (None, "float32")}, frozenset({0})
    one._seen, one._entries, one._taken = set(), {}, {}
    one._tensors = SimpleNamespace(
        layout=SimpleNamespace(tensors=[SimpleNamespace(name="w", shape=(4,), group=0)]),
        optimizers=SimpleNamespace(rule=lambda group: rule),
    )
    for start in (0, 1):
        ref = shard_pb2.StateRef(tensor=0, key="m", start=start, bytes=8, dtype="float32")
        one.take(ref, memoryview(bytes(8)))
    ref = shard_pb2.StateRef(tensor=0, key="m", start=2, bytes=4, dtype="float32")
    with pytest.raises(errors.ProtocolError, match="the state 'm' of tensor 0 has more than its 4 elements"):
        one.take(ref, memoryview(bytes(4)))


def test_bulk_tokens_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_TOKENS", 10)
    one: Any = object.__new__(bulk.BulkServer)
    one._tickets, one.connections, one.port, one._limits = {}, 0, 1, SimpleNamespace(connections=100)

    async def work() -> None:
        set_caller(Caller(frozenset({"worker"}), False))
        for _ in range(10):
            one.offer()
        with pytest.raises(errors.OverloadedError, match="too many bulk connections"):
            one.offer()

    asyncio.run(work())


# ---- rounds of process groups


def terms(ranks: int = 2, nbytes: int = 4) -> Terms:
    return Terms("all_gather", range(ranks), 0, "uint8", nbytes)


def test_groups_and_their_numbers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MAX_GROUPS", 5)
    monkeypatch.setattr(rounds, "MAX_NUMBERS", 20)
    one = Rounds(1e9)
    for number in range(50):
        one.open(f"g{number}", 2, float(number))
    assert list(one._groups) == [f"g{number}" for number in range(45, 50)], "those that were used last"
    for number in range(20):
        one.come(RoundName("g49", f"c{number}", 5, 0), terms(), 0, False, 50.0)
    with pytest.raises(RoundsError, match="has 20 numbers of ranks and channels, and no more fit"):
        one.come(RoundName("g49", "c20", 5, 0), terms(), 0, False, 50.0)
    group = one._groups["g49"]
    assert sum(map(len, group.done.values())) == 20
    one.drop(list(one._rounds))
    assert not group.names
    for number in range(100):
        one.come(RoundName("g49", f"d{number}", 0, 0), terms(), 0, False, 50.0)
    assert len(group.done) == 20, "a channel of which no number is known costs nothing"
    for rank in range(2, 1000):
        assert one.leave("g49", rank) == []
    assert not group.left, "ranks that the group does not have"


class _Process:
    job = failure = ""

    def check_job(self, job: str) -> None:
        pass

    def at_the_end(self, end: Callable[[], None]) -> None:
        pass


def contribution(rank: int, number: int = 0, data: bytes = b"d" * 1000, **given: Any) -> shard_pb2.CollectRequest:
    fields: dict[str, Any] = {"group": "g", "size": 2, "what": "all_gather", "dtype": "uint8", "takes": True}
    fields |= {"rank": rank, "number": number, "data": data, "bytes": len(data), "wait_s": 60.0, "opens": True}
    return shard_pb2.CollectRequest(**(fields | given))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds for which nobody waits go at once when there is no room."""
    monkeypatch.setattr(collecting, "_LEFT_WITHOUT_ROOM_S", -1.0)


async def brought(one: Collecting, request: shard_pb2.CollectRequest) -> list[Any]:
    return [frame async for frame in one.collect(request)]


async def left_behind(one: Collecting, request: shard_pb2.CollectRequest) -> None:
    """A call that is given up before the round is complete."""
    with suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            await brought(one, request)


@pytest.mark.usefixtures("at_once")
def test_rounds_for_which_nobody_waits_make_room() -> None:
    """Before, 60 calls of 15 MiB stayed in memory for a day."""

    async def work() -> None:
        one = Collecting(cast(Any, _Process()))
        one.most_bytes = 50_000
        for number in range(100):
            await left_behind(one, contribution(0, number))
            held = sum(len(given) for found in one._open.values() for given in found.given.values())
            assert held <= one.nbytes <= 50_000
        both = await asyncio.gather(brought(one, contribution(0, 200)), brought(one, contribution(1, 200)))
        assert [len(frames) for frames in both] == [2, 2]

    asyncio.run(work())


def test_rounds_for_which_nobody_waits_go_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "_SWEEP_S", 0.01)
    monkeypatch.setattr(collecting, "_LEFT_S", 0.05)

    async def work() -> None:
        one = Collecting(cast(Any, _Process()))
        waits = asyncio.create_task(brought(one, contribution(1, 500)))
        await asyncio.gather(*(left_behind(one, contribution(0, number)) for number in range(20)))
        await left_behind(one, contribution(0, 30, timeline=1, mine=[1]))
        deadline = asyncio.get_running_loop().time() + 10.0
        while len(one._open) > 2:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0)
        kept = [(name.number, found.slices) for name, found in one._open.items()]
        assert sorted(kept) == [(30, True), (500, False)], "a rank waits for one, and the other is of slices"
        await brought(one, contribution(0, 500))
        await waits
        one._end()

    asyncio.run(work())


def test_when_there_is_no_room_the_oldest_round_gets_on_and_the_others_follow() -> None:
    async def work() -> None:
        one = Collecting(cast(Any, _Process()))
        one.most_bytes = 10_000
        first = [asyncio.create_task(brought(one, contribution(0, number))) for number in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(errors.OverloadedError, match="10000 are the most: wait until some are complete"):
            await brought(one, contribution(1, 2))
        with pytest.raises(errors.OverloadedError):
            await brought(one, contribution(1, 1))
        await brought(one, contribution(1, 0))
        await first[0]
        one._perform(one._rounds.drop([name for name in one._open if name.number == 0]))
        await brought(one, contribution(1, 1))
        await first[1]

    asyncio.run(work())


def test_many_ranks_in_a_small_message_cost_nothing() -> None:
    one = Collecting(cast(Any, _Process()))
    many = contribution(0, size=60_000, wait_s=0.0)
    assert collecting._ranks(many) == range(60_000)
    assert collecting._ranks(contribution(0, ranks=[0, 1])) == range(2)
    assert collecting._ranks(contribution(0, ranks=[0])) == (0,)

    async def work() -> None:
        with pytest.raises(errors.ProtocolError, match="a contribution has at most 4194304 bytes"):
            await brought(one, contribution(0, data=b"d" * (collecting.MAX_BYTES + 1)))
        with pytest.raises(errors.DeadlineError):
            await brought(one, many)

    asyncio.run(work())
