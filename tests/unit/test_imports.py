"""Who may import whom. The rule is a table; the imports are read from the source, wherever they stand in a file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "paramserver"

LOWER = {"core", "errors", "failpoints", "frames", "tracing"}
EDGES = {"tensors", "transport", "store"}
WIRE = {"v1", "wire", "membership"}
ROLES = {"coordinator", "server", "worker"}
# What begins, ends and shows the processes of a job.
AROUND = {"logs", "preload", "processes", "testing", "machine", "pki"}

# Part of the package -> parts it may import, besides itself. A part stands above those in its row.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "core": {"errors"},  # the tree of errors is names only
    "failpoints": set(),
    "frames": set(),  # what transports carry
    "kernels": set(),  # compiled arithmetic
    "logs": {"core"},  # how text is made harmless
    "tracing": {"core"},  # records what a process does
    "processes": set(),
    "preload": {"processes"},  # a process of which others are forked
    "v1": set(),
    "tensors": LOWER | {"v1"},
    "compress": LOWER | {"tensors", "v1"},
    "checkpoint": LOWER | {"tensors", "v1", "config"},
    "transport": LOWER | {"v1"},
    "wire": LOWER | {"tensors", "transport", "v1"},
    "membership": LOWER | {"config", "transport", "v1", "wire"},
    "store": LOWER,
    "records": LOWER | {"config"},
    "coordinator": LOWER | EDGES | WIRE | {"config", "checkpoint"},
    "server": LOWER | EDGES | WIRE | {"config", "checkpoint", "compress", "kernels"},
    "worker": LOWER | EDGES | WIRE | {"config", "checkpoint", "compress"},
    "distributed": LOWER | EDGES | WIRE | {"config", "pki", "worker"},
    "frameworks": {"distributed", "errors"},
    "testing": LOWER | EDGES | {"processes", "v1"},
    "pki": LOWER | {"config", "transport"},
    "machine": LOWER | {"config", "pki", "processes", "testing", "transport", "v1"},
    "web": LOWER | {"config", "transport", "v1"},
    "report": LOWER | {"config", "records", "transport", "v1", "web"},
    "results": LOWER | EDGES | WIRE | {"config", "checkpoint", "worker"},
    "resume": LOWER | EDGES | WIRE | {"config", "checkpoint", "coordinator", "machine", "processes", "server"},
    "alone": LOWER | EDGES | WIRE | ROLES | {"config", "records", "report", "results"},
    "api": LOWER | EDGES | WIRE | ROLES | AROUND | {"config", "alone", "records", "report", "results", "web"},
    "roles": LOWER
    | EDGES
    | WIRE
    | ROLES
    | AROUND
    | {"api", "config", "checkpoint", "distributed", "records", "report", "results", "resume", "web"},
    "launcher": LOWER
    | EDGES
    | WIRE
    | AROUND
    | {"config", "checkpoint", "records", "report", "results", "resume", "web"},
    "ray": LOWER | AROUND | {"config", "transport", "v1"},
    "doctor": LOWER | EDGES | WIRE | AROUND | {"config"},
    "render": {"config", "errors"},
    # Calibration alone needs more than the core: it measures transport and arithmetic, and a script of its own.
    "simulate": LOWER | {"__init__", "config", "tensors", "transport", "v1"},
    "notebook": {"config", "errors", "processes", "roles", "worker"},
    "__init__": {"api", "errors", "notebook", "worker"},
    "cli": LOWER
    | EDGES
    | WIRE
    | ROLES
    | AROUND
    | {
        "config",
        "checkpoint",
        "doctor",
        "launcher",
        "render",
        "report",
        "results",
        "resume",
        "roles",
        "simulate",
        "web",
    },
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
    """ "paramserver.core.layout.plan" belongs to "core"; the package itself to "__init__"."""
    return module.split(".")[1] if "." in module else "__init__"


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax of a file, parsed once for all tests."""
    return ast.parse(path.read_text(), str(path))


def imported_modules(path: Path) -> Iterator[str]:
    """Absolute names of all modules that a file imports; "from paramserver import x" counts as paramserver.x."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree_of(path)):
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


# ---- circles and rooms


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of_all(typing_too: bool = False) -> dict[str, set[str]]:
    """Module -> modules of ours that it imports when it runs, wherever the import stands in the file.

    ``typing_too``: those that it imports for its types only count, too.
    """
    modules = {module_of(path): path for path in sources()}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        tree = tree_of(path)
        typing = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        names = set()
        for node in ast.walk(tree):
            if id(node) in typing and not typing_too:
                continue
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in modules else node.module for name in full}
        known = names & modules.keys()
        # Python runs the packages around a module first; those around both are running already.
        around = {package for name in known for package in packages_around(name)} - packages_around(module)
        found[module] = (known | around & modules.keys()) - {module}
    return found


def packages_around(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


def circle(arrows: dict[str, set[str]]) -> set[str]:
    """Nodes that lie on one circle; empty if there is none."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


def test_no_module_imports_itself_by_way_of_others() -> None:
    found = imports_of_all()
    assert "paramserver.errors" in found["paramserver.api"], "the reader sees nothing"
    assert circle(found) == set()


def test_no_types_go_in_a_circle() -> None:
    """Imports for the type checker alone count here, too."""
    assert circle(imports_of_all(typing_too=True)) == set()


def test_the_parts_stand_above_each_other() -> None:
    assert circle(ALLOWED) == set()


def test_a_circle_is_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {"a", "b", "c"}


@pytest.mark.parametrize("package", sorted({path.parent for path in sources()}), ids=lambda path: path.name)
def test_a_package_says_what_it_holds(package: Path) -> None:
    assert ast.get_docstring(ast.parse((package / "__init__.py").read_text())), (
        f"{package.name} does not say what it is for"
    )
