"""Docstrings of the public names: each one is there, has an example, and names the errors that its code raises."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import paramserver
from paramserver import errors


def public() -> Iterator[tuple[str, Any]]:
    """The public functions and classes of the package, and the methods and properties of these classes."""
    for name in paramserver.__all__:
        thing = getattr(paramserver, name)
        if callable(thing):
            yield name, thing
        if inspect.isclass(thing):
            for method, value in inspect.getmembers(thing):
                if not method.startswith("_"):
                    yield f"{name}.{method}", value


PUBLIC = dict(public())


def raised(function: Callable[..., object]) -> set[str]:
    """The classes in ``raise errors.X(...)`` of a function's code."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc.func for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {call.attr for call in calls if isinstance(call, ast.Attribute)}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_described(name: str) -> None:
    thing = PUBLIC[name]
    text = inspect.getdoc(thing) or ""
    assert text.partition("\n")[0].endswith((".", "::", ":")), "the first line is a sentence"
    if isinstance(thing, property):
        return
    assert ">>> " in text, "there is an example"
    code = thing.__init__ if inspect.isclass(thing) else thing
    assert {error for error in raised(code) if error not in text} == set()


def test_the_names_are_those_that_the_page_shows() -> None:
    assert set(paramserver.__all__) == {"Client", "Context", "__version__", "errors", "init", "server_optimizer"}
    assert {name.partition(".")[0] for name in PUBLIC} == {"Client", "Context", "init", "server_optimizer"}
    assert len(PUBLIC) > 20


def test_the_tree_of_errors_names_every_class() -> None:
    assert errors.__doc__ is not None
    classes = {name for name, thing in vars(errors).items() if inspect.isclass(thing)}
    assert set(re.findall(r"\b\w+Error\b", errors.__doc__)) - {"ValueError"} == classes
    assert all(getattr(errors, name).__doc__ for name in classes)


def test_an_error_that_is_not_named_is_found() -> None:
    def function() -> None:
        raise errors.ModelError("x")

    assert raised(function) == {"ModelError"}
