"""Generators of random numbers that objects of a script own: found through the objects' attributes, and seeded.

Data sets, transforms, ``collate_fn`` and modules may draw from a `torch.Generator`, `random.Random` or NumPy generator
of their own. Seeded for each batch, it gives numbers that follow from the seed, the epoch and the slice, whichever
worker computes the slice.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from paramserver.core.work.slices import slice_seed

KINDS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_DRAWING = (*KINDS, types.FunctionType)
# Objects that are looked at in all, entries of a container, and how deep.
_MOST, _ENTRIES, _DEPTH = 2000, 64, 12
# Instances of these have no generators; neither have objects of classes of these packages, as far as they matter.
_LEAVES = (torch.Tensor, np.ndarray, np.generic, str, bytes, int, float, complex, type(None), types.ModuleType, type)
_PLAIN = frozenset(("builtins", "abc", "typing", "collections", "enum", "threading", "_thread"))


def generators_of(*roots: Any) -> list[Any]:
    """The generators that can be reached from these objects, each once; the same order in every process of a script.

    Attributes, containers, closures, default values, `functools.partial`, the objects of bound methods, and global
    variables that functions of the script name are looked through. The generators of the process are left out.
    """
    of_process = {id(torch.default_generator), id(np.random.mtrand._rand), id(getattr(random, "_inst", None))}
    found: list[Any] = []
    seen: set[int] = set()
    kept: list[Any] = []  # an id may be used again for another object when the first one has gone
    waiting: deque[tuple[Any, int]] = deque((root, 0) for root in roots)
    while waiting and len(seen) < _MOST:
        thing, depth = waiting.popleft()
        if id(thing) in seen or isinstance(thing, _LEAVES) or type(thing).__module__.startswith("paramserver."):
            continue
        seen.add(id(thing))
        kept.append(thing)
        if isinstance(thing, KINDS):
            if id(thing) not in of_process:
                found.append(thing)
        elif depth < _DEPTH:
            waiting.extend((inner, depth + 1) for inner in _inside(thing))
    return found


def generators_of_module(model: torch.nn.Module) -> list[Any]:
    """The generators that the modules of a model have as attributes, and those that their ``forward`` names."""
    modules = list(model.modules())
    kinds = [type(module) for module in modules if not type(module).__module__.startswith("torch.")]
    attributes = [value for module in modules for value in vars(module).values() if isinstance(value, KINDS)]
    forwards = dict.fromkeys(getattr(kind, "forward", None) for kind in kinds)
    return generators_of(*attributes, *forwards)


class OwnGenerators:
    """Seeds the generators that ``find`` finds in the first two calls of a round.

    The second call finds those that were made when the first batch was read.
    """

    def __init__(self, find: Callable[[], list[Any]]) -> None:
        self._find = find
        self._calls = 0
        self.found: list[Any] = []

    def begin_round(self) -> None:
        """Objects may have other generators from now on: another epoch begins."""
        self._calls = 0

    def seed(self, seed: int) -> None:
        """Seed them for a batch."""
        if self._calls < 2:
            self._calls += 1
            self.found = self._find()
        seed_generators(self.found, seed)


def seed_generators(generators: Iterable[Any], seed: int) -> None:
    """Seed each of these by its number in their order."""
    for number, generator in enumerate(generators):
        seed_generator(generator, slice_seed(seed, 0, number, "own generator"))


def seed_generator(generator: Any, seed: int) -> None:
    """Seed this if it is a generator, with a number in [0, 2**63)."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(seed).state


def _inside(thing: Any) -> Iterator[Any]:
    """What an object is made of, as far as it may have generators."""
    if isinstance(thing, types.FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, types.MethodType | types.BuiltinMethodType):
        yield thing.__self__
        yield getattr(thing, "__func__", None)
    elif isinstance(thing, functools.partial):
        yield thing.func
        yield from thing.args
        yield from thing.keywords.values()
    elif isinstance(thing, Mapping):
        yield from (value for _, value in zip(range(_ENTRIES), _entries(thing), strict=False))
    elif isinstance(thing, list | tuple | deque):
        yield from (value for _, value in zip(range(_ENTRIES), thing, strict=False))
    if not isinstance(thing, types.FunctionType):
        yield from getattr(thing, "__dict__", {}).values()
        yield from _of_classes(thing)


def _entries(thing: Mapping[Any, Any]) -> Iterable[Any]:
    """The values of a dict. Other mappings may read data for each value."""
    return thing.values() if isinstance(thing, dict) else ()


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, _DRAWING) or _has_state(value):
            yield value


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of global variables and attributes in a function, and in those inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _has_state(value: Any) -> bool:
    """Whether this is an object of a class of the script's, or of a library that is not Python's own."""
    return not isinstance(value, _LEAVES) and hasattr(value, "__dict__") and type(value).__module__ not in _PLAIN


def _of_classes(thing: Any) -> Iterator[Any]:
    """Slots of an object, and generators and methods of its classes."""
    for kind in type(thing).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in _PLAIN or package == "torch":
            continue
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            yield getattr(thing, name, None)
        for value in kind.__dict__.values():
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            if isinstance(value, _DRAWING):
                yield value
