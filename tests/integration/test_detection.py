"""How soon a worker is missed that is killed, hangs, or gets nowhere; and that the others go on to the same result."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paramserver.cli.look.facts import describe
from paramserver.machine.jobs import fetch_status
from tests.support.integration.harness import SCRIPTS, Place, place_fixture, read_summary, status_of, until

STOPS = SCRIPTS / "stops.py"
SLICES_PER_STEP = 4
# Short, so that the tests are: by default 5 s of silence, or 8 s without a slice.
LEASE_S, STALL_S = 1.5, 1.5
# A report every half second, a look every 0.2 s, and a busy machine.
SLACK_S = 2.0
SAME = ("weights_sha256", "buffers_sha256", "optimizer_sha256", "steps", "samples", "contributions_applied")


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.fixture(scope="module")
def wanted() -> Iterator[dict[str, Any]]:
    """The result without faults."""
    with Place() as place:
        path = place.work / "alone.json"
        environ = {
            "PARAMSERVER_RUN__SUMMARY": str(path),
            "PARAMSERVER_TRAINING__SLICES_PER_STEP": str(SLICES_PER_STEP),
        }
        place.python(STOPS, environ=environ).check()
        yield read_summary(path)


@pytest.mark.parametrize(
    ("how", "seen_as", "within_s"),
    [
        ("killed", "replaced", 2.0),
        pytest.param("stopped", "failed", LEASE_S + SLACK_S, marks=pytest.mark.long),
        pytest.param("gil", "failed", LEASE_S + SLACK_S, marks=pytest.mark.long),
        pytest.param("loader", "stuck", STALL_S + SLACK_S, marks=pytest.mark.long),
    ],
)
def test_a_worker_that_stops_is_missed_in_time(
    place: Place, wanted: dict[str, Any], how: str, seen_as: str, within_s: float
) -> None:
    hurry, path = place.work / "hurry", place.work / "summary.json"
    job = place.launch(
        "run",
        STOPS,
        *("--servers", "1", "--workers", "2", "--slices-per-step", str(SLICES_PER_STEP), "--store", "memory"),
        *("--set", f"cluster.lease_s={LEASE_S}", "--set", f"cluster.stall_s={STALL_S}", "--summary", path),
        *("--", "--hurry", hurry, "--how", how if how in ("gil", "loader") else "not"),
    )
    job.wait_for(r"worker-1 \| stops now" if how in ("gil", "loader") else r"worker-1 \| is in its third slice")
    status = status_of(job)
    (address,) = [p["address"] for p in status["processes"] if p["role"] == "coordinator"]
    pid = next(p["pid"] for p in status["processes"] if p["name"] == "worker-1")

    def states() -> list[str]:
        """What the status says of the worker. A process that is killed is forked anew before it counts as failed."""
        rows = [
            p
            for p in describe(fetch_status(address, security=place.security(address)))["processes"]
            if p["name"] == "worker-1"
        ]
        return [p["state"] if p["pid"] == pid else "replaced" for p in rows]

    begun = time.monotonic()
    if how in ("killed", "stopped"):
        os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    until(f"it is {seen_as}", lambda: seen_as in states(), within_s)
    print(f"{how}: {seen_as} after {time.monotonic() - begun:.2f} s")
    if how == "stopped":
        os.kill(pid, signal.SIGCONT)
        until("it is a member again", lambda: "training" in states(), 20.0)
    elif how == "loader":
        os.kill(pid, signal.SIGTERM)  # nothing else ends it
    hurry.touch()
    done = job.wait()
    summary = read_summary(path)
    assert {key: summary[key] for key in SAME} == {key: wanted[key] for key in SAME}, done.text
