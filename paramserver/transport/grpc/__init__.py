"""The transport between processes: grpc.aio, with raw bytes in its messages.

Frames pass as they are; other messages are encoded and decoded here, so that a malformed one is refused in our words.
Three things are added to what the protos say:

- an error's class travels in the trailing metadata, see `failures`;
- the caller is checked, see `security`: first its tokens, when only the head of the call is there and nothing of the
  body is taken, then its certificate;
- an upload ends with one empty message. For a moment gRPC reports the end of a stream of requests in the same way
  whether the caller has finished or has died. The empty message tells the two apart.
"""

from __future__ import annotations

from collections.abc import Callable

from paramserver.failpoints import through
from paramserver.transport.base import Channel
from paramserver.transport.grpc.channel import GrpcChannel, connect
from paramserver.transport.grpc.server import GrpcServer, serve
from paramserver.transport.security.access import Security

__all__ = ["GrpcChannel", "GrpcServer", "connect", "connector", "serve"]


def connector(security: Security, peer: str) -> Callable[[str], Channel]:
    """A function from an address to a channel to a ``peer`` (a role) there."""
    return lambda address: through(connect(address, security, peer))
