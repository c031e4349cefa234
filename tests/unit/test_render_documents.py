"""The commands of paramserver in rendered files are commands that it has."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.unit.pages import ROOT, command_in, complaint
from tests.support.unit.pages import commands as commands_of_page

DOCUMENTS = sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file())


def commands(text: str) -> list[list[str]]:
    """The words of each paramserver command that a unit runs, or a comment shows."""
    lines = [line for line in text.replace("\\\n", " ").split("\n") if line.startswith(("#  ", "ExecStart="))]
    return [words for line in lines if (words := command_in(line.removeprefix("# ").strip())) is not None]


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
    found = list(commands_of_page((ROOT / "docs" / "deploy.md").read_text()))
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
