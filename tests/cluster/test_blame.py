"""A worker that keeps the others waiting is named in the status, with the cause; all members in one process."""

from __future__ import annotations

import time

import pytest

from paramserver.core.blame.causes import Cause
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


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_whose_slice_takes_long_is_named_with_its_computation(mode: str) -> None:
    program = Program(dataset(SAMPLES), BATCH, 1, network, sgd, each=late)
    with Cluster(2, 2, mode=mode, staleness=1) as cluster:
        for _ in range(2):
            cluster.start(program)
        cluster.join()
        until("a step is blamed", lambda: blame(cluster).worst)
        found = blame(cluster)
        assert {(step.member, step.cause) for step in found.worst} == {("worker-1", Cause.COMPUTE)}
        assert found.sentence.endswith("in its computation")
        assert found.worst[0].waited_s > 0.25
        if mode == "async":
            assert [(held.worker, held.by) for held in found.held][:1] == [("worker-0", "worker-1")]
            assert sum(found.staleness) == SAMPLES // BATCH
