"""The compiled kernels as Python calls them. The GIL is free while they compute."""

from __future__ import annotations

import ctypes
import enum
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
LIBRARY = Path(__file__).with_name("_kernels.so")
# Scratch places that a sum may need at most; as in kernels.c.
PLACES = 8
# More contributions than this are left to torch. Their lines often begin at the same place of a page, and push each
# other out of the first cache before they are used: 16 took longer than with torch, which reads two at a time.
ROWS = 8

# Which terms to add, and the place of each sum: see `server.arithmetic.combine`.
Recipe = tuple[tuple[int, int, int], ...]


class Kind(enum.IntEnum):
    """The kinds of formulas, as in kernels.c."""

    COPY = 0
    ADD = 1
    SGD = 2
    ADAM = 3


@dataclass(frozen=True, slots=True)
class Formula:
    """The use of a sum. ``numbers``: as kernels.c names them, a to h.

    ``negate``: the sum changes its sign first. ``first``: the state arrays have no history yet.
    """

    kind: Kind
    numbers: tuple[float, ...] = ()
    negate: bool = False
    first: bool = False


COPY = Formula(Kind.COPY)


class _Sum(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("length", ctypes.c_int32),
        ("divisor", ctypes.c_float),
        ("factor", ctypes.c_float),
        ("kept", ctypes.c_void_p),
    ]


class _Formula(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "negate", "first")),
        *((name, ctypes.c_float) for name in "abcdefgh"),
    ]


class Library:
    """The library at ``path``. Raises OSError if it cannot be loaded, AttributeError if it is another library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._step = library.paramserver_step
        self._step.restype = ctypes.c_float
        self._step.argtypes = (*(ctypes.c_void_p,) * 6, ctypes.c_int64)
        self.source = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "paramserver_source"))).decode()

    def step(
        self,
        rows: Sequence[Tensor],
        start: int,
        recipe: Recipe,
        divisor: float,
        formula: Formula,
        weights: Tensor | None,
        out: Tensor,
        state: Sequence[Tensor] = (),
        kept: Tensor | None = None,
    ) -> float:
        """The sum of ``rows`` from element ``start`` on, as many as ``out`` has, divided, then used as in ``formula``.

        All tensors are flat, of float32 and without gaps. ``weights``: the old ones, None for a copy. ``out``: the
        result; no other tensor overlaps it. ``state``: at most two arrays, changed in place. ``kept``: where
        the divided sum is left, too. The recipe needs at most
        PLACES places. Returns the sum of all sums, which is finite only if each of them is.
        """
        places = (ctypes.c_void_p * len(rows))(*[row.data_ptr() + 4 * start for row in rows])
        factor = exact_reciprocal(divisor) if divisor != 1.0 else 0.0
        steps = _steps(recipe)
        left = None if kept is None else kept.data_ptr()
        what = _Sum(ctypes.addressof(places), ctypes.addressof(steps), len(rows), len(recipe), divisor, factor, left)
        how = _Formula(formula.kind, formula.negate, formula.first, *formula.numbers)
        arrays = [array.data_ptr() for array in state] + [None, None]
        old = None if weights is None else weights.data_ptr()
        seen: float = self._step(
            ctypes.addressof(what), ctypes.addressof(how), old, out.data_ptr(), arrays[0], arrays[1], out.numel()
        )
        return seen


def exact_reciprocal(divisor: float) -> float:
    """Of a power of two, else 0: multiplying by it rounds as dividing does, and takes a fraction of the time."""
    return 1.0 / divisor if math.frexp(divisor)[0] == 0.5 else 0.0


@lru_cache(maxsize=256)
def _steps(recipe: Recipe) -> ctypes.Array[ctypes.c_int32]:
    flat = [place for step in recipe for place in step]
    return (ctypes.c_int32 * len(flat))(*flat)


def fingerprint() -> str:
    """The digest of the source that is here. A library compiled from this source has the same one."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]


def load() -> Library | str:
    """The library, or why there is none."""
    if not LIBRARY.exists():
        return "not built: there was no C compiler when paramserver was installed"
    try:
        library = Library(LIBRARY)
    except (OSError, AttributeError) as error:
        return f"cannot be loaded: {error}"
    if library.source != fingerprint():
        return "built from another version of paramserver"
    return library
