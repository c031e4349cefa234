"""Every map and list that others can fill: the table that says what bounds each of them, and a test that fills it.

`tests/support/unit/maps.py` has the table. Who adds a map adds a line there, and a test if peers choose its keys.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paramserver import errors
from paramserver.coordinator import endpoint
from paramserver.coordinator.endpoint import Endpoint, Knock
from paramserver.coordinator.history import best, overdue
from paramserver.coordinator.history.overdue import Overdue
from paramserver.coordinator.model import ModelRegistry
from paramserver.coordinator.promises import Promises
from paramserver.coordinator.watching import blame, poison, tracing
from paramserver.coordinator.watching.blame import BlameWatch
from paramserver.coordinator.work import agreeing, evaluating, registered
from paramserver.coordinator.work.agreeing import Agreeing
from paramserver.coordinator.work.evaluating import Evaluating
from paramserver.coordinator.work.registered import Registered
from paramserver.core.blame import judge
from paramserver.core.blame.facts import Held, Made
from paramserver.core.blame.judge import Judge
from paramserver.core.job.membership import Member, Role
from paramserver.core.procedures import checkpointing
from paramserver.core.procedures.checkpointing import Checkpointing, Copy, Part, Reported
from paramserver.core.records import steps
from paramserver.core.records.history import NAMES as CURVES
from paramserver.core.records.history import History
from paramserver.core.records.steps import Collector, Logged, StepValues
from paramserver.core.work import poison as deaths
from paramserver.core.work.poison import Place, Poison
from paramserver.resume import resuming
from paramserver.transport.base import Caller, set_caller
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from tests.support.unit.maps import FILLED, OTHERS, found_maps, reasons

ROOT = Path(__file__).parents[2]
WORKER = Member(7, Role.WORKER, 0, "worker-0", 0.0)


def test_every_map_has_a_line_in_the_table() -> None:
    known = [*FILLED, *(name for names in OTHERS.values() for name in names.split())]
    assert [name for name, times_ in Counter(known).items() if times_ > 1] == []
    assert sorted(found_maps()) == sorted(known), (
        "a map is new, or gone: say in tests/support/unit/maps.py what bounds it"
    )
    assert set(OTHERS) == set(reasons())


def test_every_map_that_peers_fill_has_a_test_that_fills_it() -> None:
    for name, test in FILLED.items():
        path, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / path).read_text(), f"{name}: {test} does not exist"


# ---- the coordinator


def test_fake_joins_do_not_keep_servers_from_being_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the first 10,000 of them were kept for ever, and no other server was heard of."""
    one = Endpoint("job")

    def ask(**given: Any) -> None:
        with pytest.raises(errors.NotLeaderError):
            asyncio.run(cast(Any, one).join(coordinator_pb2.JoinRequest(role=types_pb2.ROLE_SERVER, **given)))

    for number in range(3 * endpoint._MAX_KNOCKS):
        one._note(1 + number, Knock(f"fake:{number}", "layout", 9, 0.0))
    ask(address="a:1", holds="layout", incarnation=5_000_000)
    ask(address="a" * 5000, holds="layout", incarnation=5_000_001)
    assert [knock.address for knock in one.holders()] == ["a:1"]
    assert len(one._knocks) <= endpoint._MAX_KNOCKS


def test_a_worker_that_joins_as_a_server_is_no_server() -> None:
    async def work(*roles: str) -> list[str]:
        one = Endpoint("job")
        set_caller(Caller(frozenset(roles), False))
        with suppress(errors.NotLeaderError):
            request = coordinator_pb2.JoinRequest(
                role=types_pb2.ROLE_SERVER, address="a:1", holds="layout", incarnation=5
            )
            await cast(Any, one).join(request)
        return [knock.address for knock in one.holders()]

    assert asyncio.run(work("worker")) == []
    assert asyncio.run(work("server", "worker")) == ["a:1"]


