"""The handle that a collective returns. The script, or DDP, waits on it."""

from __future__ import annotations

import concurrent.futures
import datetime
import threading
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

_Base: Any = dist.Work


class Work(_Base):  # type: ignore[misc]
    """A collective under way; its result are the tensors that it has filled."""

    def __init__(self, done: concurrent.futures.Future[list[torch.Tensor]]) -> None:
        super().__init__()
        self._done = done
        # Somebody has waited for the result, which is there.
        self._waited = False

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the result; raises the collective's error. ``timeout``: none, or 0, is that of the collective."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        self._done.result(seconds if seconds > 0 else None)
        self._waited = True
        return True

    def get_future(self) -> Any:
        """A future of the tensors, as DDP wants it. Its error is a RuntimeError with the text of the collective's.

        Its callbacks have a thread of their own, so they may wait for other collectives, as PowerSGD's do.
        """
        begun: Any = torch.futures.Future()
        if self._waited:  # DDP's reducer takes the result at once
            begun.set_result(self._done.result())
            return begun
        # Only an error that a callback raises is an error for C++.
        future = begun.then(lambda _: self._done.result())
        tell = partial(threading.Thread, target=begun.set_result, args=(None,), name="collective", daemon=True)
        self._done.add_done_callback(lambda _: tell().start())
        return future

    def is_completed(self) -> bool:
        """Whether there is a result, or an error."""
        return self._done.done()

    def is_success(self) -> bool:
        """Whether there is a result."""
        return self._done.done() and self._done.exception() is None

    def exception(self) -> Any:
        """The error; None if there is none."""
        return self._done.exception() if self._done.done() else None

    def result(self) -> list[torch.Tensor]:
        """The tensors; waits for them."""
        return self._done.result()

    def synchronize(self) -> None:
        """See :meth:`wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """See :meth:`wait`: results are in place when they are known."""
        self.wait()
