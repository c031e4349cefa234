"""Evaluation on all workers: batches of a second loader are dealt out, and their results kept for all workers.

Nothing of this is in the record of the job: with another coordinator the workers evaluate once more what it lacks.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.core.job.dealing import Evaluation
from paramserver.core.job.membership import Role
from paramserver.v1 import coordinator_pb2
from paramserver.wire.bounds import counting, patience

_MAX_WAIT_S = 60.0
# Bytes of a result, of the results in an answer, of all results of an evaluation, and of those that are kept.
MAX_RESULT_BYTES = 1 << 20
_PAGE_BYTES = 1 << 20
_MAX_BYTES = 256 << 20
# Evaluations that are kept for workers that come late.
_KEPT = 1000
# Timeline, epoch and count, and whether the place comes again on this timeline, with other weights.
_Place = tuple[int, int, int, bool]


class Evaluating:
    """The evaluations of one job."""

    def __init__(self, job: ports.Stage) -> None:
        self._job = job
        self._all: OrderedDict[_Place, Evaluation] = OrderedDict()
        self._changed = asyncio.Condition()

    async def evaluate(self, request: coordinator_pb2.EvaluateRequest) -> coordinator_pb2.EvaluateResponse:
        """A worker hands in results and leases batches, or reads the results of all once it is complete."""
        wait_s = patience("wait_s", request.wait_s, _MAX_WAIT_S)
        found = self._at(request)
        self._take_in(request, found)
        self._bound()
        if request.done:
            await self._notify()
        if request.leaves:
            if found.give_back(request.member):
                await self._notify()
            return coordinator_pb2.EvaluateResponse()
        response = coordinator_pb2.EvaluateResponse()
        if request.wants and not self._fill(request, found, response) and wait_s:
            try:
                async with asyncio.timeout(wait_s), self._changed:
                    await self._changed.wait_for(lambda: self._fill(request, found, response))
            except TimeoutError:
                response.waiting_for = self._waiting_for(found)
        response.complete = found.complete
        if found.complete and not request.wants:
            first = counting("the first batch", request.first)
            for index, value in found.results(first, _PAGE_BYTES):
                response.results.add(index=index, value=value)
        return response

    def give_back(self, worker: int) -> None:
        """The batches of a worker that is gone go to other workers."""
        if any([one.give_back(worker) for one in self._all.values()]):
            self._job.tasks.begin(self._notify())

    def _at(self, request: coordinator_pb2.EvaluateRequest) -> Evaluation:
        """The evaluation of this place of the script."""
        epoch, count = counting("epoch", request.epoch), counting("count", request.count)
        place, size = (request.timeline, epoch, count, request.undone), counting("batches", request.slices)
        if place[0] > self._job.timeline:
            raise errors.ProtocolError(f"timeline {place[0]} has not begun")
        found = self._all.get(place)
        if found is None:
            found = self._all[place] = Evaluation(size)
        self._all.move_to_end(place)
        if found.size != size:
            raise errors.DataError(
                f"the loader given to ctx.evaluate has {size} batches here, and {found.size} in another worker: all "
                "workers must evaluate the same data"
            )
        return found

    def _bound(self) -> None:
        """Forget the evaluations that were used longest ago, if they are too many or too large."""
        while len(self._all) > _KEPT or (
            len(self._all) > 1 and sum(one.nbytes for one in self._all.values()) > _MAX_BYTES
        ):
            self._all.popitem(last=False)

    def _take_in(self, request: coordinator_pb2.EvaluateRequest, found: Evaluation) -> None:
        for one in request.done:
            if len(one.value) > MAX_RESULT_BYTES:
                raise errors.ProtocolError(f"a result of {len(one.value)} bytes is too large")
            if found.nbytes + len(one.value) > _MAX_BYTES:
                raise errors.DataError(
                    f"the results of one evaluation have more than {_MAX_BYTES >> 20} MiB: gather sums, not the "
                    "outputs of the model"
                )
            found.done(counting("batch", one.index), one.value)

    def _fill(
        self,
        request: coordinator_pb2.EvaluateRequest,
        found: Evaluation,
        response: coordinator_pb2.EvaluateResponse,
    ) -> bool:
        """Lease batches; true if there is something to tell."""
        if found.complete:
            return True
        if request.timeline != self._job.timeline:
            # The others follow the job, which went back. This worker has the weights that the results are of.
            found.take_from_others(request.member)
        if found.nbytes > _MAX_BYTES:
            raise errors.DataError(f"an evaluation of {found.size} batches is too large: give larger batches")
        response.slices.extend(found.lease(request.member, len(self._job.members.of(Role.WORKER))))
        return bool(response.slices)

    def _waiting_for(self, found: Evaluation) -> str:
        names = {m.ident: m.name for m in self._job.members.of(Role.WORKER)}
        return ", ".join(names.get(ident, f"worker {ident}") for ident in found.holders())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
