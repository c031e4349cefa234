"""Bytes that come in pieces become lines, and nothing is left out."""

from __future__ import annotations

import random

import pytest

from paramserver.processes.lines import Lines


def cut(*pieces: bytes, longest: int = 1 << 20) -> list[tuple[bool, str]]:
    lines = Lines(longest)
    return [*(line for piece in pieces for line in lines.feed(piece)), *lines.end()]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ((), []),
        ((b"one\n",), ["one"]),
        ((b"one\ntwo",), ["one", "two"]),
        ((b"\n\n",), ["", ""]),
        ((b"with\r\n", b"both\r", b"\n"), ["with", "both"]),
        ((b"10%\r20%\r30%\n",), ["10%\r20%\r30%"]),
        (("für".encode()[:2], "für".encode()[2:], b"\n"), ["für"]),
        ((b"\xff\x00\xfe\n",), ["\\xff\x00\\xfe"]),
        ((b"half \xc3\n", b"next\n"), ["half \\xc3", "next"]),
        ((b"half \xc3",), ["half \\xc3"]),
    ],
)
def test_lines(pieces: tuple[bytes, ...], expected: list[str]) -> None:
    assert cut(*pieces) == [(False, text) for text in expected]


def test_a_line_over_the_limit_comes_in_pieces_that_say_so() -> None:
    assert cut(b"abcdefgh", b"ij\nk\n", longest=4) == [(False, "abcd"), (True, "efgh"), (True, "ij"), (False, "k")]
    # A character is not cut in two.
    assert cut("xxxü".encode(), b"y\n", longest=4) == [(False, "xxx"), (True, "üy")]


@pytest.mark.parametrize("seed", range(20))
def test_however_it_is_cut_nothing_is_left_out(seed: int) -> None:
    numbers = random.Random(seed)
    text = "".join(numbers.choice("ab\n\r ü€😀") for _ in range(400)).replace("\r\n", "\n")
    data = text.encode()
    cuts = sorted(numbers.randrange(len(data)) for _ in range(30))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    found = ""
    for goes_on, line in cut(*pieces, longest=numbers.choice([5, 17, 1000])):
        found = found[:-1] + line + "\n" if goes_on else found + line + "\n"
    wanted = "\n".join(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")) + "\n"
    assert found == wanted
