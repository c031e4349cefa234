"""The calls of ``ctx.evaluate`` to the coordinator, which deals out its batches."""

from __future__ import annotations

from typing import cast

from paramserver.v1 import coordinator_pb2
from paramserver.worker.engine.rollback import Rollback
from paramserver.worker.job.member import Member
from paramserver.worker.job.shards import Shards

# How long the coordinator may park a call, and how long a call may take in all.
_PARK_S, _CALL_S = 10.0, 60.0


class Evaluating:
    """Makes the evaluations of one worker."""

    def __init__(self, member: Member, shards: Shards, rollback: Rollback) -> None:
        self._member, self._shards, self._rollback = member, shards, rollback

    def begin(self, epoch: int, count: int, batches: int) -> Dealt:
        """The evaluation of this place of the script, of so many batches.

        If the job went back in the middle of the script's epoch, the place comes again, with other weights.
        """
        undone = self._rollback.aborted
        if undone:
            self._rollback.say("what ctx.evaluate gives")
        return Dealt(self._member, self._shards.timeline, epoch, count, batches, undone)


class Dealt:
    """The batches of one evaluation, of which this worker gets some."""

    def __init__(self, member: Member, timeline: int, epoch: int, count: int, batches: int, undone: bool) -> None:
        self._member, self._undone = member, undone
        self._place = timeline, epoch, count, batches
        # Results that the coordinator does not know yet.
        self._done: dict[int, bytes] = {}
        self.complete = False

    def give(self, index: int, result: bytes) -> None:
        """A batch is evaluated. The coordinator hears of it with the next call."""
        self._done[index] = result

    def lease(self, wait: bool) -> list[int]:
        """Batches for this worker; none if none are free, or if all are done. ``wait``: until either is so.

        Waits no longer than some seconds: then it has to be asked again.
        """
        try:
            reply = self._ask(wants=True, wait_s=_PARK_S if wait else 0.0)
        finally:
            self._member.waits_for("")
        if reply.waiting_for:
            self._member.waits_for(f"batches of ctx.evaluate ({reply.waiting_for})")
        self.complete = reply.complete
        return list(reply.slices)

    def results(self) -> list[bytes] | None:
        """The results of all batches, in their order; None if a new coordinator does not have them all."""
        found: list[bytes] = []
        while len(found) < self._place[3]:
            reply = self._ask(first=len(found))
            if not reply.complete or not reply.results:
                return None
            found += [one.value for one in reply.results]
        return found

    def leave(self) -> None:
        """The script has left the loop: other workers get the batches that this worker has not done."""
        self._ask(leaves=True)

    def _ask(
        self, *, wants: bool = False, wait_s: float = 0.0, first: int = 0, leaves: bool = False
    ) -> coordinator_pb2.EvaluateResponse:
        session = self._member.session
        timeline, epoch, count, batches = self._place

        def request() -> coordinator_pb2.EvaluateRequest:
            return coordinator_pb2.EvaluateRequest(
                member=session.member,
                timeline=timeline,
                epoch=epoch + 1,
                count=count + 1,
                slices=batches,
                done=[coordinator_pb2.EvaluatedBatch(index=i, value=value) for i, value in self._done.items()],
                wants=wants,
                wait_s=wait_s,
                first=first,
                leaves=leaves,
                undone=self._undone,
            )

        reply = self._member.run(session.ask("Coordinator.Evaluate", request, _CALL_S))
        self._done.clear()
        return cast(coordinator_pb2.EvaluateResponse, reply)
