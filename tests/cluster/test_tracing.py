"""Traces of whole jobs: all processes take part, spans of a step fit into each other, and nothing is left on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from paramserver import errors
from paramserver.alone.job import COORDINATOR
from paramserver.cli.record.parts import Parts, write
from paramserver.v1.coordinator_pb2 import TraceRequest, TraceResponse
from paramserver.worker.context import Context
from tests.support.cluster.harness import CALL_S, JOB_S, Cluster, Died, until, wait
from tests.support.cluster.small_job import SLICES, program
from tests.support.traces import Trace

STEPS = 2


class Traced:
    """A job that is about to train its second slice. ``dies``: worker-1 does not survive its third one."""

    def __init__(self, cluster: Cluster, dies: bool = False) -> None:
        self.cluster, self._dies = cluster, dies
        self.reached, self.go_on = threading.Semaphore(0), threading.Event()
        for _ in range(2):
            cluster.start(program(self._each))
        for _ in range(2):
            assert self.reached.acquire(timeout=JOB_S)

    def _each(self, ctx: Context, slices: int) -> None:
        if slices == 1:
            self.reached.release()
            wait(self.go_on, "the trace", JOB_S)
        if self._dies and ctx.rank == 1 and slices == 3:
            raise Died

    def ask(self, **request: Any) -> TraceResponse:
        """What the command asks."""

        async def go() -> TraceResponse:
            channel = self.cluster.job.network.connect(COORDINATOR)
            reply = await channel.call("Coordinator.Trace", TraceRequest(**request), timeout=CALL_S)
            assert isinstance(reply, TraceResponse)
            return reply

        return self.cluster.job.background.run(go(), CALL_S)

    def record(self, **wish: Any) -> tuple[Parts, TraceResponse]:
        """A whole trace."""
        parts, answer = Parts(), self.ask(steps=STEPS, **wish)
        until("all processes record", lambda: all(trace.on for trace in self.recorders()))
        self.go_on.set()

        def over() -> bool:
            nonlocal answer
            answer = self.ask(number=answer.number, received=parts.received, wait_s=1.0)
            parts.add(answer)
            return answer.over

        until("the trace is complete", over)
        return parts, answer

    def recorders(self) -> list[Any]:
        """Those of all members."""
        contexts = [worker.context for worker in self.cluster.workers]
        found = [context.engine.member.trace for context in contexts if context is not None]
        return [*found, *(server.service.process.trace for server in self.cluster.job.servers)]


@pytest.mark.parametrize(
    ("mode", "transport"),
    [("sync", "shm"), pytest.param("sync", "grpc", marks=pytest.mark.long), ("async", "grpc")],
)
def test_all_processes_take_part_and_what_follows_comes_after(mode: str, transport: str, tmp_path: Path) -> None:
    slices = SLICES if mode == "sync" else 0
    with Cluster(2, 2, mode, slices_per_step=slices, transport=transport) as cluster:
        traced = Traced(cluster)
        parts, answer = traced.record()
        assert not any(trace.on or trace.script for trace in traced.recorders())
        cluster.join()
    assert dict(answer.missing) == {}
    assert parts.names == ["coordinator", "server-0", "server-1", "worker-0", "worker-1"]
    assert write(parts, tmp_path / "trace.json", {}) == 0, "all of them read the same clock"
    trace = Trace((tmp_path / "trace.json").read_text())
    assert trace.fits() >= STEPS * 2
    for worker in ("worker-0", "worker-1"):
        phases = [span for span in trace.spans(worker) if span["args"].get("slice") and span["name"] != "send"]
        assert {"data", "compute", "other"} <= {span["name"] for span in phases}
        assert trace.spans(worker, "wait")
        assert trace.spans(worker, "send")
        told = [span for span in trace.spans(worker) if span["args"].get("slice")]
        own = [span for span in told if trace.tracks[span["pid"], span["tid"]] == "script"]
        ends = [span["ts"] + span["dur"] for span in own]
        # Nothing is told twice, and nothing is left out: a phase begins where the former one ends.
        assert [span["ts"] for span in own[1:]] == pytest.approx(ends[:-1])
    for server in ("server-0", "server-1"):
        assert {"queue", "sum and update", "publish"} <= {span["name"] for span in trace.spans(server)}
    if mode == "sync":
        steps = {span["args"]["step"] for span in trace.spans("worker-0", "compute")}
        assert len(steps) == STEPS
        for step in sorted(steps)[1:]:
            published = max(span["ts"] for span in trace.spans("server", "publish", step=step - 1))
            assert all(span["ts"] >= published for span in trace.spans("worker", "compute", step=step))


@pytest.mark.long
def test_a_worker_that_dies_in_the_middle_is_named_and_the_rest_comes() -> None:
    with Cluster(2, 2, slices_per_step=SLICES) as cluster:
        traced = Traced(cluster, dies=True)
        parts, answer = traced.record()
        cluster.join()
    assert set(answer.missing) == {"worker-1"}
    assert "is gone" in answer.missing["worker-1"]
    assert {"server-0", "server-1", "worker-0"} < set(parts.names)


def test_one_trace_at_a_time_and_only_of_what_can_be_traced() -> None:
    with Cluster(2, 2, slices_per_step=SLICES) as cluster:
        traced = Traced(cluster)
        assert all(trace.empty and not trace.on for trace in traced.recorders()), "nothing is recorded before"
        for steps, said in ((0, "1 to 1000 steps"), (1001, "1 to 1000 steps")):
            with pytest.raises(errors.ConfigError, match=said):
                traced.ask(steps=steps)
        number = traced.ask(steps=1000).number
        with pytest.raises(errors.ConfigError, match="another trace is under way"):
            traced.ask(steps=1)
        with pytest.raises(errors.NotLeaderError, match="knows nothing of that trace"):
            traced.ask(number=number + 2)
        traced.ask(number=number, stop=True)
        traced.go_on.set()
        until("all have stopped", lambda: not any(trace.on for trace in traced.recorders()))
        cluster.join()
        with pytest.raises(errors.ConfigError, match="no worker takes steps now"):
            traced.ask(steps=1)
