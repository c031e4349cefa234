"""Removing the folders of checkpoints that were given up, so that they are not taken for checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from paramserver import errors
from paramserver.checkpoint import catalog
from paramserver.checkpoint.manifest import checkpoint_name
from paramserver.checkpoint.owner import Holding
from paramserver.checkpoint.place import Place
from paramserver.coordinator import ports
from paramserver.coordinator.tasks import Tasks

log = structlog.get_logger("paramserver.coordinator")

# How long a sweep waits for servers that still write a version that was given up.
_SWEEP_S = 10.0
_LOOK_S = 0.1


class Sweep:
    """Removes the files of versions that were given up.

    ``given_up`` tells which versions these are. While ``copying`` is held, no server is asked for another copy.
    """

    def __init__(
        self,
        job: ports.Commands,
        tasks: Tasks,
        place: Place | None,
        holding: Holding | None,
        given_up: Callable[[int], bool],
        copying: asyncio.Lock,
    ) -> None:
        self._job, self._tasks, self._place, self._holding = job, tasks, place, holding
        self._given_up, self._copying = given_up, copying
        # Versions that a task of `begin` sweeps now.
        self._begun: set[int] = set()

    def begin(self, version: int) -> None:
        """Sweep this version in the background, unless such a task is at work."""
        if version not in self._begun:
            self._begun.add(version)
            self._tasks.begin(self.finish(version)).add_done_callback(lambda _: self._begun.discard(version))

    async def finish(self, version: int) -> None:
        """Return when the files of this version are removed. Gives up after 10 s, or if storage does not answer.

        Looks at the servers itself even while a task of :meth:`begin` is at work: that task may have looked before the
        last server began to write.
        """
        job, timeline, place = self._job, self._job.timeline, self._place
        assert place is not None, "without a place no server writes anything"
        deadline = time.monotonic() + _SWEEP_S
        while time.monotonic() < deadline:
            try:
                async with self._copying:
                    if not self._given_up(version) or timeline != job.timeline:
                        return
                    if not any(copy.version == version for reply in await job.shards.stats() for copy in reply.copies):
                        if self._holding is not None:
                            await asyncio.to_thread(self._holding.check)
                        await asyncio.to_thread(catalog.discard, place, checkpoint_name(version, timeline))
                        return
            except errors.CheckpointError as error:
                log.debug("the files of a checkpoint that was given up could not be removed", error=str(error))
                return
            except errors.ParamServerError as error:
                log.debug("sweep", error=str(error))
            await asyncio.sleep(_LOOK_S)
