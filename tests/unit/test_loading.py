"""Who is waited for in a load, and what is refused."""

from __future__ import annotations

import pytest

from paramserver.core.work.loading import Agreement, Load, Place

ONE, TWO = Load(Place(0, 1), "a"), Load(Place(2, 1), "b")


def test_it_is_agreed_once_all_have_called_it() -> None:
    loads = Agreement()
    assert not loads.call(1, ONE, [1, 2, 3])
    assert loads.agreed([1, 2, 3]) is None
    assert not loads.call(1, ONE, [1, 2, 3])  # again
    assert not loads.call(2, ONE, [1, 2, 3])
    assert loads.missing([1, 2, 3]) == [3]
    assert not loads.call(3, ONE, [1, 2, 3])
    assert loads.agreed([1, 2, 3]) == ONE
    loads.complete(ONE)
    assert not loads.pending
    assert loads.call(2, ONE, [1, 2, 3])


def test_who_is_lost_is_not_waited_for_and_who_comes_later_neither() -> None:
    loads = Agreement()
    loads.call(1, ONE, [1, 2])
    assert loads.missing([1, 2, 3]) == [2]
    assert loads.agreed([1, 3]) == ONE
    loads.gone(1)
    assert loads.agreed([3]) is None
    assert not loads.pending


def test_what_is_done_is_passed_but_for_other_content() -> None:
    loads = Agreement(done=TWO)
    assert loads.call(1, ONE, [1])
    assert loads.call(1, TWO, [1])
    with pytest.raises(ValueError, match="other content"):
        loads.call(1, Load(TWO.place, "c"), [1])
    assert not loads.call(1, Load(Place(2, 2), "c"), [1])


@pytest.mark.parametrize(
    ("other", "sentence"), [(Load(ONE.place, "z"), "different content"), (TWO, "different places")]
)
def test_a_refusal_is_told_to_all(other: Load, sentence: str) -> None:
    loads = Agreement()
    loads.call(1, ONE, [1, 2, 3])
    with pytest.raises(ValueError, match=sentence):
        loads.call(2, other, [1, 2, 3])
    assert loads.agreed([1, 2, 3]) is None
    for worker, load in ((1, ONE), (3, ONE)):
        if other.place == ONE.place:
            with pytest.raises(ValueError, match=sentence):
                loads.call(worker, load, [1, 2, 3])
