"""The names that docs/python.md shows: the package's own, and the classes of what it returns. Those of docs/ray.md."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

from tests.support.unit.pages import ROOT

PAGE = ROOT / "docs/python.md"
_DIRECTIVE = re.compile(r"^\.\. auto(?:function|class):: ([\w.]+).*\n((?:   :.*\n)*)", re.MULTILINE)


def of_page(page: str) -> dict[str, Any]:
    """The functions and classes of the directives, and the methods and properties that the site shows of a class.

    ``page``: the text of docs/python.md. A name is that of the class, a dot, and that of the method.
    """
    return dict(_of_page(page))


def _of_page(page: str) -> Iterator[tuple[str, Any]]:
    for path, options in _DIRECTIVE.findall(page):
        thing = pkgutil.resolve_name(path if path.startswith("paramserver.") else f"paramserver.{path}")
        name = path.rpartition(".")[2]
        yield name, thing
        members = re.search(r":members:(.*)", options)
        if members is None:
            continue
        shown = [one.strip() for one in members[1].split(",") if one.strip()]
        for member in shown or _members(thing, ":inherited-members:" in options):
            yield f"{name}.{member}", inspect.getattr_static(thing, member)


def _members(kind: type, inherited: bool) -> list[str]:
    """The methods and properties of a class that autodoc shows, without private ones."""
    names = [name for name, _ in inspect.getmembers(kind)] if inherited else list(vars(kind))
    return [name for name in names if not name.startswith("_")]


PUBLIC = of_page(PAGE.read_text())
# Their examples need a Ray cluster.
OF_RAY = of_page((ROOT / "docs/ray.md").read_text())
