"""Shared memory with workers on this host, and the sockets over which their calls come."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from paramserver import errors
from paramserver.server.rpc.host import Host
from paramserver.transport.base import Caller, caller
from paramserver.transport.security.policy import WORKER
from paramserver.transport.shm import channel as local
from paramserver.v1 import shard_pb2

_A_WORKER = Caller(frozenset({WORKER}), admin=False)


class Attaching:
    """``service`` answers the calls that workers send over these sockets."""

    def __init__(self, host: Host, service: object) -> None:
        self._host, self._service = host, service

    async def attach(self, request: shard_pb2.AttachRequest) -> shard_pb2.AttachResponse:
        """Share memory with a worker on this host; the answer says why if that cannot be."""
        self._host.process.check_job(request.job)
        shard = self._host.ready(active=False)
        if request.timeline != shard.config.timeline:
            raise errors.RolledBackError(f"this server is on timeline {shard.config.timeline}, not {request.timeline}")
        if request.layout_digest != shard.digest:
            raise errors.ProtocolError("this shard holds another model")
        # One pair for the worker's event loop, one for its thread that trains.
        pairs = [socket.socketpair() for _ in range(2)]
        unserved = [ours for ours, _ in pairs]
        try:
            with ExitStack() as given:
                for _, theirs in pairs:
                    given.enter_context(theirs)
                response = shard.sharing.attach(request, *(theirs.fileno() for _, theirs in pairs))
            while response.attachment and unserved:
                line = await local.serve(unserved[0], [("Shard", self._service)], caller() or _A_WORKER)
                del unserved[0]
                shard.sharing.answer(response.attachment, line)
        finally:
            for sock in unserved:
                sock.close()
        return response
