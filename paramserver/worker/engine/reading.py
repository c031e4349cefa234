"""Weights and optimizer state for callers beside the training, at any place within a step of this worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast

import structlog

from paramserver import errors
from paramserver.core.versions.events import AtLeast
from paramserver.v1 import coordinator_pb2
from paramserver.worker.engine.rollback import Rollback
from paramserver.worker.flat import FlatSpace
from paramserver.worker.job.member import Member
from paramserver.worker.job.modes import Modes
from paramserver.worker.job.shards import Shards
from paramserver.worker.links.cuts import pull_cut
from paramserver.worker.links.pulls import Pull
from paramserver.worker.links.states import Parts
from paramserver.worker.weights.weights import Weights

log = structlog.get_logger("paramserver.worker")

_CALL_S = 60.0
_AGAIN_S = 0.02


class Reading:
    """Reads weights and state, and follows the job if it goes back meanwhile."""

    def __init__(self, member: Member, modes: Modes, shards: Shards, weights: Weights, rollback: Rollback) -> None:
        self._member, self._modes, self._shards = member, modes, shards
        self._weights, self._rollback = weights, rollback

    def pull_latest(self) -> None:
        """Take in the newest weights that all shards can give."""
        self._rollback.following(self._weights.pull_latest)

    def settle(self) -> None:
        """Wait until all weights of this version or a newer one are there."""
        self._rollback.following(self._weights.complete)

    def weights_now(self) -> FlatSpace:
        """A copy in main memory of the weights and buffers at hand."""
        self.settle()
        present = self._weights.space.on_cpu()
        copy = FlatSpace(present.layout, present.device)
        copy.copy_of(present)
        return copy

    # ---- cuts

    def pull_cut(self) -> None:
        """Take in weights in which each contribution counts on all shards or on none, as they are after this call.

        Raises DeadlineError if a contribution that some shards have does not come to the others.
        """
        self._rollback.following(self._pull_cut)

    def _pull_cut(self) -> None:
        if self._modes.together:  # every version is a cut
            self._weights.pull_latest()
            return
        self._weights.end_copy()
        try:
            results = self._member.do(pull_cut(self._shards.links, self._snapshot))
        except errors.FencedError:
            raise
        except errors.StaleViewError:  # synchronous by now
            results = self._member.do(self._shards.links.pulls.ask(Pull(AtLeast(0))))
        self._weights.install(results)

    async def _snapshot(self) -> Sequence[int]:
        """Have the servers make a cut: their versions. Raises DeadlineError if a contribution stays half counted."""
        member, timeline = self._member, self._shards.links.timeline
        deadline = time.monotonic() + member.wait_timeout_s

        def request() -> coordinator_pb2.SnapshotRequest:
            return coordinator_pb2.SnapshotRequest(member=member.session.member, timeline=timeline)

        waiting_for = ""
        try:
            while time.monotonic() < deadline:
                try:
                    reply = await member.session.ask("Coordinator.Snapshot", request, _CALL_S)
                except errors.DeadlineError as error:
                    waiting_for = str(error)
                    continue
                snapshot = cast(coordinator_pb2.SnapshotResponse, reply)
                if snapshot.versions:
                    return list(snapshot.versions)
                waiting_for = snapshot.waiting_for
                member.waits_for(waiting_for)
                await asyncio.sleep(_AGAIN_S)
        finally:
            member.waits_for("")
        raise errors.DeadlineError(
            f"for {member.wait_timeout_s:g} s the servers have not come to hold the same contributions "
            f"({waiting_for}): its worker was lost on the way, and no other one has done it again; "
            "pull(consistent=False) gives the newest of each server"
        )

    # ---- optimizer state

    def optimizer_state(self) -> Parts:
        """The pieces of state of all shards.

        Synchronous: of the version at hand. If others have finished the step of this worker meanwhile, that is the
        version after it, which is then taken in. Asynchronous: of each shard's present version.
        """
        while True:
            try:
                self._member.check_timeline()
                together = self._modes.together
                asked = self._weights.version if together else 0
                version, parts = self._member.do(self._shards.links.states.read(asked, together))
                if not together or version == self._weights.version:
                    return parts
                log.info("others have finished the step: its weights are taken in", version=version)
                self._weights.pull_latest()
                if version == self._weights.version:
                    return parts
            except errors.RolledBackError:
                self._rollback.follow()
