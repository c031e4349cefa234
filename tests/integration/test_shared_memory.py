"""Shared memory between processes of a run: the bits are those of the script alone, and nothing of it is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.support.integration.harness import GONE_S, SCRIPTS, Place, place_fixture, read_summary, until

TRAIN = SCRIPTS / "train.py"
SAME = ("weights_sha256", "buffers_sha256", "optimizer_sha256", "steps", "contributions_applied")
SIZES = ("--servers", "2", "--workers", "2", "--slices-per-step", "4")


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def test_same_bits_as_the_script_alone(place: Place) -> None:
    """test_start.py does it over gRPC."""
    script = ("--epochs", "2", "--optimizer", "adamw")
    alone, shared = place.work / "alone.json", place.work / "shm.json"
    environ = {"PARAMSERVER_RUN__SUMMARY": str(alone), "PARAMSERVER_TRAINING__SLICES_PER_STEP": "4"}
    place.python(TRAIN, *script, environ=environ).check()
    flags = (*SIZES, "--set", "cluster.transport=shm", "--summary", shared)
    place.paramserver("run", TRAIN, *flags, "--", *script).check()
    found, wanted = read_summary(shared), read_summary(alone)
    assert {key: found[key] for key in SAME} == {key: wanted[key] for key in SAME}


def test_nothing_is_left_when_everything_is_killed_at_once(place: Place) -> None:
    run = ("run", TRAIN, *SIZES, "--set", "cluster.transport=shm", "--", "--pace", "0.2")
    running = place.launch(*run, environ=place.meeting_apart)
    running.wait_for(r"rank \d of 2 trains", count=2)
    for pid in place.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until("all processes are gone", lambda: not place.processes(), GONE_S)
    place.check_meetings()
