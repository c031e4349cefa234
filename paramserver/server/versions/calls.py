"""Calls of workers that wait for the decision of one shard's state machine."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from paramserver import errors


class Calls:
    """The waiting calls, by number. After :meth:`end`, every call is refused. Lives in one event loop."""

    def __init__(self) -> None:
        # Why nothing happens here any more.
        self.ended: errors.ParamServerError | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """A number that no other call has."""
        return next(self._numbers)

    def expect(self, call: int) -> asyncio.Future[Any]:
        """The answer to come."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.ended is not None:
            future.set_exception(self.ended)
        else:
            self._waiting[call] = future
        return future

    def waits(self, call: int) -> bool:
        """Whether somebody waits for this answer."""
        return call in self._waiting

    def answer(self, call: int, answer: object) -> None:
        """Give a call its answer, if somebody still waits for it."""
        future = self._waiting.pop(call, None)
        if future is not None and not future.done():
            if isinstance(answer, errors.ParamServerError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def forget(self, call: int) -> None:
        """The caller has stopped waiting for this answer."""
        self._waiting.pop(call, None)

    def end(self, error: errors.ParamServerError) -> None:
        """Refuse all calls with ``error``, unless others were refused for another reason before."""
        self.ended = self.ended or error
        for call in list(self._waiting):
            self.answer(call, error)
