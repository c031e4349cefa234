"""What scripts of `run` read from standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.integration.harness import SCRIPTS, Place, complaint, place_fixture
from tests.support.integration.paced import counts


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def test_each_worker_reads_all_that_comes_through_a_pipe(place: Place) -> None:
    command = [sys.executable, "-m", "paramserver", "run", str(SCRIPTS / "reads.py"), *counts(1, 2)]
    done = place.start("sh", "-c", 'printf "one\\ntwo\\n" | "$@"', "sh", *command).wait().check()
    for worker in range(2):
        assert f"worker-{worker} | reads ['one', 'two']\n" in done.out


def test_reading_from_a_terminal_fails(place: Place) -> None:
    """What one person types cannot be the data of several workers."""
    command = [sys.executable, "-m", "paramserver", "run", str(SCRIPTS / "reads.py"), *counts(1, 1)]
    spawned = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:], lambda fd: __import__('os').read(fd, 4096)) >> 8)"
    done = place.start(sys.executable, "-c", spawned, *command).wait()
    assert "the workers of a run cannot read what a person types" in " ".join(complaint(done, 2).split())
