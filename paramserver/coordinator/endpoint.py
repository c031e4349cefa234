"""The RPCs of a coordinator process, whether it leads the job or stands by."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from paramserver import errors
from paramserver.coordinator.service import CoordinatorService
from paramserver.core.job.status import State
from paramserver.membership.joining import versions
from paramserver.transport.base import METHODS, Method, MethodKind, caller
from paramserver.transport.security.members import judge
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.bounds import MAX_MEMBERS, MAX_TEXT_CHARS

# A server that waits asks at least this often.
_KNOCK_S = 5.0
_MAX_KNOCKS = MAX_MEMBERS
# A member sends the first message of its session at once.
_FIRST_S = 15.0


@dataclass(frozen=True, slots=True)
class Knock:
    """A call of a server that looks for its coordinator. ``at``: monotonic seconds. ``holds``: layout of its shard."""

    address: str
    holds: str
    term: int
    at: float
    key: bytes = field(default=b"", repr=False)


class Endpoint:
    """Passes each call on to ``service`` while this process leads; otherwise it refuses the call, and says why."""

    def __init__(self, job: str, settings: Sequence[coordinator_pb2.SettingInForce] = ()) -> None:
        """``settings``: of this process, without secrets."""
        self.job = job
        self._settings = settings
        self.service: CoordinatorService | None = None
        # The activity of this process while it does not lead, in words.
        self.doing = "is starting"
        # The last call of each server, by its incarnation.
        self._knocks: dict[int, Knock] = {}
        for method in METHODS.values():
            if method.service == "Coordinator" and method.handler != "status":
                make = self._session if method.kind is MethodKind.SESSION else self._unary
                setattr(self, method.handler, make(method.handler))

    async def status(self, request: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
        """The status of the job. A coordinator that does not lead says only that, with term 0."""
        if self.service is not None:
            response = await self.service.status(request)
            if request.report and not request.since_s:
                response.history.settings.extend(self._settings)
                response.history.versions.update(versions())
                response.history.host = socket.gethostname()
            return response
        response = coordinator_pb2.StatusResponse(job=self.job)
        response.state, response.reason = State.WAITING, f"this coordinator {self.doing}"
        response.processes.add(
            role="coordinator", name="coordinator", pid=os.getpid(), state=response.state, reason=response.reason
        )
        return response

    def judge(self, method: Method, message: Message) -> None:
        """Raise an error if the caller of the present call may not say this; see `transport.security.members`."""
        if self.service is not None:
            self.service.judge(method, message)
        else:
            judge(method, message, None)

    def _leader(self) -> CoordinatorService:
        if self.service is None:
            raise errors.NotLeaderError(f"this coordinator {self.doing}")
        return self.service

    def _knock(self, message: Message) -> None:
        """Note a server that is no member, or does not know yet that it is no member of this coordinator."""
        if (identity := caller()) is not None and "server" not in identity.roles:
            return
        if isinstance(message, coordinator_pb2.SettingsRequest) and message.newcomer and self.service is None:
            self._note(message.newcomer, Knock("", "", 0, time.monotonic()))
            return
        report: coordinator_pb2.JoinRequest | shard_pb2.StatsResponse
        if isinstance(message, coordinator_pb2.JoinRequest) and message.role == types_pb2.ROLE_SERVER:
            report = message
        elif isinstance(message, coordinator_pb2.SessionRequest) and message.shards:
            report = message.shards[0]  # all say the same of the process
        else:
            return
        knock = Knock(message.address, report.holds, report.term, time.monotonic(), message.key)
        self._note(report.incarnation, knock)

    def _note(self, incarnation: int, knock: Knock) -> None:
        """Note the newest call of a server; the oldest calls go if there are too many."""
        if max(len(knock.address), len(knock.holds)) > MAX_TEXT_CHARS:
            return
        self._knocks.pop(incarnation, None)
        self._knocks[incarnation] = knock
        while len(self._knocks) > _MAX_KNOCKS:
            del self._knocks[next(iter(self._knocks))]

    def _present(self) -> list[Knock]:
        since = time.monotonic() - _KNOCK_S
        return [knock for knock in self._knocks.values() if knock.at >= since]

    def newcomers(self) -> int:
        """How many servers without a shard want to join just now."""
        return sum(1 for knock in self._present() if not knock.holds)

    def key_of(self, incarnation: int) -> bytes:
        """The key of the server that has called with this incarnation; empty: it has not called lately."""
        knock = self._knocks.get(incarnation)
        return knock.key if knock is not None else b""

    def holders(self) -> list[Knock]:
        """The servers that hold a shard and look for their coordinator just now."""
        return [knock for knock in self._present() if knock.holds and knock.address]

    def _unary(self, handler: str) -> Any:
        async def answer(request: Message) -> Message:
            self._knock(request)
            service = self._leader()
            await service.job.confirm()
            reply: Message = await getattr(service, handler)(request)
            return reply

        return answer

    def _session(self, handler: str) -> Any:
        async def answer(requests: AsyncIterator[Message]) -> AsyncIterator[Message | bytes]:
            async with asyncio.timeout(_FIRST_S):
                first = await anext(aiter(requests), None)
            if first is None:
                return
            self._knock(first)

            async def all_of_them() -> AsyncIterator[Message]:
                yield first
                async for request in requests:
                    yield request

            async with aclosing(getattr(self._leader(), handler)(all_of_them())) as replies:
                async for reply in replies:
                    yield reply

        return answer
