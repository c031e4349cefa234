"""A field has one writer: the class that owns it. Other modules of the package read it or call a method."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

PRODUCT = Path(__file__).parents[2] / "paramserver"
# Values that one caller fills in after another: partial sums, messages, torch's objects.
VALUES = {
    "worker": {"partial", "partial.space", "self.space", "empty", "parameter", "request", "report", "bits", "made"},
    "coordinator": {"process", "gone", "record", "response", "tally", "total", "configure", "coming", "self._file"},
}


def assigned(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(receiver, attribute) of every assignment to an attribute."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute):
                    yield ast.unparse(part.value), part.attr


def written_by_others(trees: dict[str, ast.AST], values: Collection[str] = ()) -> list[str]:
    """Assignments to a field of a class that lies in another module."""
    owners: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for receiver, attribute in assigned(tree):
            if receiver == "self":
                owners.setdefault(attribute, set()).add(module)
    return [
        f"{module}: {receiver}.{attribute}"
        for module, tree in trees.items()
        for receiver, attribute in assigned(tree)
        if receiver not in {"self", *values} and attribute in owners and module not in owners[attribute]
    ]


@pytest.mark.parametrize("package", VALUES)
def test_no_module_writes_fields_of_another(package: str) -> None:
    place = PRODUCT / package
    trees: dict[str, ast.AST] = {
        str(path.relative_to(place)): ast.parse(path.read_text()) for path in sorted(place.rglob("*.py"))
    }
    assert written_by_others(trees, VALUES[package]) == []


def test_a_second_writer_is_found() -> None:
    trees: dict[str, ast.AST] = {
        "links.py": ast.parse("class Links:\n    def __init__(self):\n        self.workers = 1\n"),
        "pace.py": ast.parse("def look(engine):\n    engine.links.workers, x = 2, 3\n"),
    }
    assert written_by_others(trees) == ["pace.py: engine.links.workers"]
