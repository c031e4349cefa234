"""Asynchronous mode: weights in which every contribution counts on all shards or on none, for those who look on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast

from paramserver import errors
from paramserver.core.versions.consistency import Mode
from paramserver.v1 import coordinator_pb2
from paramserver.worker.engine.weights import Weights
from paramserver.worker.links.cuts import pull_cut

_CALL_S = 60.0
_AGAIN_S = 0.02


class Cuts(Weights):
    """Pulls what all shards have in common."""

    def _pull_cut(self) -> None:
        """Take in a cut; synchronously every version is one."""
        if self.consistency.mode is Mode.SYNC:
            self._pull_latest()
            return
        self._wait_for_copy()
        try:
            results = self._watch(self.background.submit(pull_cut(self.links, self._snapshot)))
        except errors.FencedError:
            raise
        except errors.StaleViewError:  # synchronous by now
            results = self._watch(self.background.submit(self.links.pulls.pull_version(0)))
        self._install(results)

    async def _snapshot(self) -> Sequence[int]:
        """Have the servers make a cut: their versions. Raises DeadlineError if a contribution stays half counted."""
        deadline, timeline = time.monotonic() + self._wait_timeout_s, self.links.timeline

        def request() -> coordinator_pb2.SnapshotRequest:
            return coordinator_pb2.SnapshotRequest(member=self.session.member, timeline=timeline)

        waiting_for = ""
        try:
            while time.monotonic() < deadline:
                try:
                    reply = await self.session.ask("Coordinator.Snapshot", request, _CALL_S)
                except errors.DeadlineError as error:
                    waiting_for = str(error)
                    continue
                snapshot = cast(coordinator_pb2.SnapshotResponse, reply)
                if snapshot.versions:
                    return list(snapshot.versions)
                self.waiting_for = waiting_for = snapshot.waiting_for
                await asyncio.sleep(_AGAIN_S)
        finally:
            self.waiting_for = ""
        raise errors.DeadlineError(
            f"for {self._wait_timeout_s:g} s the servers have not come to hold the same contributions ({waiting_for}): "
            "its worker was lost on the way, and no other one has done it again; "
            "pull(consistent=False) gives the newest of each server"
        )
