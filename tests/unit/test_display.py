"""What the launcher shows of a running job."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from paramserver.launcher.live import LiveDisplay
from paramserver.launcher.progress import Left, Progress, Rates, metric_text
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.worker.job.progress import Progress as WorkerProgress


def test_a_rate_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is started again counts from nothing."""
    seconds = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr("paramserver.launcher.progress.time", clock)
    rates = Rates()
    found = [rates.of("worker-0", samples) for samples in (0, 10, 20, 5, 15)]
    assert found == [0.0, 10.0, 10.0, 0.0, 10.0]


def test_the_table_on_a_terminal_leaves_lines_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not cut to its width."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    display = LiveDisplay()
    try:
        display.line("worker-0", "x" * 1_000_000)
    finally:
        display.close()
    lines = out.getvalue().splitlines()
    assert "worker-0 | " + "x" * 1_000_000 in lines


def test_long_reasons_leave_room_for_names_and_states() -> None:
    status = coordinator_pb2.StatusResponse(job="digits", state="degraded", reason="server-1 is lost; " * 9)
    status.processes.add(role="coordinator", name="coordinator", state="degraded", reason=status.reason)
    status.processes.add(role="worker", name="worker-0", state="waiting", reason=status.reason)
    display = LiveDisplay()
    display.close()
    console = Console(width=80)
    with console.capture() as capture:
        console.print(display.table(status))
    assert "job digits: degraded" in capture.get()
    assert re.search(r"^coordinator +degraded", capture.get(), re.MULTILINE)
    assert re.search(r"^worker-0 +waiting .*server-1 is", capture.get(), re.MULTILINE)


def training(done: int, version: int, **metrics: float) -> coordinator_pb2.StatusResponse:
    """A job of two epochs of 15 slices."""
    status = coordinator_pb2.StatusResponse(job="digits", state="training")
    status.data.CopyFrom(types_pb2.DataSpec(samples=230, slice_size=16))
    server = status.processes.add(role="server", name="server-0", version=version)
    server.server.applied = done
    worker = status.processes.add(
        role="worker", name="worker-0", epochs_planned=2, first_metric=next(iter(metrics), "")
    )
    worker.metrics.update(metrics)
    return status


def test_what_is_left_of_the_epoch_and_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((0.0, 0.0, 10.0, 10.0))
    monkeypatch.setattr("paramserver.launcher.progress.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    progress = Progress()
    progress.hear(training(10, 5))
    assert (progress.of_job, progress.steps_per_s) == (Left(10, 30, None), 0.0), "no speed is known yet"
    progress.hear(training(20, 10))
    assert (progress.epoch, progress.epochs) == (2, 2)
    assert (progress.of_epoch, progress.of_job) == (Left(5, 15, 10.0), Left(20, 30, 10.0))
    assert progress.steps_per_s == 0.5


def test_a_job_that_goes_back_has_done_less_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is guessed from before that."""
    seconds = iter((0.0, 0.0, 1.0, 1.0))
    monkeypatch.setattr("paramserver.launcher.progress.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    progress = Progress()
    progress.hear(training(20, 20))
    progress.hear(training(4, 4))
    assert (progress.of_epoch, progress.steps_per_s) == (Left(4, 15, None), 0.0)


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [({"acc": 0.5, "loss": 1.25}, "loss 1.2500"), ({"rmse": 0.5, "acc": 0.1}, "rmse 0.5000"), ({}, "")],
)
def test_the_number_that_is_shown(metrics: dict[str, float], shown: str) -> None:
    """The loss, or else the number that scripts logged first."""
    assert metric_text(training(1, 1, **metrics)) == shown


def test_a_worker_reports_the_name_that_its_script_logged_first() -> None:
    """A message does not keep the order of its metrics."""
    progress = WorkerProgress()
    assert progress.report().first_metric == ""
    progress.log({"rmse": 0.5, "acc": 0.1})
    progress.log({"acc": 0.2})
    assert progress.report().first_metric == "rmse"


def test_scripts_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    display = LiveDisplay()
    try:
        output = display.output("worker-0")
        output.feed(b"\x1b[2J\x1b]0;title\x07a\x1b[31mred\x1b[0m\x1b[5Bb\x08\x1bc[bold]\x1b[\n")
        output.end()
    finally:
        display.close()
    assert "worker-0 | aredb[bold]" in out.getvalue().splitlines()


def test_a_bar_is_finished_in_the_order_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all states of a bar only the last one is a line."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    display = LiveDisplay()
    first, second = (display.output(f"worker-{rank}") for rank in range(2))
    try:
        for output in (first, second):
            output.feed(b"\r10%")
            output.feed(b"\r20%")
        first.feed(b"\nnext\n")
        assert out.getvalue() == "worker-0 | 20%\nworker-0 | next\n"
        second.end()
    finally:
        display.close()
    assert "worker-1 | 20%" in out.getvalue().splitlines()


def test_a_long_list_shows_the_processes_that_are_not_well() -> None:
    status = training(1, 1)
    for rank in range(1, 100):
        status.processes.add(role="worker", name=f"worker-{rank}", state="stuck" if rank == 77 else "training")
    display = LiveDisplay()
    display.close()
    console = Console(width=80)
    with console.capture() as capture:
        console.print(display.table(status))
    assert re.search(r"^worker-77 +stuck", capture.get(), re.MULTILINE)
    assert re.search(r"^… \d+ more", capture.get(), re.MULTILINE)
    assert len(capture.get().splitlines()) < 40
