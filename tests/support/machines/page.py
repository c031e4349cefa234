"""Commands of docs/deploy.md, as readers copy them: from examples, and from the table of what dies."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "deploy.md"
TABLE = "What dies, what happens, what you do"


def section(title: str) -> str:
    """The text of a section."""
    _, found, rest = PAGE.read_text().partition(f"\n## {title}\n")
    assert found, title
    return rest.partition("\n## ")[0]


def examples(title: str) -> list[str]:
    """The examples of a section, each of one or more commands."""
    return re.findall(r"^```\n(.*?)^```$", section(title), re.MULTILINE | re.DOTALL)


def rows() -> dict[str, list[str]]:
    """The table: what dies, and the commands that a person then types."""
    found = {}
    for line in section(TABLE).splitlines():
        if line.startswith("| ") and not line.startswith("| what dies"):
            dies, _, do = line.strip("| ").split(" | ")
            found[dies] = re.findall(r"`(paramserver [^`]*)`", do)
    return found
