"""The commands of paramserver in docs/deploy.md and in rendered files are commands that it has."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cyclopts import CycloptsError

from paramserver.cli.main import build_app, split_script_arguments

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "docs" / "deploy.md", *sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file())]
_COMMAND = re.compile(r"(?:^|\s|/|-- )(paramserver (?:[a-z].*))$")


def commands(text: str) -> list[list[str]]:
    """The words of each paramserver command that stands on a line of its own or at the end of one."""
    found = []
    fenced = False
    for line in text.replace("\\\n", " ").split("\n"):
        if line.startswith("```"):
            fenced = not fenced
        match = _COMMAND.search(line.removeprefix("# ").removeprefix("ExecStart="))
        commented_or_run = line.startswith(("#  ", "ExecStart="))
        if match and (fenced or commented_or_run):
            found.append(shlex.split(match[1], comments=True)[1:])
    return found


def complaint(words: list[str]) -> str:
    """What the command line has against the words; empty if nothing. Nothing is run."""
    own, _ = split_script_arguments(words)
    try:
        build_app().parse_args(own, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path: Path) -> None:
    for words in commands(path.read_text()):
        assert complaint(words) == "", f"paramserver {shlex.join(words)}"


def started(value: object) -> Iterator[list[str]]:
    """The words with which containers start paramserver."""
    if isinstance(value, dict):
        words = value.get("args", value.get("command"))
        if isinstance(words, list) and words[0] == "start":
            yield words
        for part in value.values():
            yield from started(part)
    elif isinstance(value, list):
        for part in value:
            yield from started(part)


@pytest.mark.parametrize("target", ["compose", "k8s", "jobset"])
def test_containers_start_roles(target: str) -> None:
    texts = [path.read_text() for path in sorted((ROOT / "deploy" / target).iterdir())]
    found = [words for text in texts for words in started(list(yaml.safe_load_all(text)))]
    assert sorted(words[1] for words in found) == ["coordinator", "server", "worker"]
    for words in found:
        assert complaint(words) == "", words


def test_the_reader_of_commands_sees_them_all() -> None:
    """The test above would pass on anything if this function were blind."""
    found = commands((ROOT / "docs" / "deploy.md").read_text())
    assert len(found) >= 15
    assert ["certs", "init", "./certs"] in found
    assert ["set", "consistency.mode=async"] in found
    units = "".join(path.read_text() for path in sorted((ROOT / "deploy" / "systemd").glob("*.service")))
    assert [words[:2] for words in commands(units)] == [
        ["start", "coordinator"],
        ["start", "server"],
        ["start", "worker"],
    ]
    assert ["status"] in commands((ROOT / "deploy" / "k8s" / "coordinator.yaml").read_text())
    assert complaint(["start", "server", "--jion", "a:8790"]) != ""
    assert complaint(["rendr", "k8s"]) != ""
