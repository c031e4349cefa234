"""The output of a process as a terminal would show it: progress bars stay one row, lines stay whole."""

from __future__ import annotations

import pytest

from paramserver.processes import rows as rows_module
from paramserver.processes.rows import Rows


def made() -> tuple[Rows, list[str]]:
    lines: list[str] = []
    return Rows("w", lambda name, text: lines.append(f"{name}|{text}")), lines


def test_lines_are_finished_when_they_end() -> None:
    rows, lines = made()
    rows.feed("one\ntwo für\r\n\nthr".encode())
    assert (lines, rows.bars) == (["w|one", "w|two für", "w|"], [])
    rows.feed(b"ee")
    rows.end()
    assert lines[3:] == ["w|three"]


def test_a_bar_is_finished_by_the_line_after_it() -> None:
    rows, lines = made()
    rows.feed(b"\r10%")
    rows.feed(b"\r20% ")
    assert (lines, rows.bars) == ([], ["20%"])
    rows.feed(b"\n")
    assert (lines, rows.bars) == ([], ["20%"]), "a nested bar may go up to it again"
    rows.feed(b"hello\n")
    assert (lines, rows.bars) == (["w|20%", "w|hello"], [])


def test_a_shorter_state_leaves_the_rest_of_the_longer_one() -> None:
    """So does a terminal."""
    rows, lines = made()
    rows.feed(b"loading 100\rloaded  ")
    rows.end()
    assert lines == ["w|loaded  100"]


# Written by tqdm 4.70 for two nested loops, the inner one with leave=False.
NESTED = (
    b"\router 0/2\n\rinner 0/2\x1b[A\n\rinner 1/2\x1b[A\n\rinner 2/2\x1b[A\n\r         \x1b[A\router 1/2"
    b"\n\rinner 0/2\x1b[A\n\rinner 1/2\x1b[A\n\rinner 2/2\x1b[A\n\r         \x1b[A\router 2/2\router 2/2\nafter\n"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_nested_bars_of_tqdm_in_any_pieces(size: int) -> None:
    rows, lines = made()
    seen = set()
    for start in range(0, len(NESTED), size):
        rows.feed(NESTED[start : start + size])
        seen.add(tuple(rows.bars))
    assert lines == ["w|outer 2/2", "w|after"]
    assert rows.bars == []
    if size == 1:
        assert ("outer 1/2", "inner 1/2") in seen


def test_bytes_that_are_no_text_and_characters_in_two_pieces() -> None:
    rows, lines = made()
    for piece in (b"\xff\xc3", b"\xbc\xe2", b"\x82"):
        rows.feed(piece)
    rows.end()
    assert lines == ["w|\\xffü\\xe2\\x82"]


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line without an end is passed on in pieces; bars below each other are finished from the top."""
    monkeypatch.setattr(rows_module, "LONGEST", 4)
    rows, lines = made()
    rows.feed(b"abcdefghij\n")
    assert lines == ["w|abcd", "w (the same line goes on)|efgh", "w (the same line goes on)|ij"]
    rows, lines = made()
    for number in range(20):
        rows.feed(f"\r{number}\n".encode())
    assert len(rows.bars) < 9
    assert lines[:2] == ["w|0", "w|1"]