def test_servers_of_other_jobs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "MAX_MEMBERS", 10)
    one: Any = object.__new__(resuming.Resuming)
    one._others, one._job, one.floor = set(), "job", 0
    one._connect = None
    turn = 0

    async def find(*_: Any) -> Any:
        return SimpleNamespace(
            term=0, newer_than=lambda _: False, answered={f"{turn}:{i}" for i in range(5)}, ours=set()
        )

    monkeypatch.setattr(resuming, "find", find)
    one._endpoint = SimpleNamespace(holders=lambda: [Knock(f"{turn}:{i}", "x", 0, 0.0) for i in range(5)])
    while turn < 20:
        turn += 1
        asyncio.run(one.newest(SimpleNamespace(found=None)))
        assert len(one._others) <= 20


class _Blame:
    timeline = 1
    stalls = SimpleNamespace(members=frozenset())
    main = SimpleNamespace(places=lambda: [])
    members = SimpleNamespace(get=lambda ident: None, of=lambda role: [])


def test_waits_that_servers_make_up_are_kept_for_some_pairs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blame, "_PAIRS", 20)
    monkeypatch.setattr(blame, "_WAITS", 20)
    watch = BlameWatch(cast(Any, _Blame()))
    server = Member(1, Role.SERVER, 0, "server-0", 0.0)
    for number in range(100):
        held = [shard_pb2.Hold(worker=number, by=number + 1, clock=number, seconds=1.0 + number)]
        watch.hear(server, coordinator_pb2.SessionRequest(shards=[shard_pb2.StatsResponse(held=held)]))
    assert len(watch._held) <= 20
    assert len(watch._counted) <= 20
    assert watch.page().held[0].seconds == 100.0, "the longest ones stay"


def test_steps_that_servers_make_up_are_judged_or_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_WAITING", 20)
    one = Judge()
    for number in range(100):
        one.made(Made(number, 0, "server-0", 0.1, 0.2, 0.3, worker=1), 0.0)
        one.held(Held(1, 2, 10 + number, 0.5), 0.0)
    assert len(one._pending) <= 20
    assert len(one._holds) <= 20


