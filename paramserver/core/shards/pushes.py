"""The pushes whose contributions are in no version yet: who brought each of them, and who waits for an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paramserver.core.versions.events import Arrived, DropBuffer, Effect, Outcome, Refusal, Refuse


class Pushes:
    """The contributions that a shard has accepted, by their buffers, until a version is made of them."""

    def __init__(self) -> None:
        self._brought: dict[int, Arrived] = {}
        # Pushes that are answered once their contribution is in a version, by buffer, in order of arrival.
        self._waiting: dict[int, list[Arrived]] = {}

    def __bool__(self) -> bool:
        """Whether a push waits for its answer."""
        return bool(self._waiting)

    def accept(self, push: Arrived, waits: bool) -> None:
        """This contribution will be in a version. ``waits``: the push is answered only then."""
        self._brought[push.buffer] = push
        if waits:
            self._waiting[push.buffer] = [push]

    def repeat(self, push: Arrived, first: int) -> None:
        """The contribution in buffer ``first`` has come once more: both pushes are answered together."""
        self._waiting[first].append(push)

    def forget(self, buffer: int) -> None:
        """A larger contribution has taken the place of this one."""
        del self._brought[buffer]

    def brought(self, buffers: Iterable[int]) -> list[Arrived]:
        """The pushes that brought these contributions."""
        return [self._brought[buffer] for buffer in buffers]

    def waiting_for(self, buffers: Iterable[int]) -> Iterator[Arrived]:
        """The pushes that are answered when a version of these contributions stands."""
        for buffer in buffers:
            yield from self._waiting.get(buffer, ())

    def published(self, buffers: Iterable[int]) -> list[tuple[Arrived, Outcome]]:
        """A version of these contributions stands: the pushes that are answered now, each with its answer."""
        answered = []
        for buffer in buffers:
            self._brought.pop(buffer, None)
            for push in self._waiting.pop(buffer, ()):
                answered.append((push, Outcome.ACCEPTED if push.buffer == buffer else Outcome.DUPLICATE))
        return answered

    def refuse(self, why: str) -> list[Effect]:
        """The contributions that pushes wait for will be in no version. ``why`` goes before their names."""
        effects: list[Effect] = []
        for buffer, pushes in self._waiting.items():
            effects.append(DropBuffer(buffer))
            del self._brought[buffer]
            reason = f"{why} before {pushes[0].name} was applied"
            effects += [Refuse(push.call, Refusal.STALE, reason) for push in pushes]
        self._waiting.clear()
        return effects
