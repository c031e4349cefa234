"""``ctx.load``: all workers replace the servers' weights or optimizer state by their own."""

from __future__ import annotations

import time
from typing import cast

from paramserver import errors
from paramserver.v1 import coordinator_pb2
from paramserver.worker.engine.rollback import Rollback
from paramserver.worker.flat import FlatSpace
from paramserver.worker.job.member import Member
from paramserver.worker.job.progress import Progress
from paramserver.worker.job.shards import Shards
from paramserver.worker.pace import Paces
from paramserver.worker.script.state import Brought
from paramserver.worker.startup import Offer
from paramserver.worker.weights.weights import Weights

# How long the coordinator may park a call.
_CALL_S = 30.0


class Loading:
    """Agrees on a load with the other workers, and follows the job to where it goes on."""

    def __init__(
        self, member: Member, shards: Shards, progress: Progress, weights: Weights, paces: Paces, rollback: Rollback
    ) -> None:
        self._member, self._shards, self._progress = member, shards, progress
        self._weights, self._paces, self._rollback = weights, paces, rollback

    def load(self, place: coordinator_pb2.LoadPlace, weights: FlatSpace | None, state: Brought | None) -> bool:
        """Go on from these weights and this optimizer state; None: from those that the servers have.

        Returns when all workers have called it and the servers have the content, or at once if the job has done this
        load already. False: the job went back to an earlier version, and the load is not done. Raises ModelError if
        workers do not agree, DeadlineError naming the workers that did not call it.
        """
        following = self._rollback.following
        following(self._weights.complete)
        if weights is None:  # else the script's writes are replaced anyway
            following(self._weights.watch.check)
        following(self._paces.hand_back)
        version = self._weights.version
        self._progress.enter("loading")
        self._progress.computes(None)
        before = self._rollback.begin_load(
            Offer(
                weights.read if weights is not None else None,
                state.parts if state is not None else None,
                loads=True,
            )
        )
        try:
            done = self._agree(place, version)
        finally:
            self._rollback.end_load()
            self._progress.enter("training")
            self._member.waits_for("")
        if self._weights.version == version:
            self._rollback.undo(before)
        return done

    def _agree(self, place: coordinator_pb2.LoadPlace, version: int) -> bool:
        member = self._member

        def request() -> coordinator_pb2.LoadRequest:
            timeline = self._shards.links.timeline
            return coordinator_pb2.LoadRequest(member=member.session.member, timeline=timeline, place=place)

        since = time.monotonic()
        while True:
            try:
                if member.rolled_back():
                    raise errors.RolledBackError("the job goes on elsewhere")
                reply = cast(
                    coordinator_pb2.LoadResponse, member.do(member.session.ask("Coordinator.Load", request, _CALL_S))
                )
            except errors.RolledBackError:
                self._rollback.follow()
                if self._weights.version < version:
                    return False
                continue
            if reply.done:
                return True
            member.waits_for(reply.waiting_for)
            if time.monotonic() - since > member.wait_timeout_s:
                raise errors.DeadlineError(
                    f"ctx.load waited {member.wait_timeout_s:g} s (cluster.wait_timeout_s) for {reply.waiting_for}"
                )
