"""The RPCs of a coordinator process, whether it leads the job or stands by for the one that does."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from google.protobuf.message import Message

from paramserver import errors
from paramserver.coordinator.service import CoordinatorService
from paramserver.transport.base import METHODS, MethodKind
from paramserver.v1 import coordinator_pb2, types_pb2

# A server that waits asks more often than this, in seconds.
_KNOCK_S = 5.0
_MAX_KNOCKS = 10_000


class Front:
    """Passes every call on to ``service`` while this process leads; otherwise callers are told who does."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.service: CoordinatorService | None = None
        # What this process does instead of leading, in words.
        self.standing = "is starting"
        # Servers without a shard that wanted to join meanwhile: when each of them last asked (monotonic seconds).
        self._knocks: dict[int, float] = {}
        for method in METHODS.values():
            if method.service == "Coordinator" and method.handler != "status":
                make = self._session if method.kind is MethodKind.SESSION else self._unary
                setattr(self, method.handler, make(method.handler))

    async def status(self, request: coordinator_pb2.StatusRequest) -> coordinator_pb2.StatusResponse:
        """Where the job stands; of a coordinator that does not lead, only that (term 0)."""
        if self.service is not None:
            return await self.service.status(request)
        response = coordinator_pb2.StatusResponse(job=self.job)
        response.view.reason = f"this coordinator {self.standing}"
        response.processes.add(role="coordinator", name="coordinator", pid=os.getpid(), state="standby")
        return response

    def _leader(self) -> CoordinatorService:
        if self.service is None:
            raise errors.NotLeaderError(f"this coordinator {self.standing}")
        return self.service

    def _knock(self, request: coordinator_pb2.JoinRequest) -> None:
        if request.role == types_pb2.ROLE_SERVER and not request.holds and len(self._knocks) < _MAX_KNOCKS:
            self._knocks[request.incarnation] = time.monotonic()

    def newcomers(self) -> int:
        """How many servers without a shard want to join just now."""
        since = time.monotonic() - _KNOCK_S
        return sum(1 for asked_at in self._knocks.values() if asked_at >= since)

    def _unary(self, handler: str) -> Any:
        async def answer(request: Message) -> Message:
            if isinstance(request, coordinator_pb2.JoinRequest) and self.service is None:
                self._knock(request)
            service = self._leader()
            await service.confirm()
            reply: Message = await getattr(service, handler)(request)
            return reply

        return answer

    def _session(self, handler: str) -> Any:
        async def answer(requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
            async with aclosing(getattr(self._leader(), handler)(requests)) as replies:
                async for reply in replies:
                    yield reply

        return answer
