"""Which contributions a worker brings again to a shard that has moved."""

from __future__ import annotations

from paramserver.core.work.unpublished import Unpublished


def three() -> Unpublished[str]:
    """Two contributions to step 4, of which shard 1 has the first one only."""
    kept: Unpublished[str] = Unpublished()
    kept.counted(11, 4, 0, "a")
    kept.counted(11, 4, 1, "a")
    kept.counted(12, 4, 0, "b")
    return kept


def test_a_shard_gets_what_its_former_server_had_counted() -> None:
    assert three().moved(0) == ["a", "b"]
    assert three().moved(1) == ["a"]
    assert three().moved(2) == []


def test_what_is_on_its_way_again_is_not_brought_a_third_time() -> None:
    kept = three()
    kept.moved(0)
    assert kept.moved(0) == []
    kept.counted(12, 4, 0, "b")
    assert kept.moved(0) == ["b"]


def test_a_published_version_holds_its_contributions() -> None:
    kept = three()
    kept.published(4)
    assert kept.moved(1) == ["a"]
    kept.published(5)
    kept.published(3)
    assert kept.moved(0) == []


def test_a_late_answer_to_a_published_step_keeps_nothing() -> None:
    kept = three()
    kept.published(5)
    kept.counted(13, 4, 1, "c")
    kept.counted(14, 5, 1, "d")
    assert kept.moved(1) == ["d"]


def test_what_was_given_up_is_forgotten() -> None:
    kept = three()
    kept.dropped(11)
    kept.dropped(99)
    assert kept.moved(0) == ["b"]
