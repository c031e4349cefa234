"""The variables that torchrun sets for a script, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Torchrun:
    """One process of torchrun. ``local_rank``: its number on its machine. ``processes``: on all machines."""

    rank: int
    local_rank: int
    processes: int


def torchrun(environ: Mapping[str, str]) -> Torchrun | None:
    """The numbers that torchrun gave this process, or None if torchrun has not started it.

    Others set RANK and WORLD_SIZE, too. Only torchrun sets TORCHELASTIC_RUN_ID.
    """
    numbers = [environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    if "TORCHELASTIC_RUN_ID" not in environ or not all(number.isdecimal() for number in numbers):
        return None
    return Torchrun(*map(int, numbers))
