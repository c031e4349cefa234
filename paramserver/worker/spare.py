"""Spare time of a synchronous worker: it waits for the next version, or for a slice that others have not begun."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable

from paramserver.v1 import shard_pb2
from paramserver.worker.links import ShardLinks
from paramserver.worker.pulled import Pulled


class Spare:
    """Belongs to one pace; its methods run in the background loop."""

    def __init__(self, links: ShardLinks) -> None:
        self._links = links
        # Whom to ask about which step.
        self._step, self._server = -1, 0

    async def ask(self, question: shard_pb2.ClaimRequest) -> shard_pb2.ClaimResponse | None:
        """Ask which slice to compute; None if there is no answer. Where nothing is missing, another is asked next."""
        if question.step != self._step:
            self._step, self._server = question.step, 0
        reply = await self._links.claim(self._server, question)
        if reply is not None and reply.complete:
            self._server = (self._server + 1) % len(self._links.channels)
        return reply

    async def wait(
        self,
        version: concurrent.futures.Future[list[Pulled]],
        question: shard_pb2.ClaimRequest,
        own: int | None,
        patience_s: Callable[[], float],
        answered: Callable[[bool], None],
    ) -> list[Pulled] | int:
        """Wait for the next version, or until there is a slice to compute meanwhile; ``version`` is then given up.

        A server is asked each time ``patience_s`` has passed; ``answered`` hears whether that was of use. ``own``: a
        slice to compute if there is no answer.
        """
        pulling = asyncio.wrap_future(version)
        try:
            while True:
                await asyncio.wait([pulling], timeout=patience_s())
                if pulling.done():
                    return pulling.result()
                reply = await self.ask(question)
                if pulling.done():
                    continue
                if reply is None and own is not None:
                    return own
                useful = reply is not None and reply.HasField("slice")
                answered(useful)
                if reply is not None and useful:
                    return reply.slice
        finally:
            # What it would bring may be old when the slice is computed.
            pulling.cancel()
