"""ps.launch: workers that are forked of a program call one of its functions."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.integration.harness import SCRIPTS, Place, place_fixture


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def test_workers_call_a_function_of_the_program(place: Place) -> None:
    """They die and fail as those of `run`, and have nothing of the program's own end."""
    done = place.python(SCRIPTS / "launches.py").check()
    digests = re.findall(r"^(well|dies) torch\.Size\(\[1, 4\]\) (\w{64})$", done.out, re.MULTILINE)
    assert [how for how, _ in digests] == ["well", "dies"], done.text
    assert digests[0][1] == digests[1][1]
    assert "worker-1 was killed by signal 9; its slices go to the others" in done.out
    assert "dashboard at http://" in done.out
    assert "failed: worker-0 failed: ValueError: a mistake\n" in done.out
    assert 'launches.py", line' in done.out.partition("failed: worker-0 failed")[2]
    assert done.out.count("the program has ended") == 1
    assert (place.work / "unwritten.txt").read_text() == "once\n"
    assert place.processes() == {}
    assert place.leftovers() == []
