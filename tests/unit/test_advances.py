"""In which order the schedulers of one optimizer advance, forwards and after going back."""

from __future__ import annotations

import pytest

from paramserver import errors
from paramserver.core.versions.advances import Advance, Advances, Advancing, Back, Call, decode
from paramserver.core.versions.ways import Place, Way, forms


def moves(line: Advancing, position: int, epochs: int, begun: bool = False) -> list[int | str]:
    """The numbers of the schedulers that advance, and "back"."""
    return ["back" if isinstance(move, Back) else move.number for move in line.to(position, epochs, begun)]


def between(number: int, epochs: int, position: int) -> Call:
    return Call(number, epochs, position)


# ---- as text


@pytest.mark.parametrize(
    ("advances", "text"),
    [
        *(
            (Advances(), ";"),
            (Advances((0,)), "0;"),
            (Advances((2, 0), (1, 31)), "2 0;1 31"),
            (Advances((), (3,)), ";3"),
        ),
        (Advances((2, 0), (), ((0, Way(before=True)), (2, Way(form=4)))), "2 0;;0 1 2 8"),
    ],
)
def test_as_text_and_back(advances: Advances, text: str) -> None:
    assert advances.encode() == text
    assert decode(text) == advances


def test_an_empty_text_says_nothing() -> None:
    assert decode("") is None


@pytest.mark.parametrize(
    "text",
    [
        *("0", "0;1;2", "32;", "-1;", "a;", "0 0;", ";1 1", "0  1;", " 0;", "²;", "0;" + "1 " * 300, "0,1;"),
        *("0;;", "0;;0", "0;;0 0", "0;;0 10", "0;;1 1", "0;;0 1 0 1", "1 0;;1 1 0 1", "0;;0 1;"),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(errors.ProtocolError):
        decode(text)


def test_a_scheduler_is_named_once() -> None:
    assert Advances().with_per_step(1).with_per_step(0).with_per_step(1) == Advances((1, 0))
    assert Advances().with_between(1).with_between(1) == Advances((), (1,))


# ---- forwards


def test_each_update_advances_the_schedulers_in_the_order_of_the_script() -> None:
    line = Advancing()
    line.advance_in_steps((1, 0))
    assert moves(line, 2, 0) == [1, 0, 1, 0]
    assert moves(line, 2, 0) == []
    assert moves(line, 3, 0) == [1, 0]


def test_a_scheduler_of_the_head_has_advanced_when_the_update_begins() -> None:
    line = Advancing()
    line.advance_in_steps((1,), before=(0,))
    assert moves(line, 0, 0, begun=True) == [0]
    assert moves(line, 1, 0, begun=True) == [1, 0]
    assert moves(line, 2, 0) == [1]
    line.record(between(5, 1, 2))
    assert moves(line, 2, 1, begun=True) == [5, 0]
    assert moves(line, 1, 0) == ["back", 0, 1]


def test_each_update_says_its_number() -> None:
    line = Advancing()
    line.advance_in_steps((1,), before=(0,))
    told = [(move.number, move.update) for move in line.to(2, 0) if isinstance(move, Advance)]
    assert told == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_another_value_begins_anew() -> None:
    line = Advancing()
    line.advance_in_steps((0,))
    line.begin_anew()
    assert moves(line, 1, 0) == [0]
    line.begin_anew()
    assert moves(line, 1, 0) == ["back", 0]


OWN, JOB = Place(1, 2), Place(1, 3)


@pytest.mark.parametrize(
    ("given", "found"),
    [(1 + 2 / 6, [1]), (1 + 3 / 6, [2, 1]), (1 + 4 / 6, [2]), (8, [3]), (9, [4, 3]), (10, [4]), (8.0, []), (1.01, [])],
)
def test_the_form_of_a_value(given: float, found: list[int]) -> None:
    """The script's own count of batches comes first."""
    assert forms(given, [OWN, JOB], 6) == found
    assert all(any(Way(form=form).value(place, 6) == given for place in (OWN, JOB)) for form in found)


def test_without_a_loader_there_are_only_counts() -> None:
    assert forms(2.0, [Place(0, 2)], 0) == []
    assert forms(2, [Place(0, 2)], 0) == [3]


def test_a_call_between_epochs_comes_after_the_updates_before_it() -> None:
    line = Advancing()
    line.advance_in_steps((0,))
    line.record(between(1, 1, 2))
    line.record(between(1, 2, 4))
    assert moves(line, 5, 2) == [0, 0, 1, 0, 0, 1, 0]


def test_a_later_epoch_waits() -> None:
    line = Advancing()
    line.record(between(0, 1, 2))
    line.record(between(0, 2, 4))
    assert moves(line, 2, 1) == [0]
    assert moves(line, 4, 2) == [0]


def test_without_schedulers_of_steps_calls_are_made_at_once() -> None:
    line = Advancing()
    line.record(between(1, 1, 8))
    line.record(between(0, 1, 8))
    assert moves(line, 3, 1) == [1, 0]


def test_what_a_call_gives_comes_with_the_move() -> None:
    line = Advancing()
    call = Call(0, 1, 2, "given")
    line.record(call)
    assert list(line.to(2, 1)) == [Advance(0, call)]


# ---- back


def test_going_back_begins_anew_and_repeats_the_earlier_calls() -> None:
    line = Advancing()
    line.advance_in_steps((0,))
    line.record(between(1, 1, 2))
    line.record(between(1, 2, 4))
    moves(line, 5, 2)
    assert moves(line, 3, 1) == ["back", 0, 0, 1, 0]
    assert moves(line, 4, 2) == [0, 1], "the call of the second epoch was kept"


def test_forgotten_calls_are_made_by_the_script_once_more() -> None:
    line = Advancing()
    for epochs in (1, 2, 3):
        line.record(between(0, epochs, 2 * epochs))
    moves(line, 6, 3)
    line.forget(1)
    assert moves(line, 2, 1) == ["back", 0]
    line.record(between(0, 2, 4))
    assert moves(line, 4, 2) == [0]


def test_forgetting_calls_that_were_not_made_changes_nothing() -> None:
    line = Advancing()
    line.record(between(0, 1, 2))
    line.forget(0)
    assert moves(line, 2, 1) == []


def test_a_call_for_an_earlier_place_puts_all_in_order() -> None:
    line = Advancing()
    line.advance_in_steps((0,))
    moves(line, 3, 0)
    line.record(between(1, 1, 2))
    assert moves(line, 3, 1) == ["back", 0, 0, 1, 0]


def test_another_order_of_the_steps_begins_anew() -> None:
    line = Advancing()
    line.advance_in_steps((0,))
    moves(line, 1, 0)
    line.advance_in_steps((0, 1))
    assert moves(line, 1, 0) == ["back", 0, 1]


def test_a_call_inside_of_an_epoch_is_forgotten_when_the_job_goes_back_behind_it() -> None:
    line = Advancing()
    for position in (1, 2, 3):
        line.record(Call(0, 0, position, inside=True))
        assert moves(line, position, 0) == [0]
    assert moves(line, 2, 0) == ["back", 0, 0]
    line.record(Call(0, 0, 3, inside=True))
    assert moves(line, 3, 0) == [0]
