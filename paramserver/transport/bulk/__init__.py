"""The bulk transport: weights and gradients over sockets of their own, sent from where they lie.

gRPC keeps control: a caller asks for a connection by an ordinary call (`Shard.OpenBulk`), which is authorised like
every other one. The answer has a port and a token that opens one connection. A connection carries one call after the
other.
Processes that call servers import this package, and servers; everything else goes over gRPC.
"""

from __future__ import annotations

from collections.abc import Callable

from paramserver.failpoints import through
from paramserver.transport.base import Channel
from paramserver.transport.bulk.channel import BulkChannel
from paramserver.transport.bulk.server import BulkServer, serve
from paramserver.transport.grpc.channel import connect
from paramserver.transport.security.access import Security

__all__ = ["BulkChannel", "BulkServer", "connector", "serve"]


def connector(security: Security, peer: str, sockets: bool) -> Callable[[str], Channel]:
    """A function from an address to a channel to a ``peer`` (a role) there. ``sockets``: not over gRPC alone."""

    def open_channel(address: str) -> Channel:
        main = connect(address, security, peer)
        return through(BulkChannel(main, security, peer) if sockets else main)

    return open_channel
