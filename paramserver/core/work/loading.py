"""Agreeing on a load: all workers call it at the same place of the script, with the same content."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a call stands in the script: the ``count``-th one (from 1) in an epoch, 0: before the first one."""

    epoch: int = 0
    count: int = 0

    def __str__(self) -> str:
        return f"call {self.count} {f'in epoch {self.epoch}' if self.epoch else 'before the first epoch'}"


@dataclass(frozen=True, slots=True)
class Load:
    """A place, and a digest of what is loaded there."""

    place: Place = Place()
    digest: str = ""


@dataclass(slots=True)
class Agreement:
    """The workers that have called a load, and those that must still call it. Workers are known by member number.

    ``done``: the last load that is done. A call of that one, or of one before it, needs nothing: its worker has come
    late, or its script runs once more.
    """

    done: Load = Load()
    called: dict[int, Load] = field(default_factory=dict)
    # The workers that have to call the load: the members at the time of the first call.
    awaited: frozenset[int] = frozenset()
    # Why a load cannot be done: told to all who call it.
    refused: tuple[Place, str] | None = None

    @property
    def pending(self) -> bool:
        """True if a worker waits for a load."""
        return bool(self.called)

    def call(self, worker: int, load: Load, present: Collection[int]) -> bool:
        """A worker calls a load, perhaps again; True if it has nothing to wait for. ``present``: the workers now.

        Raises ValueError with a sentence if the load cannot be done.
        """
        if load.place < self.done.place or load == self.done:
            return True
        if load.place == self.done.place:
            raise ValueError(
                "ctx.load was called with other content than that which the other workers have loaded at this place: "
                "load the same in every worker"
            )
        if self.refused is not None and self.refused[0] != load.place:
            self.refused = None
        if self.refused is None:
            if not self.called:
                self.awaited = frozenset(present)
            self.called[worker] = load
            self.awaited |= {worker}
            self._compare()
        if self.refused is not None:
            raise ValueError(self.refused[1])
        return False

    def _compare(self) -> None:
        loads = list(self.called.values())
        if any(load.place != loads[0].place for load in loads):
            places = " and ".join(sorted({str(load.place) for load in loads}))
            self.refuse(f"workers call ctx.load at different places of the script ({places}): call it in all alike")
        elif any(load.digest != loads[0].digest for load in loads):
            self.refuse("workers call ctx.load with different content: load the same in every worker")

    def missing(self, alive: Collection[int]) -> list[int]:
        """The workers that must still call the load. Workers that are not alive are left out."""
        return sorted(worker for worker in self.awaited if worker in alive and worker not in self.called)

    def agreed(self, alive: Collection[int]) -> Load | None:
        """The load that all have called, if they have."""
        calling = [load for worker, load in self.called.items() if worker in alive]
        return calling[0] if calling and self.refused is None and not self.missing(alive) else None

    def gone(self, worker: int) -> None:
        """The worker is no longer a member."""
        self.called.pop(worker, None)

    def refuse(self, sentence: str) -> None:
        """The load that is waited for cannot be done."""
        if self.called:
            self.refused = max(load.place for load in self.called.values()), sentence
            self.forget()

    def complete(self, load: Load) -> None:
        """The load is complete."""
        self.done = load
        self.forget()

    def forget(self) -> None:
        """Forget the calls; workers that still wait call again."""
        self.called.clear()
        self.awaited = frozenset()
