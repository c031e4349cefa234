"""Runs that tests of reports tell of: with a lost worker, with names that are markup, with blame."""

from __future__ import annotations

from typing import Any

from paramserver.report.data import Curve, CurvePoint, Moment, Outcome, Report
from paramserver.web.models import Event, Ledger, LedgerEpoch, Setting

MARKUP = "<img src=x onerror=document.title='owned'>"
BEGUN_S = 1_790_000_000.0

SUMMARY: dict[str, Any] = {
    "job": "digits",
    "state": "done",
    "mode": "sync",
    "staleness": None,
    "servers": 2,
    "workers": 2,
    "steps": 40,
    "epochs": 2,
    "epochs_planned": 2,
    "seconds": 12.5,
    "samples": 1280,
    "samples_per_s": 102.4,
    "weights_sha256": "ab" * 32,
    "buffers_sha256": "cd" * 32,
    "optimizer_sha256": "ef" * 32,
    "bytes_pushed": 2_500_000,
    "bytes_pulled": 1_000,
    "contributions_applied": 80,
    "contributions_not_counted": {"duplicate": 3},
    "steps_skipped": 0,
    "restarts": {"worker-1": 1},
    "losses": 1,
    "takeovers": 1,
    "repairs": 1,
    "rollbacks": 0,
    "steps_redone": 0,
    "checkpoint": "step-00000040-t0",
    "broken_promises": [],
}


def worker(name: str, **more: Any) -> dict[str, Any]:
    """A worker as the status has it."""
    facts = {"role": "worker", "name": name, "state": "done", "reason": "", "gone": True, "version": 40}
    return {**facts, "slices": 40, "samples": 640, "address": "10.0.0.7", **more}


def event(at_s: float, kind: str, subject: str, text: str, version: int) -> Event:
    """An event so many seconds after the begin."""
    return Event(at_s=BEGUN_S + at_s, kind=kind, subject=subject, text=text, version=version)


EVENTS = [
    event(0, "begun", "", "the job begins, mode sync", 0),
    event(1, "joined", "worker-0", "worker-0 joined", 0),
    event(1, "joined", "worker-1", "worker-1 joined", 0),
    event(5, "lost", "worker-1", "worker-1 is lost: its process is gone", 20),
    event(7.5, "joined", "worker-1", "worker-1 joined", 26),
    event(9, "left", "worker-1", "worker-1 left", 40),
]


def run(name: str = "worker-0", **changes: Any) -> Report:
    """A synchronous run that lost a worker; ``name``: of its other worker."""
    loss = Curve(name="loss", points=[CurvePoint(step=n, at_s=BEGUN_S + n / 4, value=2.0 - n / 25) for n in range(40)])
    status = {
        "job": "digits",
        "state": "training",
        "reason": "",
        "sentence": "Job digits is training in synchronous mode with 2 workers and 2 servers.",
        "mode": "sync",
        "version": 40,
        "losses": 1,
        "processes": [worker(name), worker("worker-1")],
    }
    found = Report(
        job="digits",
        made_at_s=BEGUN_S + 13,
        outcome=Outcome(kind="done", sentence="It made 40 steps.", exit_code=0),
        status=status,
        summary=SUMMARY,
        events=EVENTS,
        moments=[Moment(at_s=BEGUN_S + n, version=4 * n, samples_per_s=100.0 + n) for n in range(10)],
        curves=[Curve(name="accuracy", points=loss.points[:5]), loss],
        ledger=Ledger(
            version=40,
            timeline=0,
            epochs=[
                LedgerEpoch(epoch=0, samples=640, once=640, twice=0, never=0, skipped=0, workers={name: 40}, slices={})
            ],
        ),
        settings=[
            Setting(key="training.seed", value="3", origin="flag", description=""),
            Setting(key="log.level", value="info", origin="default", description=""),
        ],
        versions={"paramserver": "0.1.0", "torch": "2.13.0"},
        host="gpu-7",
    )
    return found.model_copy(update=changes)


def slowed() -> dict[str, Any]:
    """The status of a run in which a worker was slow, with where the time went."""
    phases = {"data": 8.0, "compute": 3.0, "send": 0.5, "wait": 0.2, "receive": 0.1, "other": 0.0, "gc": 0.1}
    worst = [
        {
            "step": 812 + n,
            "waited_s": 3.4,
            "member": "worker-1",
            "cause": "its data loader",
            "sentence": f"step {812 + n} waited 3.4 s for slice 5 on worker-1, 3.1 s of them in its data loader",
            "at_s": BEGUN_S + 8,
        }
        for n in range(12)
    ]
    chronic = "worker-1 held up 28 of the last 32 steps, 61 % of their time, for its data loader"
    processes = [worker("worker-0", phases=phases), worker("worker-1", phases={**phases, "data": 30.0})]
    return {**run().status, "blame": [chronic], "waits": {"worst": worst}, "processes": processes}
