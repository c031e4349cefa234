"""The image installs what docker/hashes.txt names: everything that it needs, in the versions of constraints.txt."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
HASHES = ROOT / "docker" / "hashes.txt"


def versions(text: str) -> dict[str, str]:
    """Package to version, of lines such as a==1."""
    found = re.findall(r"^([A-Za-z][\w.-]*)==(\S+)", text, re.MULTILINE)
    return {str(canonicalize_name(name)): version.partition("+")[0] for name, version in found}


def needed(names: list[str]) -> Iterator[str]:
    """The packages that these requirements bring along on Linux, as they are installed here."""
    waiting, seen = [Requirement(name) for name in names], set[str]()
    while waiting:
        wanted = waiting.pop()
        name = str(canonicalize_name(wanted.name))
        extras = wanted.extras or {""}
        if name in seen or not (wanted.marker is None or any(wanted.marker.evaluate({"extra": one}) for one in extras)):
            continue
        seen.add(name)
        yield name
        for text in distribution(name).requires or ():
            further = Requirement(text)
            if further.marker is None or any(further.marker.evaluate({"extra": one}) for one in extras):
                waiting.append(Requirement(str(further).partition(";")[0]))


def test_each_package_of_the_image_has_hashes_and_the_version_of_the_constraints() -> None:
    text = HASHES.read_text()
    found, limits = versions(text), versions((ROOT / "constraints.txt").read_text())
    assert {name: limits.get(name) for name in found} == found, "run: make docker-hashes"
    entries = re.split(r"^(?=[A-Za-z])", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(found)
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in text


def test_nothing_that_the_image_needs_is_missing() -> None:
    """pip is told to install no more than the file names."""
    command = [sys.executable, str(ROOT / "docker/requirements.py"), "dashboard", "demo"]
    wanted = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    missing = set(needed(wanted)) - versions(HASHES.read_text()).keys()
    assert not missing, "run: make docker-hashes"
