"""``ctx.load``: all workers put other weights or another optimizer state in place of what the servers have."""

from __future__ import annotations

import time
from functools import partial
from typing import cast

from paramserver import errors
from paramserver.v1 import coordinator_pb2
from paramserver.worker.engine.rollback import GoingBack
from paramserver.worker.flat import FlatSpace
from paramserver.worker.pace import AsyncPace
from paramserver.worker.script.state import Brought
from paramserver.worker.startup import Offer

# How long the coordinator may park a call.
_CALL_S = 30.0


class Loading(GoingBack):
    """Agrees on it with the other workers, and follows the job to where it goes on."""

    def weights_now(self) -> FlatSpace:
        """A copy in main memory of the weights and buffers at hand."""
        self._following(self._complete)
        assert self._weights is not None
        present = self._weights.on_cpu()
        copy = FlatSpace(present.layout, present.device)
        copy.copy_of(present)
        return copy

    def load(self, place: coordinator_pb2.LoadPlace, weights: FlatSpace | None, state: Brought | None) -> bool:
        """Go on from these weights and this optimizer state; None: from the present ones.

        Returns when all workers have called it and the servers have it, or at once if the job has done it already.
        False: the job has gone back to an earlier version before it was done, and it is not done. Raises ModelError if
        workers do not agree, DeadlineError naming whom it waits for.
        """
        assert self._plan is not None
        layout = self._plan.layout
        self._following(self._complete)
        if weights is None:  # else what the script has written is replaced
            self._following(self.before_next)
        if self._pace is not None:
            self._following(self._hand_back)
        flags, version = (self._moved, self._look_back), self.version
        self.state, self.computing = "loading", None
        self._loads = Offer(
            weights.read if weights is not None else None,
            partial(state.parts, layout) if state is not None else None,
            loads=True,
        )
        try:
            done = self._agree(place, version)
        finally:
            self._loads, self.state, self.waiting_for = None, "training", ""
        if self.version == version:  # nothing is to be done again
            self._moved, self._look_back = flags
        return done

    def _hand_back(self) -> None:
        """Nobody is held back by this worker, and all that it has handed in has arrived."""
        assert self._pace is not None
        self._pace.finish()
        if isinstance(self._pace, AsyncPace):
            self.wait(self.lease(0, False, 0, (), 0.0, ()))
            self.idle()
        self._pace = self._paced = None

    def _agree(self, place: coordinator_pb2.LoadPlace, version: int) -> bool:
        def request() -> coordinator_pb2.LoadRequest:
            return coordinator_pb2.LoadRequest(member=self.session.member, timeline=self.links.timeline, place=place)

        since = time.monotonic()
        while True:
            try:
                if self.rolled_back():
                    raise errors.RolledBackError("the job goes on elsewhere")
                call = self.session.ask("Coordinator.Load", request, _CALL_S)
                reply = cast(coordinator_pb2.LoadResponse, self._watch(self.background.submit(call)))
            except errors.RolledBackError:
                self.follow()
                if self.version < version:
                    return False
                continue
            if reply.done:
                return True
            self.waiting_for = reply.waiting_for
            if time.monotonic() - since > self._wait_timeout_s:
                raise errors.DeadlineError(
                    f"ctx.load waited {self._wait_timeout_s:g} s (cluster.wait_timeout_s) for {reply.waiting_for}"
                )
