"""Network addresses as users write them, as gRPC wants them, and whether one can listen on them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import os
import socket

from paramserver import errors


def join(host: str, port: int) -> str:
    """Both as "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def shard_address(server: str, shard: int) -> str:
    """The address of a shard: that of its server, and the number of the shard, as in "10.0.0.7:8791/3"."""
    return f"{server}/{shard}"


def split_shard(address: str) -> tuple[str, int | None]:
    """The address of a process, and the number of the shard that calls are for; None if ``address`` names none."""
    server, _, shard = address.rpartition("/")
    return (server, int(shard)) if server and shard.isascii() and shard.isdecimal() else (address, None)


def target(address: str) -> str:
    """gRPC's name for an address: numeric ones need no resolver, others are never mistaken for a scheme.

    Raises ConfigError if it is not of the form "host:port" or "[IPv6]:port".
    """
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    if not (bare and 0 < number < 65536) or (":" in bare) == (bare == host):
        raise errors.ConfigError(f"{address!r} is no address: write host:port, such as 127.0.0.1:8790 or [::1]:8790")
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, bare)
            return f"{scheme}:{address}"
    return f"dns:///{address}"


def host_of(address: str) -> str:
    """The host of "host:port" or "[IPv6]:port", without brackets."""
    return address.rpartition(":")[0].strip("[]")


@functools.cache
def own_loopback() -> str:
    """The loopback address on which processes of this machine listen: ``::1`` where there is no 127.0.0.1."""
    for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        with contextlib.suppress(OSError), socket.socket(family) as trial:
            trial.bind((host, 0))
            return host
    return "127.0.0.1"  # whoever listens there hears why that cannot be


def loopback(host: str) -> bool | None:
    """Whether an address or name is of this machine only; None for a name that has to be resolved first."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        found = _unmapped(host)
    except ValueError:
        return None if host else False
    return found.is_loopback


def _unmapped(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The number of a host. Raises ValueError for a name; "127.0.0.1%.evil" is one."""
    found = ipaddress.ip_address(host)
    return (isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped) or found


def plain_host(host: str) -> str:
    """The host as a number without a zone; IPv4 in its own form. A name stays as it is."""
    try:
        return str(_unmapped(host)).partition("%")[0]
    except ValueError:
        return host


def network_of(host: str) -> str:
    """Whom connections from this number are counted to: the number, or for IPv6 its network of 64 bits."""
    plain = plain_host(host)
    return str(ipaddress.ip_network((plain, 64), strict=False)) if ":" in plain else plain


async def resolves_to_loopback(host: str) -> bool:
    """Like `loopback`, names included: all their addresses must be of this machine only.

    Raises OSError if the name is not known.
    """
    known = loopback(host)
    if known is not None:
        return known
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, "it is no host name") from error
    return bool(found) and all(loopback(str(where[0])) for *_, where in found)


def is_here(host: str) -> bool:
    """Whether this host is an address of this machine, found out by binding to it for a moment."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, number, _, where in found:
        try:
            with socket.socket(family, kind, number) as probe:
                probe.bind(where)
                return True
        except OSError:
            continue
    return False


async def probe(host: str, port: int) -> None:
    """Check that ``host`` and ``port`` can be listened on, by doing so for a moment.

    Raises ConfigError that says why not, which gRPC would not.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise errors.ConfigError(f"cannot listen on {host!r}: it is no address or name of this machine") from error
    failure: OSError | None = None
    usable = False
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(where)
            usable = True
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise errors.ConfigError(
                    f"port {port} on {host} is in use; stop the process that has it, or choose another port"
                ) from error
            failure = error
    if not usable:
        reason = os.strerror(failure.errno).lower() if failure is not None and failure.errno else "it has no address"
        raise errors.ConfigError(f"cannot listen on port {port} of {host} ({reason}); choose another port or host")
