"""The screen of `paramserver top`: events, curves, keys, and times without a coordinator."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from paramserver.cli.look.events import changes
from paramserver.cli.look.facts import describe
from paramserver.cli.look.screen import Screen
from paramserver.cli.main import main
from paramserver.core.records.sparkline import sparkline
from paramserver.v1 import coordinator_pb2, types_pb2


def training(samples: int = 0, term: int = 1, job: str = "digits", **other: Any) -> coordinator_pb2.StatusResponse:
    """A job with a server and two workers."""
    view = types_pb2.View(consistency=types_pb2.Consistency(mode=types_pb2.MODE_SYNC))
    status = coordinator_pb2.StatusResponse(**{"job": job, "state": "training", "view": view, "term": term, **other})
    status.processes.add(role="server", name="server-0", pid=10, state="training")
    for rank in range(2):
        worker = status.processes.add(role="worker", name=f"worker-{rank}", pid=20 + rank, state="training")
        worker.samples, worker.first_metric = samples * (2 - rank), "loss"
        worker.metrics["loss"] = 1 / (1 + samples)
    return status


def events(before: coordinator_pb2.StatusResponse, after: coordinator_pb2.StatusResponse) -> list[str]:
    return changes(describe(before), describe(after))


def shown(screen: Screen, height: int = 40) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(screen.draw(height))
    return capture.get()


def test_training_is_no_event() -> None:
    assert events(training(1), training(2)) == []


def test_events_of_the_job() -> None:
    hurt = training(state="degraded", reason="server-1 is lost", rollbacks=1, checkpoint="step-5", takeovers=2)
    hurt.view.timeline = 1
    hurt.view.consistency.mode = types_pb2.MODE_ASYNC
    hurt.view.consistency.staleness = 4
    hurt.troubles["store"] = "the store is away"
    hurt.broken_promises["undone"] = "a slice is not done"
    hurt.holders.add(primary="server-0", state="replicated")
    hurt.poisoned.append("slice 3 of epoch 1")
    assert events(training(), hurt) == [
        "the job is degraded: server-1 is lost",
        "the mode is async, staleness 4",
        "the job went back to an earlier state (timeline 1)",
        "broken promise: a slice is not done",
        "wrong now: the store is away",
        "backups took over from a lost server",
        "checkpoint step-5",
        "skipped, since it kills the workers that compute it: slice 3 of epoch 1",
    ]
    assert events(hurt, training())[:1] == ["the job is training"]
    assert "over: the store is away" in events(hurt, training())


def test_events_of_members() -> None:
    before, after = training(), training(lost=["worker-1"])
    del after.processes[2]
    after.processes[0].pid = 11
    after.processes.add(role="worker", name="worker-2", pid=23)
    assert events(before, after) == [
        "worker-1 was lost",
        "server-0 is another process now (pid 11, before: 10)",
        "worker-2 has joined",
    ]
    after = training()
    after.processes[1].gone = True
    after.processes[2].state, after.processes[2].reason = "stuck", "its script hands in nothing"
    assert events(before, after) == ["worker-0 has left", "worker-1 is stuck: its script hands in nothing"]


def test_another_coordinator_does_not_send_members_away() -> None:
    after = training(term=2)
    del after.processes[:]
    assert events(training(), after) == ["another coordinator leads the job (term 2, before: 1)"]


def test_the_screen_says_once_who_makes_steps_wait() -> None:
    screen = Screen()
    screen.heard(training(blame={"sentence": "step 8 waited 3.4 s for worker-0", "chronic": "worker-0 held up"}), "")
    assert shown(screen).count("step 8 waited 3.4 s for worker-0") == 1
    assert shown(screen).count("worker-0 held up") == 1


def test_a_sparkline_of_all_heights() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5]) == "▁▁"
    assert sparkline([math.nan, 1.0, math.inf, 3.0]) == " ▁ █"
    assert sparkline([]) == ""


def test_a_screen_from_the_wait_for_a_job_to_the_next_job(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    now = SimpleNamespace(monotonic=lambda: seconds[0])
    monkeypatch.setattr("paramserver.launcher.progress.time", now)
    screen = Screen()
    screen.unheard("no job runs on this machine", "12:00:00")
    assert "waiting for a job (since 12:00:00): no job runs on this machine" in shown(screen)
    for second in range(4):
        seconds[0] = float(second)
        screen.heard(training(second * 10), f"12:00:0{second + 1}")
    text = shown(screen)
    assert "samples/s         30  ▁███" in text
    assert "loss         0.03226  █▁▁▁" in text
    assert "12:00:01  job digits is training" in text
    for clock in ("12:00:05", "12:00:06"):
        screen.unheard("nobody answers at a:1", clock)
    text = shown(screen)
    assert "NO COORDINATOR ANSWERS since 12:00:05: nobody answers at a:1" in text
    assert "worker-1" in text, "the last answer stays"
    screen.heard(training(50, term=2), "12:00:07")
    assert [event for _, event in screen.events][1:] == [
        "no coordinator answers any more: nobody answers at a:1",
        "a coordinator answers again; none did since 12:00:05",
        "another coordinator leads the job (term 2, before: 1)",
    ]
    assert "NO COORDINATOR" not in shown(screen)
    screen.heard(training(job="letters"), "12:00:08")
    assert "samples/s          0  ▁\n" in shown(screen).replace(" \n", "\n"), "curves of another job begin anew"


def test_what_holds_a_job_up_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr("paramserver.launcher.progress.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    screen, status = Screen(), training()
    status.processes[0].waiting_for = "step 3: all slices (worker-1)"
    screen.heard(status, "12:00:00")
    assert "held up" not in shown(screen)
    seconds[0] = 5.0
    screen.heard(status, "12:00:05")
    assert "held up: waiting for step 3: all slices (worker-1)" in shown(screen)


def test_keys() -> None:
    screen = Screen()
    screen.heard(training(10), "12:00:00")
    assert screen.press("p")
    screen.heard(training(20, checkpoint="step-7"), "12:00:01")
    assert "step-7" not in shown(screen)
    assert "PAUSED" in shown(screen)
    assert screen.press("p")
    assert "checkpoint step-7" in shown(screen)
    orders = []
    for _ in range(3):
        screen.press("s")
        text = shown(screen)
        orders.append((screen.order, text.index("worker-0") < text.index("worker-1")))
    assert orders == [("state", True), ("samples", False), ("name", True)]
    assert screen.press("x"), "other keys do nothing"
    assert not screen.press("q")


def test_the_screen_fits_the_terminal() -> None:
    screen, status = Screen(), training()
    for rank in range(2, 200):
        status.processes.add(role="worker", name=f"worker-{rank}", state="training", reason="a long reason " * 20)
    for second in range(50):
        screen.heard(training(checkpoint=f"step-{second}"), "12:00:00")
    screen.heard(status, "12:00:01")
    assert len(shown(screen, 30).splitlines()) <= 30
    assert "more processes" in shown(screen, 30)


@pytest.mark.parametrize("tokens", [["top"], ["status", "--watch"]])
def test_without_a_terminal_one_sentence_says_what_to_use(
    tokens: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tokens) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "paramserver: error: this view needs a terminal; without one use: paramserver status (for programs: --json)\n"
    )