def test_numbers_to_agree_on_have_room_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the record of the job, so their bytes count and not only their number."""
    monkeypatch.setattr(agreeing, "_BYTES", 2400)

    async def nothing() -> None:
        pass

    job = SimpleNamespace(
        write_down=lambda: None, keeping=SimpleNamespace(settled=nothing), changes=SimpleNamespace(notify=nothing)
    )
    one = Agreeing(cast(Any, job))

    def give(epoch: int) -> None:
        name = "n" * 200
        mine = coordinator_pb2.Agreed(name=name, epoch=epoch, count=1, value=1.0)
        asyncio.run(one.agree(coordinator_pb2.AgreeRequest(name=name, mine=mine)))

    for epoch in range(10):
        give(epoch)
    with pytest.raises(errors.ProtocolError, match="workers have agreed on 10 numbers, and the job keeps no more"):
        give(10)
    give(9)


def test_batches_that_are_leased_and_never_done_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "_MAX_BYTES", 100_000)
    job = SimpleNamespace(timeline=0, members=SimpleNamespace(of=lambda role: [WORKER]))
    one = Evaluating(cast(Any, job))

    async def evaluate(**given: Any) -> coordinator_pb2.EvaluateResponse:
        return await one.evaluate(coordinator_pb2.EvaluateRequest(member=7, **given))

    async def work() -> None:
        for _ in range(100_000 // (32 * 128)):
            await evaluate(slices=10**6, wants=True)
        await evaluate(slices=10**6, wants=True)
        with pytest.raises(errors.DataError, match="an evaluation of 1000000 batches is too large"):
            await evaluate(slices=10**6, wants=True)
        for count in range(1, 50):
            leased = (await evaluate(slices=4, count=count, wants=True)).slices
            await evaluate(slices=4, count=count, done=[{"index": i, "value": b"v" * 9000} for i in leased])
        assert sum(found.nbytes for found in one._all.values()) <= 100_000
        assert len(one._all) > 1

    asyncio.run(work())


def test_a_state_that_a_departed_worker_has_begun_to_bring_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "MAX_BYTES", 1000)

    async def nothing() -> None:
        pass

    job = SimpleNamespace(timeline=0, members={7, 8}, changes=SimpleNamespace(notify=nothing))
    one = Registered(cast(Any, job))

    def keep(member: int, version: int, offset: int, total: int = 1000) -> bool:
        request = coordinator_pb2.KeepRequest(
            member=member, version=version, total=total, offset=offset, data=b"d" * 400
        )
        return asyncio.run(one.keep(request)).wanted

    with pytest.raises(errors.ProtocolError, match="has 1 to 1000 bytes"):
        keep(7, 1, 0, total=2000)
    for offset in (0, 400, 800, 1200):
        keep(7, 1, offset)
    assert one._coming is not None
    assert len(one._coming.data) == 800, "no more than was announced"
    one.worker_gone(8)
    assert one._coming is not None
    one.worker_gone(7)
    assert one._coming is None


def test_a_worker_that_registers_again_and_again_is_registered_once() -> None:
    one: Any = object.__new__(ModelRegistry)
    one.registered, one.initialiser, one.ready, one._publishing = [5, 7, 9], 0, True, False
    ModelRegistry.worker_gone(one, 7)
    assert one.registered == [5, 9]

    async def nothing(*_: Any) -> None:
        pass

    one.model, one.digest, one._scripts, one._state_digest = types_pb2.ModelSpec(), "", False, None
    one._lock, one.place = asyncio.Lock(), nothing
    one._job = SimpleNamespace(
        recovery=SimpleNamespace(resuming=False, under_way=False),
        refresh=nothing,
        keeping=SimpleNamespace(settled=nothing),
        holders=[0],
    )
    for _ in range(10):
        asyncio.run(one.register(coordinator_pb2.RegisterModelRequest(member=11, model=types_pb2.ModelSpec())))
    assert one.registered == [5, 9, 11]


def test_deaths_and_slices_that_are_skipped_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "_DEATHS", 100)
    one = Poison()
    for number in range(300):
        one.begins(number, Place(number, 0))
        one.died(number, lambda _: False, 0.0)
    assert len(one.deaths) == 100
    assert one.deaths[-1] == Place(299, 0)

    monkeypatch.setattr(poison, "_SKIPPED", 2)
    failed: list[str] = []

    async def fail(reason: str) -> None:
        failed.append(reason)

    job = SimpleNamespace(
        schedule=SimpleNamespace(slices_per_epoch=10, data=SimpleNamespace(drawn=True, slice_size=2)),
        life=SimpleNamespace(phase=poison._TRAINING[0]),
        members=SimpleNamespace(of=lambda role: []),
        options=SimpleNamespace(poison="skip"),
        leasing=SimpleNamespace(table=None),
        fail=fail,
    )
    watch = poison.PoisonWatch(cast(Any, job))
    monkeypatch.setattr(watch, "describe", str)
    monkeypatch.setattr(watch, "_done", lambda place: False)
    watch.slices = {(0, 1), (0, 2)}

    async def work() -> None:
        for number in range(3):
            assert await watch.begin(number, types_pb2.SliceRef(epoch=1, index=3))
            await watch.gone(Member(number, Role.WORKER, number, f"worker-{number}", 0.0), died=True)
        with pytest.raises(errors.ProtocolError, match="there is no slice 10 of epoch 1"):
            await watch.begin(9, types_pb2.SliceRef(epoch=1, index=10))

    asyncio.run(work())
    assert failed
    assert len(watch.slices) == 2


def test_versions_that_are_written_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overdue, "_BEGUN", 10)
    monkeypatch.setattr(checkpointing, "_VERSIONS", 10)
    late = Overdue(Promises(), "", False)
    core = Checkpointing()
    core.begin(1)
    core.found(range(10))
    for version in range(100, 200):
        late.begun(version)
        core.handle(Reported(0, [Part(1, version, Copy.SAVED)], 2))
    assert len(late._begun) == 10
    assert len(core._states) <= 10
    assert len(core._parts) <= 10
    assert len(core._again) <= 10
    assert core.saved(9), "the newest checkpoints are known"
    assert not core.saved(0)


def test_ends_of_epochs_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best, "_EPOCHS", 10)

    async def cut() -> int:
        return 1

    job = SimpleNamespace(timeline=0)
    one = best.BestCheckpoints(cast(Any, job), cast(Any, object()), cast(Any, _Best()), cut)

    async def copy(version: int) -> int:
        return version

    monkeypatch.setattr(one, "_copy", copy)

    async def work() -> None:
        for epoch in range(1, 100):
            await one.at_end_of_epoch(coordinator_pb2.FinishRequest(epoch=epoch, version=epoch))

    asyncio.run(work())
    assert len(one._ends) == 10


class _Best:
    best_metric, best_mode, best_keep = "loss", "min", 1


def test_parts_of_a_trace_that_nobody_fetches_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MOST_BYTES", 10_000)
    one: Any = object.__new__(tracing.Tracing)
    one._news, one._next, one._parts, one._bytes, one._dropped = asyncio.Event(), 0, deque(), 0, 0
    for _ in range(100):
        one._keep(coordinator_pb2.TracePart(spans=[coordinator_pb2.TraceSpan(name="n" * 1000)]))
    assert sum(part.ByteSize() for part in one._parts) <= 10_000
    assert one._dropped > 80


# ---- what scripts log


def logged(collector: Collector, worker: str, step: int, names: list[str], first: int = 0, process: int = 1) -> None:
    collector.hear(process, worker, first, [Logged(step, 1, dict.fromkeys(names, 1.0))], 0.0, late_counts=False)


def test_names_of_values_have_room_for_each_worker_and_for_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each name stayed in memory for a thousand steps: from 89 to 725 MB."""
    monkeypatch.setattr(steps, "NAMES_OF_ONE", 10)
    monkeypatch.setattr(steps, "NAMES", 25)
    one = Collector()
    for worker in range(5):
        logged(one, f"worker-{worker}", 1, [f"{worker} {index}" for index in range(100)], process=worker)
    logged(one, "worker-9", 2, ["0 1"], process=9)
    first, second = one.close([(1, 3)], 0.0)
    assert Counter(name[0] for name in first.values) == {"0": 10, "1": 10, "2": 5}
    assert one.refused == "0 10"
    assert second.values == {"0 1": 1.0}, "a name that is known is known for all"
    monkeypatch.undo()
    one = Collector()
    logged(one, "worker-0", 1, ["n" * 1000 + str(index) for index in range(100)])
    assert len(one.close([(1, 3)], 0.0)[0].values) == steps.NAME_CHARS_OF_ONE // 1002


