"""The data of the job, cut into slices; asynchronous mode: leases slices from the coordinator."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Sequence
from typing import cast

from paramserver import errors
from paramserver.core.versions.names import AsyncName
from paramserver.core.work.slices import DataSpec, SyncSchedule
from paramserver.v1 import coordinator_pb2, shard_pb2
from paramserver.wire.messages import data_to_proto, schedule_from_proto
from paramserver.worker.job.member import Member
from paramserver.worker.job.modes import Modes
from paramserver.worker.job.shards import Shards


class Slices:
    """The slices of the job's data set."""

    def __init__(self, member: Member, modes: Modes, shards: Shards) -> None:
        self._member, self._modes, self._shards = member, modes, shards
        self._data: DataSpec | None = None

    def register(self, data: DataSpec) -> None:
        """Say how the data is cut; raises DataError if another worker's data differs."""
        session = self._member.session

        def request() -> coordinator_pb2.RegisterDataRequest:
            return coordinator_pb2.RegisterDataRequest(member=session.member, data=data_to_proto(data))

        self._member.run(session.ask("Coordinator.RegisterData", request, 60.0))
        self._data = data

    def ensure(self) -> None:
        """Without a data set slices are only names. Raises DataError if the job has one."""
        if self._data is None:
            self.register(DataSpec(0, 0))

    @property
    def data(self) -> DataSpec | None:
        """The data of the job, once it is registered."""
        return self._data

    @property
    def named_by_data(self) -> bool:
        """True if equal names of slices mean equal contributions; False if slices are only numbered."""
        return self._data is not None and self._data.slice_size > 0

    @property
    def counted(self) -> bool:
        """Whether an epoch has a number of slices."""
        return self._data is not None and self._data.slices_per_epoch > 0

    def schedule(self) -> SyncSchedule:
        """Which slices each synchronous step has; after :meth:`register`."""
        assert self._data is not None
        return schedule_from_proto(self._member.session.view, self._data)

    def lease(
        self,
        epoch: int = 0,
        last: bool = False,
        want: int = 0,
        done: Sequence[AsyncName] = (),
        wait_s: float = 0.0,
        holding: Sequence[AsyncName] = (),
    ) -> concurrent.futures.Future[coordinator_pb2.LeaseResponse]:
        """Report finished slices and those that this worker is ``holding``; lease up to ``want`` more.

        Slices of epochs up to ``epoch`` are leased. ``last``: the script asks for no later epoch. ``wait_s``: how long
        the coordinator may wait with its answer until there is a slice.
        """
        member = self._member
        # The timeline of `done`: after the job went back, these slices are no longer done.
        timeline = self._shards.links.timeline

        async def go() -> coordinator_pb2.LeaseResponse:
            deadline = time.monotonic() + member.wait_timeout_s
            while True:
                request = coordinator_pb2.LeaseRequest(
                    member=member.session.member,
                    max_epoch=epoch,
                    want=want,
                    done=[shard_pb2.AsyncName(epoch=name.epoch, index=name.index) for name in done],
                    holding=[shard_pb2.AsyncName(epoch=name.epoch, index=name.index) for name in holding],
                    last_epoch=last,
                    wait_s=wait_s,
                    revision=self._modes.revision,
                    timeline=timeline,
                )
                try:
                    reply = await member.session.channel.call("Coordinator.Lease", request, timeout=wait_s + 30.0)
                    return cast(coordinator_pb2.LeaseResponse, reply)
                except errors.RolledBackError:
                    raise
                except (errors.RetryableError, errors.FencedError) as error:
                    member.session.check()
                    if time.monotonic() > deadline:
                        raise errors.DeadlineError(
                            f"no slices could be leased for {member.wait_timeout_s:g} s: {error}"
                        ) from error
                    await asyncio.sleep(0.2)

        return member.submit(go())

    def idle(self) -> None:
        """Tell servers that no worker has to wait for this worker's clock."""
        self._member.do(self._shards.links.questions.idle())
