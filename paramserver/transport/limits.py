"""How much one peer may send, and how long it may be silent: all such numbers, as gRPC's options."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from paramserver.transport.base import MAX_MESSAGE_BYTES

Option = tuple[str, int | str]

# Enough for all limits below.
FILES = 16_384
STRANGERS = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one server or channel. A thousand workers fit: each has one connection to a server, a session, a parked pull,
    and a few pushes."""

    # Room for what is over our own limit by a little, which we refuse in our own words.
    message_bytes: int = MAX_MESSAGE_BYTES + 1024
    metadata_bytes: int = 64 * 1024
    # Calls in progress in a server; the excess is answered RESOURCE_EXHAUSTED.
    calls: int = 8192
    # Calls in progress on one connection; the excess waits at the caller, or is refused as unavailable.
    streams: int = 512
    # Connections to a server; the excess is closed. They never take more than half of the files that it may open.
    connections: int = 4096
    # Within this time a new connection has finished its handshake, or is closed.
    handshake_s: float = 20.0
    # After this silence a peer is asked for a sign of life, every second at most, and missed after the second time.
    keepalive_s: float = 10.0
    keepalive_timeout_s: float = 10.0

    def client(self) -> tuple[Option, ...]:
        """Options of a channel."""
        return (
            *self._both(),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.use_local_subchannel_pool", 1),
            # A peer that comes back is found again within about a second.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.min_reconnect_backoff_ms", 5_000),
            ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        )

    def server(self) -> tuple[Option, ...]:
        """Options of a server, but for the number of calls."""
        return (
            *self._both(),
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_allowed_incoming_connections", self.incoming()),
            ("grpc.server_handshake_timeout_ms", _ms(self.handshake_s)),
            # Pings are how a peer shows that it lives: none of them is one too many.
            ("grpc.http2.min_ping_interval_without_data_ms", _ms(self.keepalive_s) // 2),
            ("grpc.http2.max_ping_strikes", 0),
        )

    def incoming(self) -> int:
        """Connections over gRPC that a server takes at a time."""
        return min(self.connections, usable_files() // 2)

    def _both(self) -> tuple[Option, ...]:
        return (
            ("grpc.max_send_message_length", self.message_bytes),
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.max_metadata_size", self.metadata_bytes),
            ("grpc.absolute_max_metadata_size", 2 * self.metadata_bytes),
            # A compressed message is delivered as it is, whatever it would inflate to, and refused as malformed.
            ("grpc.per_message_compression", 0),
            ("grpc.per_message_decompression", 0),
            ("grpc.keepalive_time_ms", _ms(self.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _ms(self.keepalive_timeout_s)),
            # Without this one a ping has a minute, whatever the line above says.
            ("grpc.http2.ping_timeout_ms", _ms(self.keepalive_timeout_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.enable_channelz", 0),
        )


def usable_files() -> int:
    """How many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def raise_files() -> None:
    """Let this process have as many descriptors as it may ask for, up to `FILES`. Systems often begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def reserve() -> int:
    """Descriptors that no stranger gets."""
    return usable_files() // 8


def strangers() -> int:
    """Connections to one port whose callers have not shown a token yet."""
    return min(STRANGERS, usable_files() // 8)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


LIMITS = Limits()
