"""A span: one thing that a process has done, from when until when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """``begin_ns`` and ``end_ns`` are nanoseconds of the process's own clock, which begins anywhere.

    ``track``: the row of the process in which viewers show the span. ``step``: the version that the span belongs to.
    ``flows``: contributions that pass through the span, by their nonces. ``notes``: facts for people, by name.
    """

    name: str
    track: str
    begin_ns: int
    end_ns: int
    step: int | None = None
    flows: tuple[int, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
