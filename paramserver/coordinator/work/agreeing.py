"""Numbers on which all workers agree: the first one for a place of the script counts, also for workers that come later.

A learning rate that follows a measured loss is the same on all workers only if the loss is. If the job goes back to a
checkpoint, the numbers that were measured on later versions are forgotten, and agreed on again. Numbers travel in
checkpoints, for jobs that go on from there.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import Protocol

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.leadership.keeping import Keeping
from paramserver.core.job.membership import Role
from paramserver.core.work.passes import FIRST_EPOCH
from paramserver.v1 import coordinator_pb2

# How long a worker that comes late waits for a number that the others are about to give.
_PARK_S = 10.0
_NAME_CHARS = 200
# All numbers in the record of the job: names, and what there is around each of them.
_BYTES, _AROUND_BYTES = 1 << 20, 40
# Name, epoch and count.
_Place = tuple[str, int, int]


class _Job(ports.Stage, Protocol):
    keeping: Keeping

    def write_down(self) -> None:
        """Write the record down, if it has changed."""


class Agreeing:
    """The numbers of one job."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        # With the version on which the number was measured; 0: scripts do not come to the place again.
        self._values: dict[_Place, tuple[float, int]] = {}
        # The same as messages, by name, and of each name in order.
        self._messages: dict[str, list[coordinator_pb2.Agreed]] = {}
        # The timeline that began when the job went back last, and the version to which it went back.
        self._since, self._base = 0, 0

    async def agree(self, request: coordinator_pb2.AgreeRequest) -> coordinator_pb2.AgreeResponse:
        """A worker gives a number, or asks for those so far. Answers with all numbers of its name."""
        if not 0 < len(request.name) <= _NAME_CHARS:
            raise errors.ProtocolError(f"a number to agree on has a name of 1 to {_NAME_CHARS} characters")
        if request.HasField("mine"):
            place = request.name, request.mine.epoch, request.mine.count
            undone = request.timeline < self._since and request.mine.version > self._base
            if place not in self._values and not undone:
                size = sum(len(name.encode()) + _AROUND_BYTES for name, _, _ in (*self._values, place))
                if size > _BYTES:
                    raise errors.ProtocolError(
                        f"workers have agreed on {len(self._values)} numbers, and the job keeps no more "
                        f"({_BYTES} bytes): agree on fewer numbers, or give them shorter names"
                    )
                self._values[place] = request.mine.value, request.mine.version
                self._tell(place)
                self._job.write_down()
                await self._job.keeping.settled()
                await self._job.changes.notify()
        elif request.awaited:
            await self._job.changes.wait_until(lambda: not self._comes(request.name, request.awaited), _PARK_S)
        return coordinator_pb2.AgreeResponse(agreed=self._messages.get(request.name, ()))

    def _tell(self, place: _Place) -> None:
        insort(self._messages.setdefault(place[0], []), _message(place, *self._values[place]), key=_order)

    def _tell_all(self) -> None:
        self._messages.clear()
        for place in sorted(self._values):
            self._tell(place)

    def went_back(self, timeline: int, version: int) -> None:
        """The job went back to ``version``, and ``timeline`` has begun: numbers of later versions are forgotten."""
        self._since, self._base = timeline, version
        self._values = {place: value for place, value in self._values.items() if value[1] <= version}
        self._tell_all()

    def _comes(self, name: str, epoch: int) -> bool:
        """Whether a number of this epoch is missing, and another worker may give it."""
        there = {at for what, at, _ in self._values if what == name}
        others = len(self._job.members.of(Role.WORKER)) > 1
        return others and epoch not in there and (epoch == 1 or epoch - 1 in there)

    @property
    def first_epoch(self) -> int:
        """The number that the job's first epoch has for its script."""
        return int(self._values.get((FIRST_EPOCH, 1, 1), (0.0, 0))[0])

    def write(self, record: coordinator_pb2.JobRecord) -> None:
        """Write all numbers into the record."""
        for _, messages in sorted(self._messages.items()):
            record.agreed.extend(messages)

    def restore(self, agreed: Iterable[coordinator_pb2.Agreed]) -> None:
        """These numbers hold, too: those of an earlier coordinator, or of a checkpoint."""
        for one in agreed:
            self._values.setdefault((one.name, one.epoch, one.count), (one.value, one.version))
        self._tell_all()


def _order(message: coordinator_pb2.Agreed) -> tuple[int, int]:
    return message.epoch, message.count


def _message(place: _Place, value: float, version: int) -> coordinator_pb2.Agreed:
    name, epoch, count = place
    return coordinator_pb2.Agreed(name=name, epoch=epoch, count=count, value=value, version=version)
