"""Docstrings of the public names: each one is there, has an example, and names the errors that its code raises."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable

import pytest

import paramserver
import paramserver.ray
from paramserver import errors
from tests.support.public import OF_RAY, PUBLIC, of_page


def raised(function: Callable[..., object]) -> set[str]:
    """The classes in ``raise errors.X(...)`` of a function's code."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc.func for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {call.attr for call in calls if isinstance(call, ast.Attribute)}


@pytest.mark.parametrize("name", PUBLIC | OF_RAY)
def test_a_public_name_is_described(name: str) -> None:
    thing = (PUBLIC | OF_RAY)[name]
    text = inspect.getdoc(thing) or ""
    assert text.partition("\n")[0].endswith((".", "::", ":")), "the first line is a sentence"
    assert ">>> " in text, "there is an example"
    if isinstance(thing, property):
        thing = thing.fget
    code = thing.__init__ if inspect.isclass(thing) else thing
    made = dataclasses.is_dataclass(thing)  # its __init__ has no source, and raises nothing
    assert {error for error in (set() if made else raised(code)) if error not in text} == set()


def test_the_names_are_those_that_the_page_shows() -> None:
    assert {name for name in OF_RAY if "." not in name} == set(paramserver.ray.__all__)
    names = {"Client", "Context", "init", "launch", "server_optimizer"}
    assert set(paramserver.__all__) == {*names, "__version__", "errors"}
    returned = {"Launched", "ServerOptimizer", "SliceLoader", "StepScheduler", "PushBucket"}
    assert {name.partition(".")[0] for name in PUBLIC} == {*names, *returned}


@pytest.mark.parametrize("kind", [paramserver.Context, paramserver.Client])
def test_the_page_shows_all_of_a_class(kind: type) -> None:
    methods = {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}
    assert {name.partition(".")[2] for name in PUBLIC if name.startswith(f"{kind.__name__}.")} == methods


def test_the_list_follows_the_page() -> None:
    page = ".. autofunction:: init\n\n.. autoclass:: Context()\n   :members: log, rank\n   :inherited-members:\n"
    assert list(of_page(page)) == ["init", "Context", "Context.log", "Context.rank"]


def test_the_tree_of_errors_names_every_class() -> None:
    assert errors.__doc__ is not None
    classes = {name for name, thing in vars(errors).items() if inspect.isclass(thing)}
    assert set(re.findall(r"\b\w+Error\b", errors.__doc__)) - {"ValueError"} == classes
    assert all(getattr(errors, name).__doc__ for name in classes)


def test_an_error_that_is_not_named_is_found() -> None:
    def function() -> None:
        raise errors.ModelError("x")

    assert raised(function) == {"ModelError"}
