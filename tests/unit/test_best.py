"""Which checkpoints are the best: the ranking, and the file that names them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paramserver.checkpoint import best as file
from paramserver.checkpoint.best import Ranked
from paramserver.checkpoint.names import BEST
from paramserver.checkpoint.place import Place
from paramserver.core.records.best import Best


def ranked(lowest: bool = True, keep: int = 2) -> Best:
    """Checkpoints of versions 4 to 20 with values."""
    best = Best(lowest, keep)
    for version, value in ((4, 5.0), (8, 2.0), (12, 3.0), (16, 2.0), (20, 9.0)):
        best.saved((0, version))
        best.hear((0, version), value)
    return best


@pytest.mark.parametrize(("lowest", "first"), [(True, [(0, 8), (0, 16)]), (False, [(0, 20), (0, 4)])])
def test_the_lowest_or_the_highest_values_of_equal_ones_the_earlier(lowest: bool, first: list[tuple[int, int]]) -> None:
    best = ranked(lowest)
    assert [place for place, _ in best.ranking()] == first
    assert best.kept(0.0) == set(first)


def test_a_value_counts_for_the_checkpoint_of_its_version_whichever_comes_first() -> None:
    best = Best(True, 1)
    assert not best.hear((0, 4), 1.0), "it is no checkpoint yet"
    assert best.ranking() == []
    assert best.saved((0, 4))
    best.saved((0, 8))
    assert best.hear((0, 8), 0.5)
    best.hear((0, 9), 0.1)
    assert best.ranking() == [((0, 8), 0.5)], "version 9 is no checkpoint"


def test_nan_and_infinite_values_are_never_the_best() -> None:
    best = Best(True, 3)
    for version, value in ((1, math.nan), (2, -math.inf), (3, 1.0)):
        best.saved((0, version))
        best.hear((0, version), value)
    assert [place for place, _ in best.ranking()] == [(0, 3)]


def test_values_of_a_history_that_was_undone_are_forgotten() -> None:
    best = ranked()
    best.undone(12)
    assert best.ranking() == [((0, 8), 2.0), ((0, 12), 3.0)]
    best.saved((1, 16))
    best.hear((1, 16), 1.0)
    assert best.ranking()[0] == ((1, 16), 1.0)
    best.restore({(0, 20): 0.1, (0, 3): 0.2})
    assert best.ranking()[0] == ((0, 3), 0.2), "what an earlier coordinator knew of versions that were undone since"


def test_checkpoints_whose_value_may_still_come_stay_but_not_for_ever() -> None:
    best = Best(True, 1)
    for version in (4, 8, 12, 16, 20):
        best.awaits((0, version), 0.0)
        best.saved((0, version))
    assert len(best.kept(29.0)) == 5
    assert best.kept(31.0) == {(0, 12), (0, 16), (0, 20)}
    best.hear((0, 4), 1.0)
    assert best.kept(31.0) == {(0, 4), (0, 12), (0, 16), (0, 20)}, "it came late, and the checkpoint is still there"
    best.removed([(0, 8), (0, 4)])
    assert best.ranking() == []


def test_values_of_versions_that_are_no_checkpoints_do_not_pile_up() -> None:
    best = Best(True, 1)
    best.saved((0, 1))
    best.hear((0, 1), 1.0)
    for version in range(2, 5000):
        best.hear((0, version), 1.0)
    assert len(best._values) <= 1001
    assert best.ranking() == [((0, 1), 1.0)]


def test_the_file(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    assert file.read(place) == []
    rows = [Ranked("step-00000008-t0", "a1", "val/loss", 0.25), Ranked("step-00000004-t1", "a1", "val/loss", 0.5)]
    file.write(place, rows)
    assert file.read(place) == rows


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"best": 3}',
        '{"best": [{"name": "../x", "history": "", "metric": "m", "value": 1}]}',
        '{"best": [{"name": "step-00000008-t0", "history": "", "metric": "m", "value": "x"}]}',
        '{"best": [{"name": 1, "history": "", "metric": "m", "value": 1}]}',
        '{"best": [{"name": "step-00000008-t0", "history": "", "metric": "\\u001b[2J", "value": 1}]}',
    ],
)
def test_a_file_that_makes_no_sense_names_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / BEST).write_text(text)
    assert file.read(Place(str(tmp_path))) == []