def test_values_of_open_steps_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "VALUES", 20)
    one = Collector()
    for step in range(100):
        logged(one, "worker-0", step, ["a", "b"], first=step)
    assert sum(len(given) for opened in one._open.values() for given in opened.values.values()) == 20
    assert one.refused == "a"
    assert len(one.close([(1, 1000)], 0.0)) == 10
    logged(one, "worker-0", 100, ["a"], first=100)
    assert len(one.close([(1, 1000)], 0.0)) == 1, "there is room again"


def test_closed_steps_are_remembered_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_NAMES_REMEMBERED", 50)
    monkeypatch.setattr(steps, "_PROCESSES", 10)
    one = Collector()
    for step in range(40):
        logged(one, "worker-0", step, [f"n{index}" for index in range(10)], process=step)
        assert len(one.close([(1, step + 1)], 0.0)) == 1
    assert sum(map(len, one._closed.values())) <= 50
    assert len(one._next) == 10
    one.hear(1, "worker-1", 9, [Logged(3, 1, {"n1": 2.0}, slice=(0, 1))], 0.0, late_counts=False)
    assert one.close([(1, 50)], 0.0) == [], "a value of a step that is forgotten does not make the step anew"


def test_curves_have_a_limit() -> None:
    history = History()
    for step in range(3):
        history.add(StepValues(step, 0, {f"n{index}": 1.0 for index in range(2 * CURVES)}), 0.0)
    assert len(history.names()) == CURVES
