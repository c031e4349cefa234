"""The parts of a trace as they come from the coordinator, and the file that is made of them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from paramserver.core.trace.chrome import Recorded, document
from paramserver.core.trace.clocks import Sample, align
from paramserver.core.trace.spans import Span
from paramserver.errors import UserError

if TYPE_CHECKING:
    from paramserver.v1.coordinator_pb2 import TracePart, TraceResponse

# The most spans that one file has: viewers are slow beyond.
_MOST_SPANS = 500_000


class Parts:
    """All parts that have come, by process."""

    def __init__(self) -> None:
        # How many parts the coordinator has given, and how many spans they had.
        self.received = self.spans = 0
        self._parts: dict[tuple[str, int, str], list[TracePart]] = {}
        self._dropped: Counter[str] = Counter()

    def add(self, answer: TraceResponse) -> None:
        """An answer of the coordinator."""
        for part in answer.parts:
            if part.index < self.received:  # it has come before
                continue
            self.received = part.index + 1
            self._dropped[part.name] += part.dropped
            if self.spans + len(part.spans) > _MOST_SPANS:
                self._dropped[part.name] += len(part.spans)
                del part.spans[:]
            self.spans += len(part.spans)
            self._parts.setdefault((part.name, part.pid, part.host), []).append(part)

    @property
    def names(self) -> list[str]:
        """The processes that have handed something in."""
        return sorted({name for name, _, _ in self._parts})

    def dropped(self, at_the_coordinator: int) -> dict[str, int]:
        """By process, how many spans were dropped there, or on their way."""
        found = self._dropped + Counter({"coordinator": at_the_coordinator})
        return {name: count for name, count in found.items() if count}

    def recorded(self) -> list[Recorded]:
        """The recording of each process."""
        coordinator = next((parts[0].clock for (name, _, _), parts in self._parts.items() if name == "coordinator"), "")
        return [
            Recorded(name, pid, host, _spans(parts), align(_samples(name, parts), _same(name, parts, coordinator)))
            for (name, pid, host), parts in self._parts.items()
        ]


def write(parts: Parts, output: Path, about: Mapping[str, object]) -> float | None:
    """Write the file, whole or not at all. Raises UserError if it cannot be written.

    Returns by how many milliseconds the clocks of two processes may differ in the file; None: that is not known.
    """
    recorded = parts.recorded()
    errors_us = {one.name: None if (e := one.alignment.error_ns) is None else e / 1000 for one in recorded}
    facts = {**about, "clock_error_us": errors_us}
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with temporary.open("x") as file:
            json.dump(document(recorded, facts), file, separators=(",", ":"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, output)
    except OSError as error:
        raise UserError(f"the trace cannot be written to {output}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    known = sorted(error for error in errors_us.values() if error is not None)
    return None if len(known) < len(errors_us) else sum(known[-2:]) / 1000


def _spans(parts: list[TracePart]) -> list[Span]:
    from paramserver.membership.tracing import span_from_proto

    return [span_from_proto(span) for part in parts for span in part.spans]


def _samples(name: str, parts: list[TracePart]) -> list[Sample]:
    if name == "coordinator":
        return []
    return [
        Sample(sample.asked_ns, sample.answered_ns, sample.coordinator_ns) for part in parts for sample in part.clocks
    ]


def _same(name: str, parts: list[TracePart], coordinator: str) -> bool:
    """Whether the process reads the clock that the coordinator reads."""
    return name == "coordinator" or (bool(coordinator) and parts[0].clock == coordinator)
