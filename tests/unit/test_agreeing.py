"""Numbers on which workers agree, when the job goes back: those of the history that was undone are forgotten."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from paramserver.coordinator.work.agreeing import Agreeing
from paramserver.v1.coordinator_pb2 import Agreed, AgreeRequest, JobRecord


async def _nothing() -> None:
    pass


def job() -> Any:
    return SimpleNamespace(
        write_down=lambda: None,
        keeping=SimpleNamespace(settled=_nothing),
        changes=SimpleNamespace(notify=_nothing),
    )


def give(agreeing: Agreeing, epoch: int, value: float, version: int, timeline: int = 0) -> dict[int, float]:
    """Returns the numbers so far, by epoch."""
    mine = Agreed(epoch=epoch, count=1, value=value, version=version)
    reply = asyncio.run(agreeing.agree(AgreeRequest(name="loss", mine=mine, timeline=timeline)))
    return {one.epoch: one.value for one in reply.agreed}


def test_numbers_of_later_versions_are_forgotten_and_agreed_on_again() -> None:
    agreeing = Agreeing(job())
    give(agreeing, 1, 8.0, version=4)
    assert give(agreeing, 2, 4.0, version=8) == {1: 8.0, 2: 4.0}
    agreeing.went_back(timeline=1, version=4)
    assert give(agreeing, 2, 5.0, version=8, timeline=1) == {1: 8.0, 2: 5.0}


def test_a_worker_that_has_not_followed_yet_brings_nothing_of_the_history_that_was_undone() -> None:
    agreeing = Agreeing(job())
    agreeing.went_back(timeline=3, version=4)
    assert give(agreeing, 2, 4.0, version=8, timeline=2) == {}
    assert give(agreeing, 1, 9.0, version=4, timeline=2) == {1: 9.0}, "what was not undone counts"


def test_numbers_of_places_that_do_not_come_again_stay() -> None:
    """Those of plain loops, and those from before the first epoch."""
    agreeing = Agreeing(job())
    give(agreeing, 3, 2.0, version=0)
    agreeing.went_back(timeline=1, version=4)
    assert give(agreeing, 4, 1.0, version=0, timeline=1) == {3: 2.0, 4: 1.0}


def test_another_coordinator_knows_of_which_version_each_number_is() -> None:
    former, agreeing, record = Agreeing(job()), Agreeing(job()), JobRecord()
    give(former, 1, 8.0, version=4)
    give(former, 2, 4.0, version=8)
    former.write(record)
    agreeing.restore(record.agreed)
    agreeing.went_back(timeline=1, version=4)
    assert give(agreeing, 3, 3.0, version=9, timeline=1) == {1: 8.0, 3: 3.0}
