"""Former shards bring the shards of a new plan their chunks while training goes on, so that workers hardly wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from paramserver import errors
from paramserver.core.layout import catching_up
from paramserver.server.arithmetic.state import State
from paramserver.server.replicas.parcels import CatchUpParcel
from paramserver.server.replicas.parts import Parts
from paramserver.server.rpc.parts import PartsCalls
from paramserver.worker.context import Context
from tests.support.cluster.harness import until, wait
from tests.support.cluster.processes import Killed, running_process
from tests.support.cluster.programs import LedgerProgram, Program, adamw, dataset, network
from tests.support.cluster.small_job import SLICES, program
from tests.support.failover.held import Held
from tests.support.failover.kills import exact
from tests.support.failover.ledger import BATCH, CELLS
from tests.support.failover.resizing import Between, Wish, resize
from tests.support.failover.rollback import Rig, same, twin

SMALL: dict[str, Any] = {"training__chunk_bytes": 256}
There = tuple[Mapping[int, Tensor], Mapping[int, State]]


class Taken:
    """What was there when workers waited: by part, whether it had all of its chunks at the version of its source."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.whole: list[bool] = []
        at = Parts.at

        def noted(parts: Parts, source: int, version: int) -> There | None:
            there = at(parts, source, version)
            if source in parts.parts:
                self.whole.append(there is not None)
            return there

        monkeypatch.setattr(Parts, "at", noted)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    return Taken(monkeypatch)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are brought one at a time, so that versions are made in between."""
    monkeypatch.setattr(catching_up, "GROUP_BYTES", 1)


def test_nothing_is_left_to_fetch(taken: Taken, one_by_one: None, tmp_path: Path) -> None:
    wanted = twin("resized", program(), 256, slices_per_step=SLICES)
    held = Between(2)
    with Rig(tmp_path, 0, cluster__replicas=1, **SMALL) as rig:
        rig.begin(program(held))
        resize(rig, held, (3, 2))
        same(rig.finish(), wanted)
        assert rig.rollbacks == 0
    assert taken.whole
    assert all(taken.whole)


@pytest.mark.long
def test_nothing_is_left_to_fetch_of_asynchronous_shards(taken: Taken, one_by_one: None, tmp_path: Path) -> None:
    epochs, held = 4, Between(2)
    with Rig(tmp_path, 0, cluster__replicas=1, mode="async", training__chunk_bytes=64) as rig:
        rig.begin(LedgerProgram(CELLS, BATCH, epochs, each=held))
        resize(rig, held, (3, 2))
        exact(rig, rig.finish(), epochs)
    assert taken.whole
    assert all(taken.whole)


class Slow:
    """Each slice takes a while. Notes when a worker begins its slices."""

    def __init__(self, held: Held) -> None:
        self.held, self.began = held, list[float]()

    def __call__(self, ctx: Context, slices: int) -> None:
        self.held(ctx, slices)
        if ctx.rank == 0:
            self.began.append(time.monotonic())
        time.sleep(0.01)

    def longest(self, since: float) -> float:
        """The longest time between two slices."""
        times = [at for at in self.began if at > since]
        return max(after - before for before, after in pairwise(times))


@pytest.mark.long
def test_the_pause_does_not_depend_on_how_long_chunks_travel(
    one_by_one: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All chunks of one former shard take longer than two seconds; the longest pause is that of one chunk."""
    each_s = 0.25
    frames = CatchUpParcel.frames

    async def travels(self: CatchUpParcel) -> Iterator[Any]:
        await asyncio.sleep(each_s * len(self._chunks))
        return await frames(self)

    def script(each: Any) -> Program:
        return Program(dataset(107), 8, 40, lambda: network(hidden=200), adamw, each=each)

    held = Held()
    slow = Slow(held)
    with Rig(tmp_path, 0, **SMALL) as rig:
        rig.begin(script(slow))
        wait(held.reached, "the workers in their third slice")
        monkeypatch.setattr(CatchUpParcel, "frames", travels)
        held.released.set()
        until("training goes on", lambda: len(slow.began) > 5)
        for servers in (3, 2):
            began = time.monotonic()
            wish = Wish(rig, servers, wait_s=60.0)
            until("the wish is known", lambda servers=servers: rig.record().wanted_servers == servers)  # type: ignore[misc]
            if servers == 3:
                rig.serve(2)
            wish.join()
            assert wish.error is None
            assert wish.answer is not None
            assert time.monotonic() - began > 4 * each_s, "chunks take their time"
            assert wish.answer.paused_s < 3 * each_s
            assert slow.longest(began) < 4 * each_s
        rig.finish()


@pytest.mark.parametrize(
    ("called", "who"),
    [
        ("catch_up_part", "server-2"),
        pytest.param("forward_part", "server-2", marks=pytest.mark.long),
        pytest.param("catch_up_part", "leader", marks=pytest.mark.long),
        pytest.param("catch_up_part", "server-0", marks=pytest.mark.long),
        pytest.param("forward_part", "server-1", marks=pytest.mark.long),
    ],
)
def test_somebody_dies_meanwhile(
    called: str, who: str, one_by_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are the same, no step is done again, and the change is undone, or done if all are back in time."""
    wanted = twin("resized", program(), 256, slices_per_step=SLICES)
    held, struck, method = Held(), list[str](), getattr(PartsCalls, called)

    async def strikes(self: PartsCalls, frames: Any) -> Any:
        if not struck:
            struck.append(who)
            rig._at_once(lambda: rig.strike(who))
        mine = running_process()
        if mine is not None and mine.killed:
            raise Killed
        return await method(self, frames)

    monkeypatch.setattr(PartsCalls, called, strikes)
    with Rig(tmp_path, 0, cluster__replicas=1, **SMALL) as rig:
        if who == "server-2":
            rig.again_s = 60.0  # there is no place for it any more
        rig.begin(program(held))
        wait(held.reached, "the workers in their third slice")
        wish = Wish(rig, 3)
        until("the wish is known", lambda: rig.record().wanted_servers == 3)
        rig.serve(2)
        until("the change is prepared", lambda: rig.record().newest_plan == 1)
        held.released.set()
        summary = rig.finish()
        wish.join()
        assert struck
        assert wish.error is None or isinstance(wish.error, errors.ParamServerError)
        assert (rig.rollbacks, rig.record().expected_servers) == (0, 3 if wish.error is None else 2)
    same(summary, wanted)
