"""The pure cores of one server: its shard and its stealing. Says in words what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.events import (
    Activated,
    AnswerPull,
    AnswerPush,
    Arrived,
    Build,
    Built,
    DropBuffer,
    DropVersion,
    Event,
    MembersChanged,
    PullAsked,
    Refuse,
    Want,
)
from paramserver.core.versions.names import Name
from paramserver.core.work.stealing import Ask, Assignment, Stealing


class Shard:
    """Performs the effects of a shard as a server does, without any tensor; each is told to ``say``."""

    def __init__(self, name: str, consistency: Consistency, who: Mapping[int, str], say: Callable[[str], None]) -> None:
        self.name = name
        self.state = ShardState(consistency)
        self.building: Build | None = None
        self._stealing = Stealing()
        self._who = who
        self._say = say
        # Who made a call, and the name that it pushes.
        self._callers: dict[int, str] = {}
        self._pushed: dict[int, Name] = {}

    def activate(self, timeline: int, version: int) -> None:
        self.handle(Activated(timeline, version))

    def members(self, generation: int, workers: frozenset[int]) -> None:
        self.handle(MembersChanged(generation, workers))
        self._stealing.keep(workers)

    def push(self, call: int, name: Name, worker: int, timeline: int, clock: int) -> None:
        self._callers[call], self._pushed[call] = self._who[worker], name
        self._say(f"{self._who[worker]} -> {self.name}: push {call}, {name}")
        self.handle(Arrived(call, name, call, worker, timeline, clock))

    def pull(self, call: int, worker: int, want: Want, words: str, timeline: int) -> None:
        self._callers[call] = self._who[worker]
        self._say(f"{self._who[worker]} -> {self.name}: pull {call}, {words}")
        self.handle(PullAsked(call, worker, want, timeline))

    def ask(self, ask: Ask, now: float) -> None:
        """A worker that has time asks for a slice of the open step."""
        worker = self._who[ask.assignment.worker]
        self._say(f"{worker} -> {self.name}: has time in step {ask.step}")
        missing = self.state.missing()
        if ask.step != self.state.version or missing is None:
            self._say(f"{self.name} -> {worker}: step {ask.step} is complete")
            return
        chosen = self._stealing.ask(ask, missing.slices if missing.of else ((0, ask.of),), now)
        self._say(f"{self.name} -> {worker}: {'wait' if chosen is None else f'compute slice {chosen}'}")

    def given(self, assignment: Assignment) -> None:
        """A worker pulled the newest version and begins with its range."""
        self._stealing.given(assignment, self.state.version)

    def built(self, now: float) -> None:
        """The version in the making stands."""
        assert self.building is not None, f"{self.name} builds nothing"
        version, self.building = self.building.version, None
        self.handle(Built(version))
        self._stealing.begin(version, now)

    def handle(self, event: Event) -> None:
        """Feed one event, and perform what follows."""
        for effect in self.state.handle(event):
            match effect:
                case AnswerPush(call, outcome, version):
                    self._answer(call, f"push {call} is {outcome.value}, newest version {version}")
                case AnswerPull(call, version, slowest):
                    clocks = "" if self.state.consistency.mode is Mode.SYNC else f", slowest clock {slowest}"
                    self._answer(call, f"pull {call} gets version {version}{clocks}")
                case Refuse(call, refusal, reason):
                    kind = "push" if call in self._pushed else "pull"
                    self._answer(call, f"{kind} {call} is refused, {refusal.value}: {reason}")
                case Build(version, names, buffers):
                    self.building = effect
                    parts = "; ".join(f"push {b} ({n})" for n, b in zip(names, buffers, strict=True))
                    self._say(f"{self.name}: builds version {version} of {parts}")
                case DropBuffer(buffer):
                    self._say(f"{self.name}: drops the bytes of push {buffer}")
                case DropVersion(version):
                    self._say(f"{self.name}: drops version {version}")
        self.state.check_invariants()

    def _answer(self, call: int, words: str) -> None:
        self._say(f"{self.name} -> {self._callers[call]}: {words}")

    def facts(self) -> dict[str, str]:
        """The state as a newcomer needs it: by name, in words."""
        state = self.state
        if not state.active:
            return {"newest version": "none"}
        scheduled = state.changeover.scheduled
        missing = state.missing()
        found = {
            "timeline": str(state.timeline),
            "generation": str(state.generation),
            "setting": f"{state.consistency}, revision {state.consistency.revision}",
            "newest version": str(state.version),
            "applied contributions": str(state.counters.applied),
        }
        if parked := len(state.pulls):
            found["parked pulls"] = str(parked)
        if scheduled is not None:
            agreed = "committed" if state.changeover.committed else "prepared"
            found["next setting"] = f"{scheduled} from version {scheduled.from_version}, {agreed}"
        if state.consistency.mode is Mode.SYNC:
            found["missing"] = str(missing) if missing is not None else "nothing"
        else:
            clocks = sorted((self._who[worker], clock) for worker, clock in state.pulls.clocks.items())
            found["clocks"] = ", ".join(f"{worker} {clock}" for worker, clock in clocks) or "none"
        return found
