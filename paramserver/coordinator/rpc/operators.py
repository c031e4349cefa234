"""Calls of commands that people type: status, scaling, changes and the end of a job."""

from __future__ import annotations

import asyncio
import time

import structlog

from paramserver import errors
from paramserver.checkpoint.manifest import checkpoint_name
from paramserver.coordinator.job import Job
from paramserver.coordinator.rpc.status import status_page
from paramserver.core.job.life import Ends, Phase
from paramserver.core.job.membership import Member, Role
from paramserver.membership.joining import versions
from paramserver.v1 import coordinator_pb2
from paramserver.wire.bounds import patience
from paramserver.wire.messages import PROTOCOL, consistency_to_proto

log = structlog.get_logger("paramserver.coordinator")

_ENDS = {"done": Phase.DONE, "failed": Phase.FAILED, "stopped": Phase.STOPPED}
_PLAIN = coordinator_pb2.StatusRequest()
_RETRY_S = 1.0


class Operators:
    """Status pages and commands."""

    def __init__(self, job: Job) -> None:
        self._job = job

    async def status(self, request: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
        """Everything that a status page shows."""
        return status_page(self._job, request)

    async def settings(self, request: coordinator_pb2.SettingsRequest) -> coordinator_pb2.SettingsResponse:
        """The settings that a newcomer takes over before it joins."""
        return coordinator_pb2.SettingsResponse(
            job=self._job.options.job, protocol=PROTOCOL, versions=versions(), settings=self._job.options.settings
        )

    async def probe(self, request: coordinator_pb2.ProbeRequest) -> coordinator_pb2.ProbeResponse:
        """Clock and versions of this machine, and whether an address of the caller's can be reached from here."""
        response = coordinator_pb2.ProbeResponse(wall_time_s=time.time(), protocol=PROTOCOL, versions=versions())
        if request.address:
            try:
                await self._job.servers.dial_back(
                    request.address, self._job.options.job, min(5.0, self._job.options.call_timeout_s)
                )
                response.reached = True
            except errors.ParamServerError as error:
                response.reason = str(error)
        return response

    async def set_consistency(
        self, request: coordinator_pb2.ChangeConsistencyRequest
    ) -> coordinator_pb2.ChangeConsistencyResponse:
        """Change mode or staleness at a version boundary; return when the setting is in force on all shards."""
        changed = await self._job.mode_change.change(request)
        return coordinator_pb2.ChangeConsistencyResponse(consistency=consistency_to_proto(changed))

    async def drain(self, request: coordinator_pb2.DrainRequest) -> coordinator_pb2.DrainResponse:
        """Ask a member to leave; return when it has left. Raises ConfigError if there is none, or if it has to stay."""
        wait_s = patience("wait_s", request.wait_s, 600.0)
        there = {m.name: m for role in (Role.WORKER, Role.SERVER) for m in self._job.members.of(role)}
        member = there.get(request.name)
        if member is None:
            raise errors.ConfigError(
                f"there is no worker or server {request.name[:100]!r}; there are: {', '.join(there) or 'none'}"
            )
        if request.restart and member.role is not Role.SERVER:
            raise errors.ConfigError(f"{request.name} is no server: drain it, and start another worker")
        if member.role is Role.SERVER:
            self._job.replication.check_retires(member)
        if request.restart:
            self._job.restarting.add(member.ident)
        self._job.draining.add(member.ident)
        if member.role is Role.SERVER:
            self._job.moving.add(member.ident)
            self._job.tasks.begin(hand_over(self._job, member))
        await self._job.refresh()
        deadline = time.monotonic() + (wait_s or 60.0)
        while member.ident in self._job.members:
            if not await self._job.changes.wait(deadline):
                raise errors.DeadlineError(f"{request.name} was asked to leave, but has not done so yet")
        if request.restart:
            await self._job.replication.settled(deadline)
        return coordinator_pb2.DrainResponse()

    def go_on(self) -> None:
        """Go on with servers that an earlier coordinator has asked to leave, and whose shards have still to move."""
        for member in self._job.members.of(Role.SERVER):
            if member.ident in self._job.moving:
                self._job.tasks.begin(hand_over(self._job, member))

    async def ledger(self, request: coordinator_pb2.AccountsRequest) -> coordinator_pb2.AccountsResponse:
        """Per epoch: how often samples have counted, and which worker computed which slices."""
        return await self._job.accounting.of(request)

    async def scale(self, request: coordinator_pb2.ScaleRequest) -> coordinator_pb2.ScaleResponse:
        """Have another number of workers, or of servers; return when there are so many."""
        if request.HasField("servers"):
            return await self._job.resizing.scale(request)
        return await self._job.scaling.scale(request)

    async def checkpoint(self, request: coordinator_pb2.CheckpointRequest) -> coordinator_pb2.CheckpointResponse:
        """Save the next version that can be saved; return when its checkpoint is complete.

        Raises ConfigError if the job keeps no checkpoints, UnavailableError if none can be written now, DeadlineError.
        """
        job, checkpoints = self._job, self._job.checkpoints
        wait_s = patience("wait_s", request.wait_s, 600.0) or 60.0
        if checkpoints.place is None:
            raise errors.ConfigError("this job keeps no checkpoints: start it with --checkpoint-dir")
        if job.life.phase is not Phase.RUNNING:
            raise errors.UnavailableError(f"there is nothing to save now: the job is {status_page(job, _PLAIN).state}")
        timeline, version = job.timeline, None
        try:
            async with asyncio.timeout(wait_s):
                version = await checkpoints.begin()
                good = await checkpoints.wait_settled(version)
        except TimeoutError:
            whole = "no version could be copied" if version is None else f"version {version} has not been written"
            raise errors.DeadlineError(
                f"no checkpoint within {wait_s:g} s: {whole}; `paramserver status` says whether the job gets on"
            ) from None
        if not good:
            why = checkpoints.overdue.reason or "the coordinator's log says why"
            raise errors.UnavailableError(f"the checkpoint of version {version} could not be completed: {why}")
        name = checkpoint_name(version, timeline)
        return coordinator_pb2.CheckpointResponse(name=name, place=str(checkpoints.place))

    async def stop(self, request: coordinator_pb2.StopRequest) -> coordinator_pb2.StopResponse:
        """End the job early: workers leave, and the result so far is gathered.

        With a state, the launcher says how the run has ended: people are shown that, and nothing else changes.
        """
        if request.state:
            if request.state not in _ENDS:
                raise errors.ProtocolError(f"a run has ended as {', '.join(_ENDS)}, not as {request.state[:20]!r}")
            missed = [f"{name}: {why}" for name, why in self._job.reports.missed.items()]
            self._job.ending.say(_ENDS[request.state], [*request.said, *(missed if request.state == "failed" else ())])
        elif not self._job.ended:
            reason = request.reason[:200] or "stopped by an operator"
            log.info("stopping", reason=reason)
            await self._job.conclude(Ends(Phase.STOPPED, reason, released=False))
            self._job.end("stopped")
        return coordinator_pb2.StopResponse()


async def hand_over(job: Job, member: Member) -> None:
    """Have other servers take over the shards of a server that is asked to leave; then tell it to leave.

    This goes on if the operator's command is gone, and with another coordinator.
    """
    said = ""
    while member.ident in job.members:
        try:
            await job.replication.retire(member)
            break
        except errors.ParamServerError as error:  # such as a copy that is not whole just now
            if said != str(error):
                said = str(error)
                log.info(f"{member.name} cannot leave yet: {error}")
            await asyncio.sleep(_RETRY_S)
    job.moving.discard(member.ident)
    await job.refresh()
