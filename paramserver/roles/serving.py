"""A server process: a shard, the port it listens on, and its membership."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from paramserver import errors, logs
from paramserver.config import Settings, split_addresses
from paramserver.core.layout.thresholds import server_threads
from paramserver.failpoints import known_as
from paramserver.processes.environment import replaced_pids
from paramserver.transport.security.access import Security
from paramserver.v1 import types_pb2

if TYPE_CHECKING:
    from paramserver.server.member import ServerMember
    from paramserver.server.service import ServerService
    from paramserver.transport.base import Channel

log = structlog.get_logger("paramserver.server")

_LOOK_S = 0.1
_ENDED = (types_pb2.JOB_STATE_DONE, types_pb2.JOB_STATE_STOPPED)


class Serving:
    """One server of the job. ``settings`` are those of the job already.

    ``index``: the launcher's wish, or None.
    """

    def __init__(self, settings: Settings, security: Security, coordinator: Channel, index: int | None) -> None:
        self._settings = settings
        self._security = security
        self._coordinator = coordinator
        self._index = index
        self.member: ServerMember | None = None

    async def run(
        self,
        host: str,
        port: int,
        advertised: str,
        stop: asyncio.Event,
        listening: Callable[[int, ServerMember], None] = lambda port, member: None,
    ) -> None:
        """Listen, join, serve until ``stop`` or the end of the job. ``listening`` is told the port.

        Raises ConfigError if the port cannot be had or the coordinator refuses, JobFailedError when the job has failed,
        UnavailableError when coordinator and workers have been gone for ``cluster.max_idle_s``.
        """
        from paramserver.server.member import ServerMember
        from paramserver.transport import bulk, grpc
        from paramserver.transport.addresses import join
        from paramserver.web.metrics.members import SERVER, server_samples
        from paramserver.web.metrics.port import MetricsPort

        settings = self._settings
        over_sockets = settings.cluster.transport != "grpc"
        service = self._service(over_sockets)
        metrics = MetricsPort(
            settings,
            self._security,
            SERVER,
            lambda: server_samples(self.name, service.reports()),
            lambda: self.name,
        )
        server = await grpc.serve([("Shard", service)], host, port, self._security)
        sockets = (
            await bulk.serve([("Shard", service)], host, self._bulk_port(), self._security) if over_sockets else None
        )
        service.process.offer = sockets.offer if sockets else None
        self.member = ServerMember(
            service,
            self._coordinator,
            join(advertised, server.port),
            self._index,
            settings.cluster.join_timeout_s,
            settings.log.interval_s,
            replaced_pids(),
            settings.cluster.beside_worker,
            metrics_url=lambda: metrics.url,
        )
        listening(server.port, self.member)
        try:
            await metrics.start(advertised)
            await self.member.join()
            member = self.member
            known_as(member.session.name)
            logs.known_as(member.session.name, member.service.version)
            await self.until_over(self.member, stop)
        finally:
            await metrics.close()
            await self.member.close()
            await asyncio.gather(server.stop(0.2), *([sockets.stop(0.2)] if sockets else []))

    def _service(self, over_sockets: bool) -> ServerService:
        """The service of this process, which is made ready for arithmetic. ``over_sockets``: beside gRPC."""
        import torch

        from paramserver.server.service import ServerService
        from paramserver.tensors.own import allow
        from paramserver.tensors.uncompiled import postpone_compiler
        from paramserver.transport import bulk
        from paramserver.transport.allocation import keep_memory
        from paramserver.transport.shm.meeting import meet_in

        settings = self._settings
        torch.set_num_threads(1)
        keep_memory(server=True)
        meet_in(Path(settings.cluster.meeting_dir))
        allow(split_addresses(settings.cluster.optimizers))
        postpone_compiler()
        return ServerService(
            settings.cluster.job,
            bulk.connector(self._security, "server", over_sockets),
            settings.cluster.wait_timeout_s,
            settings.training.threads_per_server
            or server_threads(len(os.sched_getaffinity(0)), _servers_here(settings)),
            shares=settings.cluster.transport in ("auto", "shm"),
        )

    def _bulk_port(self) -> int:
        """The port for bulk connections of this server: those of one machine have ports one after the other."""
        port = self._settings.cluster.bulk_port
        return port + (self._index or 0) if port and _servers_here(self._settings) > 1 else port

    @property
    def name(self) -> str:
        """The name of the server in the job; empty until it is a member."""
        return self.member.session.name if self.member is not None else ""

    async def until_over(self, member: ServerMember, stop: asyncio.Event) -> None:
        """Return when ``stop`` is set or the job is over. Raises JobFailedError if the shard or the job has failed."""
        said = time.monotonic()
        while not stop.is_set():
            if failure := member.service.process.failure:
                raise errors.JobFailedError(failure)
            failed = member.session.failure
            if isinstance(failed, errors.EndedError) and not isinstance(failed, errors.RestartError):
                log.info(str(member.session.failure))
                return
            if member.session.failure is not None:
                raise member.session.failure
            view = member.session.view
            if view.state == types_pb2.JOB_STATE_FAILED:
                raise errors.JobFailedError(view.reason)
            if view.state in _ENDED and view.released and self._settings.cluster.when_done == "exit":
                return
            self._check_alone(member)
            waiting = view.state == types_pb2.JOB_STATE_WAITING and not self._settings.run.ddp
            if waiting and time.monotonic() - said >= self._settings.log.interval_s:
                said = time.monotonic()
                log.info(f"waiting for {view.reason or 'the model'}")
            try:
                async with asyncio.timeout(_LOOK_S):
                    await stop.wait()
            except TimeoutError:
                pass

    def _check_alone(self, member: ServerMember) -> None:
        limit, lost_at = self._settings.cluster.max_idle_s, member.session.lost_at
        if lost_at is None:
            return
        if time.monotonic() - max(lost_at, member.service.used_at) > limit:
            raise errors.UnavailableError(
                f"no coordinator and no worker for {limit:g} s (cluster.max_idle_s): this server gives up"
            )


def _servers_here(settings: Settings) -> int:
    """How many servers share this machine: under `run` all, elsewhere those started by one command."""
    return max(settings.cluster.servers, settings.cluster.servers_per_host)
