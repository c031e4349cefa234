"""Who may import whom. The rule is a table; the imports are read from the source, wherever they stand in a file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "paramserver"

LOWER = {"core", "errors", "failpoints"}
EDGES = {"tensors", "transport", "store"}
ROLES = {"coordinator", "server", "worker"}

# Part of the package -> parts it may import, besides itself. Nothing imports cli.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "core": {"errors"},  # the tree of errors is names only
    "failpoints": set(),
    "kernels": set(),  # compiled arithmetic
    "v1": set(),
    "checkpoint": LOWER | {"tensors", "v1", "config"},
    "tensors": LOWER | {"v1"},
    "compress": LOWER | {"tensors", "v1"},
    "transport": LOWER | {"tensors", "v1"},  # names of element types, limits of frames
    "store": LOWER,
    "coordinator": LOWER | EDGES | {"config", "v1", "checkpoint"},
    "server": LOWER | EDGES | {"config", "v1", "checkpoint", "compress", "kernels"},
    "worker": LOWER | EDGES | {"config", "v1", "checkpoint", "compress"},
    "testing": LOWER | EDGES | ROLES | {"config", "v1", "checkpoint"},
    "local": LOWER | EDGES | ROLES | {"config", "v1", "testing", "checkpoint"},
    # Calibration alone needs more than the core: it measures transport and arithmetic, and a script of its own.
    "simulate": LOWER | {"__init__", "config", "tensors", "transport", "v1"},
    "cli": LOWER | EDGES | ROLES | {"config", "v1", "testing", "local", "checkpoint", "simulate"},
    "__init__": LOWER | EDGES | ROLES | {"config", "v1", "local"},
    "__main__": {"cli"},
}
# From the standard library, what the core must not touch: time, chance, surroundings, input and output.
# fmt: off
IMPURE = {
    "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib",
    "queue", "random", "secrets", "select", "selectors", "signal", "socket", "ssl", "subprocess",
    "sys", "tempfile", "threading", "time", "uuid", "warnings",
}
# fmt: on


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "v1" not in path.relative_to(PACKAGE).parts)


def part_of(module: str) -> str:
    """ "paramserver.core.plan" belongs to "core"; the package itself to "__init__"."""
    return module.split(".")[1] if "." in module else "__init__"


def imported_modules(path: Path) -> Iterator[str]:
    """Absolute names of all modules that a file imports; "from paramserver import x" counts as paramserver.x."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "paramserver":
                yield from (f"paramserver.{alias.name}" for alias in node.names)
            else:
                yield module


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_rule(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert part in ALLOWED, f"say in ALLOWED what {part} may import"
    for module in imported_modules(path):
        if module.split(".")[0] == "paramserver":
            other = part_of(module)
            assert other == part or other in ALLOWED[part], f"{path} imports {module}, but {part} must not"
        elif part == "core":
            top = module.split(".")[0]
            assert top in sys.stdlib_module_names, f"{path} imports {module}; the core has the standard library only"
            assert top not in IMPURE, f"{path} imports {module}; pass what it gives as an argument"


def test_the_reader_of_imports_sees_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would pass on anything if this function were blind."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "paramserver" / "core" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import time, os.path\nfrom paramserver import cli\nfrom . import plan\nfrom ..server import apply\n"
        "def f():\n    from paramserver.worker.client import Client\n"
    )
    assert list(imported_modules(path)) == [
        "time",
        "os.path",
        "paramserver.cli",
        "paramserver.core",
        "paramserver.server",
        "paramserver.worker.client",
    ]
