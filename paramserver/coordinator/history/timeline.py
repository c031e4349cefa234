"""The time line of events, which each coordinator of the job hands to the next one in its record."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paramserver.core.job.events import Event, Events, Facts, Gone
from paramserver.core.job.status import WELL, State
from paramserver.v1 import coordinator_pb2

_WELL = WELL | {State.STOPPED}


class TimeLine:
    """The newest events of the job."""

    def __init__(self) -> None:
        self._events = Events()

    def look(self, facts: Facts) -> None:
        """Note what has changed since the last look."""
        self._events.look(facts, time.time())

    def events(self) -> list[coordinator_pb2.Event]:
        """All events that are kept, oldest first."""
        return [
            coordinator_pb2.Event(
                at_s=event.at_s, kind=event.kind, subject=event.subject, text=event.text, version=event.version
            )
            for event in self._events
        ]

    def restore(self, record: coordinator_pb2.JobRecord) -> None:
        """Go on with the time line of an earlier coordinator."""
        self._events.restore(Event(e.at_s, e.kind, e.subject, e.text, e.version) for e in record.events)


def gone_of(departed: Sequence[coordinator_pb2.ProcessStatus]) -> dict[str, Gone]:
    """How processes that are gone have left, by name."""
    return {gone.name: Gone(gone.member, gone.state in _WELL, gone.reason) for gone in departed}
