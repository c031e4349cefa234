"""Random schedules of synchronous training: every version is each slice once, added up as the tree says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from paramserver.core.versions.consistency import History
from paramserver.core.versions.reduction import Node, Reducer
from tests.support.marks import long_but
from tests.support.schedules.steps import Steps

SCHEDULES, CASES = 8000, 8


def play(seeds: range, impatient: bool = False) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        total += Steps(seed, impatient).run()
    return total


@pytest.mark.parametrize("case", long_but([0], range(CASES)))
def test_every_version_is_the_one_sum_of_its_slices(case: int) -> None:
    """Members come, go and come too late; nodes of all sizes arrive late, twice, and long after their step."""
    total = play(range(case, SCHEDULES, CASES))
    least = {
        "accepted": 15_000,
        "duplicate": 3000,
        "repeated": 3000,
        "larger nodes": 1500,
        "mixed": 1000,  # versions made of some single slices and some larger nodes
        "join": 300,
        "die": 500,
        "evict": 300,
        "fenced": 500,
        "shards apart": 100,
    }
    assert not {what: total[what] for what, count in least.items() if total[what] < count}


def test_whoever_finds_the_shards_apart_takes_the_version_that_all_have() -> None:
    """C09: to wait for the newest version instead can mean to wait for ever.

    1. The only worker pushes all of step 0 to shard 0, which publishes version 1, and dies.
    2. The next worker finds shard 0 at version 1 and shard 1 at version 0.
    3. Shard 1 gets version 1 only if this worker computes step 0 again, on version 0.
    """
    with pytest.raises(AssertionError, match="nobody can move"):
        play(range(1000), impatient=True)


# ---- the campaign notices when a rule is broken


def no_check_for_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "has", lambda self, name: False)


def arrivals_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Reducer.add

    def add(self: Reducer, node: Node) -> tuple[Node, ...] | None:
        contained = right(self, node)
        if contained is None:
            self._covered += node[1] - node[0]
        return contained

    monkeypatch.setattr(Reducer, "add", add)
    monkeypatch.setattr(Reducer, "complete", property(lambda self: self._covered >= self.of))


def smaller_nodes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Reducer.add
    monkeypatch.setattr(Reducer, "add", lambda self, node: None if right(self, node) is None else ())


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], type[Exception], str]] = [
    (no_check_for_duplicates, AssertionError, "in version|nobody needs"),
    (arrivals_are_counted, Exception, "tile|no node|is no"),
    (smaller_nodes_stay, ValueError, "tile"),
]


@pytest.mark.parametrize(("mutant", "error", "message"), MUTANTS, ids=[mutant.__name__ for mutant, _, _ in MUTANTS])
def test_a_broken_core_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    with pytest.raises(error, match=message) as caught:
        play(range(1000))
    assert any("replay with Steps(" in note for note in caught.value.__notes__)
