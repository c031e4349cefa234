"""When a trace is complete: which processes still record, and which will never hand in all of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Roll:
    """The processes of one trace, by member number. Workers are through after ``steps`` steps.

    The other processes record until all workers are through; then the trace is to be closed.
    """

    def __init__(self, workers: Mapping[int, str], others: Mapping[int, str], steps: int) -> None:
        self._names = {**workers, **others}
        self._workers, self._steps = workers, steps
        # By member number: steps that a worker has begun, and why something of a process is missing.
        self._begun: dict[int, int] = {}
        self._why: dict[int, str] = {}
        # Processes of which nothing more will come.
        self._ended: set[int] = set()

    @property
    def names(self) -> list[str]:
        """The processes that are to record."""
        return sorted(self._names.values())

    def heard(self, member: int, steps: int, last: bool) -> None:
        """A part of this member has come. A newcomer is none of those that the trace waits for."""
        if member not in self._names or member in self._ended:
            return
        self._begun[member] = steps
        if last:
            self._ended.add(member)
            if member in self._workers and steps < self._steps:
                self._why[member] = f"it stopped after {steps} of {self._steps} steps"

    def present(self, members: Iterable[int]) -> None:
        """These are members now. Nothing more comes from the others."""
        for gone in self._names.keys() - self._ended - set(members):
            self._ended.add(gone)
            self._why[gone] = f"it is gone{self._progress(gone)}"

    @property
    def through(self) -> bool:
        """Whether no worker records any more."""
        return self._workers.keys() <= self._ended

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._names.keys() <= self._ended

    def missing(self) -> dict[str, str]:
        """By name, why something of a process is missing, as things stand."""
        waits = {member: f"it has not handed in all{self._progress(member)}" for member in self._names}
        return {self._names[member]: why for member, why in (waits | self._why).items() if self._lacks(member)}

    def _lacks(self, member: int) -> bool:
        return member in self._why or member not in self._ended

    def _progress(self, member: int) -> str:
        if member not in self._workers:
            return ""
        return f", {self._begun.get(member, 0)} of {self._steps} steps have begun"
