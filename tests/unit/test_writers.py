"""A field has one writer: the class that owns it. Other modules of the worker read it or call a method of its class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

WORKER = Path(__file__).parents[2] / "paramserver/worker"
# Values that one caller fills in after another: partial sums, messages, torch's objects.
VALUES = {"partial", "partial.space", "self.space", "empty", "parameter", "request", "report"}


def assigned(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(receiver, attribute) of every assignment to an attribute."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute):
                    yield ast.unparse(part.value), part.attr


def written_by_others(trees: dict[str, ast.AST]) -> list[str]:
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
        if receiver not in VALUES | {"self"} and attribute in owners and module not in owners[attribute]
    ]


def test_no_module_of_the_worker_writes_fields_of_another() -> None:
    trees: dict[str, ast.AST] = {
        str(path.relative_to(WORKER)): ast.parse(path.read_text()) for path in sorted(WORKER.rglob("*.py"))
    }
    assert written_by_others(trees) == []


def test_a_second_writer_is_found() -> None:
    trees: dict[str, ast.AST] = {
        "links.py": ast.parse("class Links:\n    def __init__(self):\n        self.workers = 1\n"),
        "pace.py": ast.parse("def look(engine):\n    engine.links.workers, x = 2, 3\n"),
    }
    assert written_by_others(trees) == ["pace.py: engine.links.workers"]
