"""Virtual time: a heap of planned actions, and processes written as generators that wait for signals."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Alarm:
    """A planned action; None once it is called off."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Call it off."""
        self.action = None


class VirtualClock:
    """The time, in seconds. Actions that are due at the same time happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()

    def at(self, time: float, action: Callable[[], None]) -> Alarm:
        """Plan an action for ``time``, which is not in the past."""
        assert time >= self.now, f"{time} is over, it is {self.now}"
        alarm = Alarm(action)
        heapq.heappush(self._due, (time, next(self._numbers), alarm))
        return alarm

    def after(self, seconds: float, action: Callable[[], None]) -> Alarm:
        """Plan an action in so many seconds."""
        return self.at(self.now + seconds, action)

    def run(self, over: Callable[[], bool]) -> None:
        """Go on until ``over``. Raises RuntimeError if no action is planned any more before that."""
        while not over():
            if not self._due:
                raise RuntimeError(f"no action is planned after {self.now:g} s of virtual time: report this")
            self.now, _, alarm = heapq.heappop(self._due)
            if alarm.action is not None:
                alarm.action()


class Signal(Generic[T]):
    """A value that comes once. One listener."""

    __slots__ = ("_listener", "done", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: T
        self._listener: Callable[[T], None] | None = None

    def set(self, value: T) -> None:
        """Set the value. Later values are ignored."""
        if self.done:
            return
        self.done, self.value = True, value
        if self._listener is not None:
            self._listener(value)

    def then(self, listener: Callable[[T], None]) -> None:
        """Call this listener, in place of any other, with the value: now if the value is there, else when it comes."""
        if self.done:
            listener(self.value)
        else:
            self._listener = listener


# Yields signals and gets their values.
Process = Generator[Signal[Any], Any, T]


def start(process: Process[None]) -> None:
    """Run a process. The process goes on when the signal that it waits for comes."""

    def go_on(value: Any) -> None:
        while True:
            try:
                signal = process.send(value)
            except StopIteration:
                return
            if not signal.done:
                signal.then(go_on)
                return
            value = signal.value

    go_on(None)


def every(signals: Sequence[Signal[T]]) -> Signal[tuple[list[T], T]]:
    """A signal that comes with the last of one or more signals: all values in order, and the last value."""
    whole: Signal[tuple[list[T], T]] = Signal()
    left = len(signals)

    def one(value: T) -> None:
        nonlocal left
        left -= 1
        if not left:
            whole.set(([signal.value for signal in signals], value))

    for signal in signals:
        signal.then(one)
    return whole
