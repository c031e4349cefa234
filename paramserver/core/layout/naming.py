"""Names of tensors in results, and messages about unknown names."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Collection

# So many names are listed; of more, only the nearest one is named.
_LISTED = 5
# So many candidates are compared in full.
_COMPARED = 2000

# torch.compile puts a model into another module, under this name.
_COMPILED = "_orig_mod."


def plain_name(name: str) -> str:
    """The name of a tensor in the model that the script wrote, if it or a part of it has been compiled.

    >>> plain_name("body._orig_mod.fc.weight")
    'body.fc.weight'
    """
    return name.replace(_COMPILED, "")


def instead_of(name: str, names: Collection[str]) -> str:
    """The known names instead of ``name``, in words: all names if they are few, else the nearest names and the number.

    >>> instead_of("fc.wieght", ["fc.weight", "fc.bias"])
    "there are 'fc.weight', 'fc.bias'"
    """
    if len(names) <= _LISTED:
        return f"there are {', '.join(map(_show, names))}" if names else "there are none"
    candidates = heapq.nlargest(_COMPARED, names, key=lambda other: _shared(name, other))
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.0)
    return f"the nearest of {len(names)} names is {_show(near[0])}"


def _shared(one: str, other: str) -> int:
    """How many characters they begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _show(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:77]}...")
