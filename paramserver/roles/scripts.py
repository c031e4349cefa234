"""The script of a worker, begun as Python begins it: a file, or a module as with ``python -m``.

The script imports modules of its own directory first, as under plain Python. Modules that this package and torch have
imported before stay as they are, also where a file beside the script has the same name (``queue.py``, ``redis.py``).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pkgutil
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# What a script with paramserver imports, and what its first step imports.
OF_WORKERS = ("torch", "numpy.random", "paramserver.api", "paramserver.worker.context", "paramserver.pki.security")
# Modules that cannot be imported once more, and modules that Python itself looks up by name.
_ONCE = {"paramserver", "torch", "numpy", "threading", "warnings", "traceback", "importlib", "encodings", "io"}
# Packages that this package imports, some of them late.
_NEEDED = {"grpc", "google", "redis", "structlog", "pydantic", "pydantic_settings", "safetensors", "fsspec", "certifi"}


class Script:
    """``words``: a file, or "-m" and a module, and arguments."""

    def __init__(self, words: Sequence[str]) -> None:
        self._module = words[0] == "-m"
        self._name, *self._args = words[1:] if self._module else words
        # As it stands in tracebacks.
        self.file = self._name

    def run(self) -> None:
        """Run it as ``__main__``."""
        sys.argv = [self._name, *self._args]
        directory = os.getcwd() if self._module else str(Path(self._name).resolve().parent)
        if not sys.flags.safe_path:
            sys.path[0] = directory  # in place of that of the command
        elif not os.environ.get("PYTHONSAFEPATH"):
            sys.path.insert(0, directory)
        give_way(directory)
        if self._module:
            self.file = _file_of(self._name)
            runpy.run_module(self._name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self._name, run_name="__main__")


def _file_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    return module if spec is None or spec.origin is None else spec.origin


def give_way(directory: str) -> None:
    """Let what is imported from now on find the modules of this directory, which is first in the path.

    Where such a module has the name of another one, this package imports all that it needs before. The other module is
    forgotten if code of the directory imports the name: that code gets its own module, as under plain Python.
    """
    others = _others(directory)
    if not others:
        return
    path = sys.path[:]
    sys.path[:] = [place for place in sys.path if os.path.realpath(place) != directory]
    for name in (*OF_WORKERS, *_all_of("worker", "transport", "tensors", "records", "compress")):
        importlib.import_module(name)
    sys.path[:] = path
    for name in others & _imported(directory):
        for key in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[key]


def _all_of(*parts: str) -> Iterator[str]:
    package = importlib.import_module("paramserver")
    for found in pkgutil.walk_packages(package.__path__, "paramserver."):
        if found.name.split(".")[1] in parts:
            yield found.name


def _others(directory: str) -> set[str]:
    """Names of modules in this directory that stand for another module elsewhere."""
    try:
        entries = os.listdir(directory)
    except OSError:
        return set()
    names = {entry.removesuffix(".py") for entry in entries if entry.endswith(".py")}
    names |= {entry for entry in entries if os.path.isfile(os.path.join(directory, entry, "__init__.py"))}
    known = _NEEDED | sys.stdlib_module_names | {key for key in sys.modules if "." not in key}
    return {name for name in names & known - _ONCE if _is_another(name, directory)}


def _is_another(name: str, directory: str) -> bool:
    """Whether the module of this name that is loaded is not that of the directory, and can be imported once more."""
    module = sys.modules.get(name)
    if module is None or name in sys.builtin_module_names:
        return module is None
    if name in sys.stdlib_module_names and hasattr(module, "__path__"):
        return False  # it may import its own parts later
    place = os.path.dirname(os.path.realpath(getattr(module, "__file__", None) or ""))
    frozen = getattr(module.__spec__, "origin", None) == "frozen"
    return not frozen and place not in (directory, os.path.join(directory, name))


def _imported(directory: str) -> set[str]:
    """The first parts of the names that code of this directory, and of its packages, imports."""
    found: set[str] = set()
    for file in (*Path(directory).glob("*.py"), *Path(directory).glob("*/*.py")):
        try:
            nodes = list(ast.walk(ast.parse(file.read_bytes())))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found
