"""The help of commands: an example that parses, kinds and defaults; and the page about settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from paramserver.cli.examples import EXAMPLES
from paramserver.cli.main import build_app, listens, main, split_script_arguments
from paramserver.config import FIELDS

ROOT = Path(__file__).parents[2]


def commands(app: App, path: tuple[str, ...] = ()) -> Iterator[str]:
    """All commands that do something, such as "start server"."""
    below = [name for name in app if not name.startswith("-")]
    if not below:
        yield " ".join(path)
    for name in below:
        yield from commands(app[name], (*path, name))


def test_every_command_has_an_example() -> None:
    assert set(EXAMPLES) == set(commands(build_app()))


def test_examples_parse() -> None:
    app = build_app()
    for command, text in EXAMPLES.items():
        program, *tokens = shlex.split(text.partition(" > ")[0].removeprefix("srun --ntasks 7 "))
        assert program == "paramserver"
        assert tokens[: len(command.split())] == command.split()
        app.parse_args(split_script_arguments(tokens)[0], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("command", ["run", "start server", "status", "config show", "certs init"])
def test_the_help_ends_with_the_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert capsys.readouterr().out.split()[-len(EXAMPLES[command].split()) :] == EXAMPLES[command].split()


def test_the_help_shows_kinds_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--workers INT Workers that share the data. [default: 2]" in out
    assert "--mode sync|async " in out
    assert "--staleness INT|unbounded " in out


@pytest.mark.parametrize("command", sorted(EXAMPLES))
def test_the_help_says_of_no_value_only_that_it_is_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    said = re.findall(r"(--[a-z-]+) STR\b", capsys.readouterr().out)
    assert not said, f"give them a kind with `cli.common.shows`: {said}"


def test_config_show_says_what_each_setting_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show"]) == 0
    out = capsys.readouterr().out
    assert "\n# Servers that share the model.\nservers = 1\n" in out
    said = " ".join(line.removeprefix("# ") for line in out.splitlines() if line.startswith("# "))
    assert [key for key, field in FIELDS.items() if " ".join((field.description or "-").split()) not in said] == []


def test_the_page_about_settings_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "page"]) == 0
    page = (ROOT / "docs/settings.md").read_text()
    assert capsys.readouterr().out == page, "type: paramserver config page > docs/settings.md"


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("start coordinator", True),
        ("start server --restart", True),
        ("start worker --with-server", True),
        ("start worker --restart", False),
        ("status", False),
        ("", False),
    ],
)
def test_processes_that_are_called_keep_the_notes_of_grpc(tokens: str, expected: bool) -> None:
    """These notes are the only place that says why a handshake has failed."""
    assert listens(tokens.split()) is expected
