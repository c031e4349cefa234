"""The worker's side of work stealing: an idle synchronous worker waits for the next version, or for a slice to steal.

The rule by which a slice is chosen is `core/work/stealing.py`; `server/versions/stealing.py` answers the questions.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Sequence
from typing import Any

from paramserver import errors
from paramserver.core.work.speed import Speed
from paramserver.v1 import shard_pb2
from paramserver.worker.links import ShardLinks
from paramserver.worker.weights.pulled import Pulled


class Thief:
    """Asks servers for slices of other workers. Belongs to one pace; its methods run in the background loop."""

    def __init__(self, links: ShardLinks) -> None:
        self._links = links
        # Whom to ask about which step.
        self._step, self._server = -1, 0

    async def ask(self, question: shard_pb2.StealRequest) -> shard_pb2.StealResponse | None:
        """Ask which slice to compute; None if there is no answer. Where nothing is missing, another is asked next."""
        if question.step != self._step:
            self._step, self._server = question.step, 0
        reply = await self._links.questions.steal(self._server, question)
        if reply is not None and reply.complete:
            self._server = (self._server + 1) % len(self._links.channels)
        return reply

    async def wait(
        self,
        version: concurrent.futures.Future[list[Pulled]],
        pushes: Sequence[concurrent.futures.Future[Any]],
        question: shard_pb2.StealRequest,
        own: int | None,
        speed: Speed,
        waited_s: float = 0.0,
    ) -> list[Pulled] | int:
        """Wait for the next version, or until there is a slice to compute meanwhile; ``version`` is then given up.

        Servers are asked once the ``pushes`` have arrived, again and again as ``speed`` says. ``own``: a slice to
        compute if there is no answer. ``waited_s``: so long it has waited already. Raises what a push has failed with.
        """
        pulling = asyncio.wrap_future(version)
        try:
            began = time.monotonic()
            await _all_pushed(pushes)
            speed.pushed(time.monotonic() - began)
            while True:
                await asyncio.wait([pulling], timeout=max(0.0, speed.patience_s() - waited_s))
                waited_s = 0.0
                if pulling.done():
                    return pulling.result()
                reply = await self.ask(question)
                if pulling.done():
                    continue
                if reply is None and own is not None:
                    return own
                useful = reply is not None and reply.HasField("slice")
                speed.answered(useful)
                if reply is not None and useful:
                    return reply.slice
        finally:
            # What it would bring may be old when the slice is computed.
            pulling.cancel()


async def _all_pushed(pushes: Sequence[concurrent.futures.Future[Any]]) -> None:
    """Wait until all are over, or one has failed: raises that. All end in this loop."""
    over = asyncio.Event()
    for push in pushes:
        push.add_done_callback(lambda _: over.set())
    for push in pushes:
        while not push.done():
            over.clear()
            await over.wait()
        if push.cancelled():
            raise errors.RolledBackError("the job goes back to a checkpoint")
        error = push.exception()
        # That the mode has changed meanwhile is nobody's mistake.
        if error is not None and type(error) is not errors.StaleViewError:
            raise error
