"""Calls that wait for a copy of the optimizer state of a version that is still to be made."""

from __future__ import annotations

import asyncio

from paramserver.server.arithmetic.state import StateCopy
from paramserver.server.versions.calls import Calls
from paramserver.server.versions.shard import ShardTensors


class StateCopies:
    """The copies of the optimizer state of one shard that were asked for and not given yet."""

    def __init__(self, tensors: ShardTensors, calls: Calls) -> None:
        self._tensors, self._calls = tensors, calls
        # The first version whose state a call takes, by call.
        self._wanted: dict[int, int] = {}

    async def wait(self, version: int, wait_s: float) -> tuple[int, StateCopy] | None:
        """A copy of the state of ``version`` or a later one, and of which; None if none comes in time.

        Give it back with `ShardTensors.drop_copy`.
        """
        call = self._calls.number()
        answer, self._wanted[call] = self._calls.expect(call), version
        try:
            done, _ = await asyncio.wait([answer], timeout=wait_s)
            return answer.result() if done else None
        except asyncio.CancelledError:
            if answer.done() and answer.exception() is None:
                self._tensors.drop_copy(answer.result()[1])
            raise
        finally:
            self._calls.forget(call)
            self._wanted.pop(call, None)

    def published(self, version: int) -> None:
        """``version`` is published, and its state has not been changed since: answer the calls that take it."""
        for call in [call for call, wanted in self._wanted.items() if wanted <= version]:
            del self._wanted[call]
            if self._calls.waits(call):
                self._calls.answer(call, (version, self._tensors.copy_states()))
