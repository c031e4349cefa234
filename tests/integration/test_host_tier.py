"""Four workers of one host pull once, in real processes: same bits, also when the one that pulls is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.integration.harness import Place, Running, place_fixture, read_summary, status_of, until
from tests.support.integration.roles import TRAIN, reference, same_result

pytestmark = pytest.mark.long

SIZES = ("--servers", "2", "--workers", "4", "--slices-per-step", "4", "--set", "cluster.transport=bulk")
SCRIPT = ("--wide", "--epochs", "3", "--optimizer", "adamw")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    yield from place_fixture()


@pytest.fixture(scope="module")
def wanted(place: Place) -> dict[str, Any]:
    """The result of the script alone."""
    return reference(place, *SCRIPT)


def keeper_of(job: Running, others: int) -> dict[str, Any] | None:
    """The worker that pulls for so many others, as the status shows it."""
    tier = f"pulls weights for {others} other workers of its host"
    return next((one for one in status_of(job)["processes"] if one["host_tier"] == tier and not one["gone"]), None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_worker_that_pulls_is_killed(place: Place, wanted: dict[str, Any], number: signal.Signals) -> None:
    path, hurry = place.work / f"{number.name}.json", place.work / f"hurry-{number.name}"
    folder = place.work / f"meeting-{number.name}"
    folder.mkdir()
    flags = (*SIZES, "--set", f"cluster.meeting_dir={folder}", "--summary", path)
    job = place.launch("run", TRAIN, *flags, "--", *SCRIPT, "--pace", "0.3", "--hurry", hurry)
    job.wait_for(r"rank \d of 4 trains", count=4)
    keeper = until("a worker pulls for three", lambda: keeper_of(job, 3), 60.0)
    assert keeper is not None
    os.kill(keeper["pid"], number)
    if number == signal.SIGKILL:
        until("another one pulls", lambda: (keeper_of(job, 3) or keeper)["pid"] != keeper["pid"], 60.0)
    else:
        until("its slices go to others", lambda: status_of(job)["version"] >= keeper["version"] + 2, 60.0)
        os.kill(keeper["pid"], signal.SIGCONT)
    hurry.touch()
    job.wait().check()
    same_result(read_summary(path), wanted)
    assert left(folder) == []


def test_a_directory_that_cannot_be_used_is_said_once(place: Place, wanted: dict[str, Any]) -> None:
    path = place.work / "missing.json"
    flags = (*SIZES, "--set", f"cluster.meeting_dir={place.work / 'missing'}", "--summary", path)
    done = place.launch("run", TRAIN, *flags, "--", *SCRIPT).wait().check()
    assert done.text.count("this worker does not share the pulls of its host") == 4
    same_result(read_summary(path), wanted)


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
