"""A server as a member of the job: its shard, and its tie to the coordinator."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from paramserver.membership.joining import JoinOptions
from paramserver.membership.session import Session
from paramserver.server.service import ServerService
from paramserver.transport.base import Channel
from paramserver.v1 import coordinator_pb2, types_pb2


class ServerMember:
    """Reports the state of its shard to the coordinator. ``address``: where other processes reach the shard."""

    def __init__(
        self,
        service: ServerService,
        coordinator: Channel,
        address: str,
        index: int | None = None,
        join_timeout_s: float = 180.0,
        log_interval_s: float = 5.0,
        replaces: Sequence[int] = (),
        beside_worker: bool = False,
        pid: int = 0,
        metrics_url: Callable[[], str] = lambda: "",
    ) -> None:
        """``pid``: of the process, if it is not this one (for tests)."""
        options = JoinOptions(
            role=types_pb2.ROLE_SERVER,
            job=service.process.job,
            index=index,
            pid=pid or os.getpid(),
            address=address,
            join_timeout_s=join_timeout_s,
            log_interval_s=log_interval_s,
            shard=service.holding,
            term=lambda: service.process.term,
            replaces=replaces,
            beside_worker=beside_worker,
            drop=service.drop,
            metrics_url=metrics_url,
            key=service.process.key,
        )
        self.service = service
        # Notices when this process does not run.
        self._pulse: asyncio.Task[None] | None = None
        self.session = Session(coordinator, options, self._report, service.process.trace)
        service.process.becomes_member(self.session.incarnation, self.session.report_now)

    async def join(self) -> None:
        """Become a member; the coordinator dials back to the address before it agrees."""
        await self.session.join()
        self._pulse = asyncio.create_task(self.service.process.pulse.run())

    def _report(self) -> coordinator_pb2.SessionRequest:
        return coordinator_pb2.SessionRequest(shards=self.service.reports())

    async def close(self) -> None:
        """Leave the job and end the shard."""
        await self.session.leave()
        if self._pulse is not None:
            self._pulse.cancel()
        await self.service.close()
        await self.session.channel.close()
