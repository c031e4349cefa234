"""Print what the image needs, one requirement a line: the project's dependencies, some extras, its build tools.

python docker/requirements.py [--build] [EXTRA ...]
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def requirements(pyproject: Path, extras: list[str], build: bool) -> list[str]:
    """The requirements in `pyproject`. Raises KeyError for an extra that it does not have."""
    tables = tomllib.loads(pyproject.read_text())
    found = list(tables["project"]["dependencies"])
    for extra in extras:
        found += tables["project"]["optional-dependencies"][extra]
    return found + (tables["build-system"]["requires"] if build else [])


def main() -> None:
    arguments = sys.argv[1:]
    extras = [argument for argument in arguments if not argument.startswith("--")]
    print("\n".join(requirements(PROJECT, extras, "--build" in arguments)))


if __name__ == "__main__":
    main()
