"""What a piece of a random script is.

A piece fills slots of a script with lines of Python (see `generate`), and says what must become of a script with it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Verdict(enum.Enum):
    """What must become of a script. EITHER: equal to plain torch, or refused."""

    EQUAL = "equal"
    EITHER = "equal or refused"
    REFUSED = "refused"


class Need(enum.Enum):
    """Where a piece means the same as in plain torch."""

    SLICE = "one slice in a step: it is not linear in the samples"
    SINGLE = "one slice in a step and one worker: what it keeps from slice to slice is this worker's"
    LOADER = "a loop over a prepared loader"
    ALONE = "a process of its own"
    SYNC = "synchronous mode"
    SEVERAL = "two workers or more"


@dataclass(frozen=True, slots=True)
class Piece:
    """One choice. ``slots``: lines by slot. ``says``: parts of the sentences that refuse it, any of which will do.

    ``without``: kinds that stay plain beside it, and labels of pieces that do not go with it.
    ``tolerance``: how far numbers may be apart, where not as usual.
    """

    kind: str
    name: str
    slots: Mapping[str, str] = field(default_factory=dict)
    verdict: Verdict = Verdict.EQUAL
    says: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    without: tuple[str, ...] = ()
    tolerance: float = 0.0

    @property
    def label(self) -> str:
        """Its name in full."""
        return f"{self.kind}={self.name}"
