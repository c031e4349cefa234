"""The time line of a job: one sentence for each join, death, takeover, return to a checkpoint and change of mode."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

# Older events are forgotten.
MAX_EVENTS = 100


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that has happened. ``at_s``: seconds since 1970. ``subject``: the process, or "" for the job."""

    at_s: float
    kind: str
    subject: str
    text: str
    version: int


@dataclass(frozen=True, slots=True)
class Gone:
    """How a process ceased to be a member. ``ident``: its member number. ``well``: it has left in order."""

    ident: int
    well: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a job from which events follow."""

    # Phase and reason, such as "running".
    phase: str = "waiting"
    reason: str = ""
    # Such as "sync" or "async, staleness 3".
    mode: str = ""
    # Names of the last complete checkpoint; empty: none.
    checkpoint: str = ""
    rollbacks: int = 0
    takeovers: int = 0
    version: int = 0
    # Member numbers of servers and workers, by name.
    members: Mapping[str, int] = field(default_factory=dict)
    # Processes that are gone, by name.
    gone: Mapping[str, Gone] = field(default_factory=dict)
    # Numbers of the members that were asked to leave; in a job that has ended all members may leave.
    asked: frozenset[int] = frozenset()
    ended: bool = False


class Events:
    """The newest events of a job, which follow from differences between the facts of two moments."""

    def __init__(self) -> None:
        self._newest: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._before: Facts | None = None
        self._restored = False

    def __iter__(self) -> Iterator[Event]:
        """All events that are kept, oldest first."""
        return iter(self._newest)

    def restore(self, events: Iterable[Event]) -> None:
        """Go on with the time line of an earlier coordinator."""
        self._newest.extend(events)
        self._restored = True

    def look(self, facts: Facts, at_s: float) -> None:
        """Compare the facts with those of the last look, and keep what has happened."""
        before, self._before = self._before, facts
        for kind, subject, text in self._first(facts) if before is None else _differences(before, facts):
            self._newest.append(Event(at_s, kind, subject, text, facts.version))

    def _first(self, facts: Facts) -> Iterator[tuple[str, str, str]]:
        if self._restored:
            yield "taken over", "", "another coordinator leads the job now"
            return
        yield "begun", "", f"the job begins, mode {facts.mode}"
        yield from _differences(Facts(mode=facts.mode), facts)


def _differences(before: Facts, now: Facts) -> Iterator[tuple[str, str, str]]:
    """Kind, subject and sentence of each event between two moments."""
    for name, ident in before.members.items():
        if now.members.get(name) != ident:
            asked = now.ended or ident in before.asked | now.asked
            yield _departure(name, now.gone.get(name), ident, asked)
    if now.takeovers > before.takeovers:
        yield "takeover", "", "backups took over the shards of a lost server"
    if now.rollbacks > before.rollbacks:
        yield "went back", "", f"the job went back to {now.checkpoint or 'its last checkpoint'}"
    for name, ident in now.members.items():
        if before.members.get(name) != ident:
            yield "joined", name, f"{name} joined"
    if now.mode != before.mode:
        yield "mode", "", f"the mode is {now.mode} now"
    if now.checkpoint and now.checkpoint != before.checkpoint:
        yield "checkpoint", "", f"checkpoint {now.checkpoint} is complete"
    if now.phase != before.phase:
        said = now.reason.startswith(f"{now.phase}: ")  # the sentence of the end
        yield "state", "", now.reason if said else f"{now.phase}: {now.reason}" if now.reason else now.phase


def _departure(name: str, gone: Gone | None, ident: int, asked: bool) -> tuple[str, str, str]:
    if gone is None or gone.ident != ident:
        return ("left", name, f"{name} left") if asked else ("lost", name, f"{name} is lost")
    why = f": {gone.reason}" if gone.reason else ""
    return ("left", name, f"{name} left{why}") if gone.well else ("lost", name, f"{name} is lost{why}")
