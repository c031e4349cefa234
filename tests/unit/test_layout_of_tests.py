"""What tests share lies in tests/support: no test module imports another one."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests").rglob("*.py"))
SUPPORT = ROOT / "tests" / "support"
# Run as programs with "python -m", and imported by the tests of their own folder only.
PROGRAMS = {"tests/behaviour/run.py", "tests/faults/matrix.py"}


def imported(code: ast.Module) -> Iterator[str]:
    """Names of the modules, and of what is taken from them, as far as they may be modules of tests."""
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def wrong(code: str) -> list[str]:
    """Imports of test modules, and relative imports, which would hide one."""
    return [
        name
        for name in imported(ast.parse(code))
        if name.startswith(".") or (name.startswith("tests.") and name.split(".")[-1].startswith(("test_", "conftest")))
    ]


def test_no_test_module_is_imported() -> None:
    gc.collect()  # what it calls may format a traceback, and Python 3.11 cannot do that while it makes a tree
    found = {str(path.relative_to(ROOT)): names for path in FILES if (names := wrong(path.read_text()))}
    assert found == {}, "move what they share to tests/support"


def test_helpers_lie_in_support() -> None:
    helpers = {
        str(path.relative_to(ROOT))
        for path in FILES
        if not path.name.startswith("test_") and path.name != "conftest.py" and SUPPORT not in path.parents
    }
    assert helpers == PROGRAMS


@pytest.mark.parametrize(
    "code", ["from tests.unit.test_a import b", "from tests.unit import test_a", "from .a import b"]
)
def test_a_wrong_import_is_seen(code: str) -> None:
    assert wrong(code)
