"""How a worker leaves: with all it has handed in, or at once."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from paramserver import errors
from paramserver.worker.engine.pushes import LAST_PUSH_S, Pushes

log = structlog.get_logger("paramserver.worker")

_LEAVE_S = 2.0


class Leaving(Pushes):
    """Ends a worker's part in the job."""

    def close(self, ended: bool = False) -> None:
        """Hand in what is left and leave. Does not stop the background loop.

        ``ended``: the script has come to its end, and not by an error.

        The coordinator must hear that the script has done all its epochs: waits for one for ``join_timeout_s``.
        """
        if self._session is None:
            return
        finished = self.through and self._session.failure is None
        ended = ended and self._session.failure is None
        self._early.drop()
        with contextlib.suppress(errors.ParamServerError):  # then the script keeps those that have come
            self._complete()
            if self._session.failure is None:
                self.before_leaving()
        try:
            if self._pace is not None and self._session.failure is None:
                self._pace.finish()
        except errors.RolledBackError as error:
            log.info("leaving, while the job goes back to a checkpoint", reason=str(error))
        finally:
            self.state = "done"
            self._take_home()
            if self.rolled_back() and not self.safe:  # what it has done may be undone, and is to be done again
                finished = ended = False
            timeout_s = self.options.join_timeout_s if finished or ended else _LEAVE_S
            self._run(self._leave(timeout_s, finished=finished, ended=ended))

    def abandon(self, reason: str) -> None:
        """Leave at once; what is not handed in goes to others. ``reason``: of a script that failed, else empty."""
        self._early.drop()
        self._forget()
        if self._session is not None:
            self._run(self._leave(_LEAVE_S, failure=reason), _LEAVE_S + 1.0)

    async def _leave(self, timeout_s: float, *, finished: bool = False, ended: bool = False, failure: str = "") -> None:
        assert self._session is not None
        if under_way := [asyncio.wrap_future(push) for push in list(self._pushing) if not push.done()]:
            # So that no shard has a slice that another one lacks, where that can be helped.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(timeout_s, LAST_PUSH_S)):
                    await asyncio.gather(*under_way, return_exceptions=True)
        await self._session.leave(timeout_s, finished=finished, ended=ended, failure=failure)
        if self._links is not None:
            await self._links.close()
        if self._mover is not None:
            self._mover.release()
        await self._session.channel.close()
