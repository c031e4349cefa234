"""Where a shard computes with its tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from paramserver.failpoints import planned

T = TypeVar("T")
# Arithmetic on fewer bytes takes no longer than handing it to another thread and back.
_SMALL_BYTES = 512 << 10


class ArithmeticThread:
    """Computes in the thread of ``pool``, or at once if the shard is small. ``nbytes``: the size of the shard."""

    def __init__(self, pool: ThreadPoolExecutor, nbytes: int) -> None:
        self._pool = pool
        # A planned fault may stop the thread, which is not to be that of the loop.
        faults = planned("apply.mid") or planned("apply.after_weights_before_opt")
        self._at_once = nbytes <= _SMALL_BYTES and not faults

    def __call__(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Begin to compute; the result to come. Whatever is begun later is computed later."""
        loop = asyncio.get_running_loop()
        if not self._at_once:
            return loop.run_in_executor(self._pool, work)
        done: asyncio.Future[T] = loop.create_future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done
