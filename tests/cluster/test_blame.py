"""A worker that keeps the others waiting is named in the status, with the cause; all members in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from paramserver.core.blame.causes import Cause
from paramserver.membership.pulse import Pulse
from paramserver.v1 import coordinator_pb2
from paramserver.worker.context import Context
from tests.support.cluster.harness import Cluster, until
from tests.support.cluster.programs import Program, dataset, network, sgd

SAMPLES, BATCH, SLICE_S, LATE_S = 40, 4, 0.35, 1.2
# The slice that takes worker 1 long.
WHEN = 3


def late(ctx: Context, slices: int) -> None:
    time.sleep(LATE_S if ctx.rank == 1 and slices == WHEN else SLICE_S)


def blame(cluster: Cluster) -> coordinator_pb2.Blame:
    return cluster.status().blame


def named(found: coordinator_pb2.Blame) -> list[coordinator_pb2.BlamedStep]:
    """The steps that are blamed on worker 1, the longest first. Other members may be named on a busy machine."""
    return [step for step in found.worst if step.member == "worker-1"]


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.long), "async"])
def test_a_worker_whose_slice_takes_long_is_named_with_its_computation(mode: str) -> None:
    program = Program(dataset(SAMPLES), BATCH, 1, network, sgd, each=late)
    with Cluster(2, 2, mode=mode, staleness=1) as cluster:
        for _ in range(2):
            cluster.start(program)
        cluster.join()
        until("worker 1 is named", lambda: named(blame(cluster)))
        found = blame(cluster)
        step = named(found)[0]
        assert step.cause == Cause.COMPUTE
        assert step.waited_s > 0.25
        assert step.sentence.endswith(" in its computation")
        if mode == "async":
            assert ("worker-0", "worker-1") in [(held.worker, held.by) for held in found.held]
            assert sum(found.staleness) == SAMPLES // BATCH


async def _losses(work: Callable[[], None]) -> tuple[float, float]:
    """(starved, paused) seconds of a process in which ``work`` keeps the loop."""
    pulse = Pulse()
    beating = asyncio.create_task(pulse.run())
    begin = time.monotonic()
    await asyncio.sleep(0.05)
    work()
    end = time.monotonic()
    deadline = end + 10.0
    while pulse.beat_at < end and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    beating.cancel()
    return pulse.within(begin, end)


def _burn() -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < 0.4:
        pass


def test_a_process_that_stands_still_is_noticed_and_one_that_computes_is_not_taken_for_it() -> None:
    _, paused = asyncio.run(_losses(lambda: time.sleep(0.4)))
    assert paused > 0.2
    _, paused = asyncio.run(_losses(_burn))
    assert paused == 0.0
