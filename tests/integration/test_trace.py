"""`paramserver trace` on real runs: the file, a file that is there already, and processes that end in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.integration.harness import Place, complaint, place_fixture, status_of, until
from tests.support.integration.paced import training
from tests.support.traces import Trace

pytestmark = pytest.mark.long


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("transport", ["auto", "grpc"])
def test_a_trace_of_a_running_job_fits_together(place: Place, mode: str, transport: str) -> None:
    training(place, 2, 2, "--mode", mode, "--set", f"cluster.transport={transport}")
    path = place.work / "trace.json"
    done = place.paramserver("trace", "--steps", "5", "-o", path, "--profiler").check()
    assert "of 5 processes" in done.out
    assert "Recording 5 steps of coordinator, server-0, server-1, worker-0, worker-1" in done.err
    before = path.read_bytes()
    trace = Trace(before.decode())
    assert sorted(trace.processes.values()) == ["coordinator", "server-0", "server-1", "worker-0", "worker-1"]
    assert trace.about["missing"] == {}
    assert trace.fits(error_us=sum(trace.about["clock_error_us"].values())) >= 5 * 2
    assert {span["name"] for span in trace.spans("worker") if span["cat"] == "torch"} > {"aten::mm", "aten::addmm"}
    _steps_of_scripts_are_whole(trace)
    assert "exists; remove it" in complaint(place.paramserver("trace", "-o", path), 2)
    assert path.read_bytes() == before
    place.paramserver("stop").check()


def _steps_of_scripts_are_whole(trace: Trace) -> None:
    """Phases of a script follow each other without a gap, and torch's operations lie in phases."""
    for worker in ("worker-0", "worker-1"):
        phases = [span for span in trace.spans(worker) if span["name"] in ("data", "compute", "other")]
        computed = [span["args"] for span in phases if span["name"] == "compute"]
        # A worker may compute several slices of a synchronous step, if another one is late.
        assert len({args.get("step", args["slice"]) for args in computed}) == 5
        first, last = phases[0]["ts"], phases[-1]["ts"] + phases[-1]["dur"]
        torch = [span["ts"] for span in trace.spans(worker) if span["cat"] == "torch"]
        assert torch
        assert first - 20_000.0 <= min(torch)  # on a busy machine a thread waits between the two looks at the clock
        assert max(torch) <= last + 1_000_000.0


@pytest.mark.parametrize("whom", ["worker-1", "coordinator"])
def test_what_has_come_is_written_if_a_process_dies_in_the_middle(place: Place, whom: str) -> None:
    run = training(place, 2, 2)
    path = place.work / "trace.json"
    tracing = place.launch("trace", "--steps", "1000", "-o", path, "--wait", "12")
    tracing.wait_for_err("Recording 1000 steps")
    before = _version(run)
    until("steps are recorded", lambda: _version(run) > before + 20, 30.0)
    pid = next(process["pid"] for process in status_of(run)["processes"] if process["name"] == whom)
    os.kill(pid, signal.SIGKILL)
    done = tracing.wait().check(6)
    said = f"{whom}: it is gone" if whom == "worker-1" else "the job could not be asked for the rest"
    assert said in done.err
    trace = Trace(path.read_text())
    assert {"server-0", "server-1", "worker-0", "worker-1"} <= set(trace.processes.values())
    assert trace.spans("worker-1", "compute")
    assert [name.name for name in path.parent.glob(".trace*")] == []
    again = Path(path.parent / "again.json")
    until("the next trace", lambda: place.paramserver("trace", "--steps", "2", "-o", again).code == 0, 60.0)
    Trace(again.read_text())
    place.paramserver("stop").check()


def _version(run: object) -> int:
    found = [process["version"] for process in status_of(run)["processes"]]  # type: ignore[arg-type]
    return max(int(version) for version in found)
