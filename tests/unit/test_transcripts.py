"""Transcripts of what the pure cores do, in tests/testdata: see docs/testing.md for how to read and rewrite them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.transcripts.cores import Cores
from tests.support.transcripts.files import replayed

FOLDER = Path(__file__).parents[1] / "testdata"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    """A message or a state that differs is a line that differs."""
    text = path.read_text()
    now = replayed(text, Cores().run)
    if request.config.getoption("--rewrite"):
        path.write_text(now)
    else:
        assert text.splitlines() == now.splitlines(), "read the difference; if it is right: pytest ... --rewrite"


def test_the_rows_of_the_failure_table_have_one() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == {
        "killed_server",
        "killed_worker",
        "mode_change",
        "synchronous_step",
        "takeover",
        "work_stealing",
    }


def test_another_output_is_a_difference() -> None:
    text = "join worker\n----\ncoordinator: worker-0 is member 7\n"
    assert replayed(text, Cores().run) != text


def test_a_block_without_its_line_is_refused() -> None:
    with pytest.raises(ValueError, match="no line ----"):
        replayed("join worker\n", Cores().run)


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(ValueError, match="'jion'"):
        replayed("jion worker\n----\n", Cores().run)
