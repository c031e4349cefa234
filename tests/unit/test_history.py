"""The checker of what workers have seen: it accepts one history, and names each rule that another one breaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.support.faults import history
from tests.support.faults.history import Seen


def seen(who: str, at: float, version: int, timeline: int = 0, began: float = 0.0) -> Seen:
    """Two shards at one version, whose content is its number."""
    digests = f"a{version}", f"b{version}"
    return Seen(who, began, at, timeline, (version, version), digests, (float(version), float(version)), 1.0)


GOOD = [seen("w0", 1.0, 0), seen("w1", 1.5, 0), seen("w0", 2.0, 1), seen("w1", 2.5, 1), seen("w2", 4.0, 2, began=3.0)]


def test_one_history() -> None:
    assert history.problems(GOOD) == []
    assert history.problems(GOOD, twin=GOOD, most=None) == []
    assert history.problems(GOOD, most=1.0) == []
    assert history.problems([*GOOD, seen("w0", 5.0, 1, timeline=1), seen("w0", 6.0, 2, timeline=1)]) == []


def test_nothing_was_seen() -> None:
    assert history.problems([]) == ["no worker has written down what it saw"]


def test_two_contents_of_one_version() -> None:
    fork = replace(GOOD[3], digests=("a1", "x"))
    assert history.problems([*GOOD[:3], fork]) == ["version 1 of shard 1 is b1 at w0 and x at w1"]
    assert history.problems(GOOD[:3], twin=[fork]) == ["version 1 of shard 1 is x at w1 without faults and b1 at w0"]


def test_an_asynchronous_version_may_be_another_one_on_another_timeline() -> None:
    other = replace(seen("w1", 5.0, 1, timeline=1), digests=("a1", "x"))
    assert history.problems([*GOOD, other], most=1.0) == []
    assert history.problems([*GOOD, other]) != []


def test_a_worker_goes_back() -> None:
    assert history.problems([*GOOD, seen("w0", 5.0, 0)]) == ["w0 went back from versions (1, 1) to (0, 0)"]
    later = [*GOOD, seen("w0", 5.0, 1, timeline=1), seen("w0", 6.0, 2)]
    assert history.problems(later) == ["w0 went from timeline 1 to 0"]


def test_a_worker_that_begins_late_sees_what_others_have_seen() -> None:
    assert history.problems([*GOOD, seen("w3", 6.0, 1, began=5.0)]) == [
        "w3 began with (1, 1), after w2 had seen (2, 2)"
    ]
    assert history.problems([*GOOD, seen("w3", 6.0, 1, began=3.5)]) == []


def test_something_was_seen_that_does_not_count() -> None:
    twice = replace(GOOD[-1], most=2.0)
    assert history.problems([*GOOD[:-1], twice], most=1.0) == [
        "w2 saw a sample 2 times in (2, 2), and it counts 1 times"
    ]
    fewer = replace(GOOD[-1], sums=(0.0, 2.0))
    assert history.problems([*GOOD[:-1], fewer], most=1.0) == [
        "version 2 of shard 0 holds 0 samples, and version 1 holds 1"
    ]


def test_the_time_until_the_next_version() -> None:
    assert history.next_version(GOOD, 1.6) == 2.0
    assert history.next_version(GOOD, 2.2) == 4.0
    assert history.next_version(GOOD, 4.5) is None


def test_what_a_killed_process_has_written_is_read(tmp_path: Path) -> None:
    line = json.dumps([2.0, 0, [1, 1], ["a1", "b1"], [1.0, 1.0], 1.0])
    (tmp_path / "w0.jsonl").write_text(f"0.0\n{line}\n{line[:20]}")
    (tmp_path / "w1.jsonl").write_text("")
    assert history.read(tmp_path) == [GOOD[2]]
