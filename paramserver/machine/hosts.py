"""The address at which a process listens, and the address under which others reach it."""

from __future__ import annotations

import ipaddress
import socket

from paramserver import errors
from paramserver.config import Settings, split_addresses
from paramserver.transport.addresses import host_of, is_here, own_loopback

DEFAULT_PORT = 8790
_ALL = ("0.0.0.0", "::")


def coordinator_place(settings: Settings) -> tuple[str, int, str]:
    """(host to listen on, port, host to advertise) of a coordinator. Raises ConfigError if it is unclear."""
    named = [split(address) for address in split_addresses(settings.cluster.coordinator)]
    own = next(((host, port) for host, port in named if is_here(host)), None)
    if settings.cluster.listen:
        host, port = _listen(settings.cluster.listen, own[1] if own else (named[0][1] if named else DEFAULT_PORT))
        advertised = settings.cluster.advertise_host or (own[0] if own else "")
        if not advertised:
            advertised = (named[0][0] if len(named) == 1 else socket.gethostname()) if host in _ALL else host
        return host, port, advertised
    if own:
        return own[0], own[1], settings.cluster.advertise_host or own[0]
    if named:
        raise errors.ConfigError(
            f"cluster.coordinator is {settings.cluster.coordinator}, which is no address of this machine: say where to "
            "listen with --listen HOST[:PORT], such as --listen 0.0.0.0"
        )
    return own_loopback(), DEFAULT_PORT, own_loopback()


def server_place(settings: Settings) -> tuple[str, int, str]:
    """(host to listen on, port, host to advertise) of a server: this machine's address on the route to the coordinator.

    Raises ConfigError if there is no route.
    """
    route = route_to(settings.cluster.coordinator)
    advertised = settings.cluster.advertise_host
    if settings.cluster.listen:
        host, port = _listen(settings.cluster.listen, 0)
        return host, port, advertised or (host if host not in _ALL else route)
    if advertised and not is_here(advertised):
        return "0.0.0.0", 0, advertised  # behind a translation of addresses
    return advertised or route, 0, advertised or route


def route_to(addresses: str) -> str:
    """This machine's address on the route to the first of these addresses that has one; no packet is sent.

    Raises ConfigError if none has.
    """
    for address in split_addresses(addresses):
        host, port = split(address)
        try:
            family, kind, number, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, number) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    raise errors.UnavailableError(
        f"this machine has no route to the coordinator at {addresses}: check the name and the network, or give the "
        "address under which others reach this machine with --advertise-host"
    )


def split(address: str) -> tuple[str, int]:
    """Host (without brackets) and port."""
    return host_of(address), int(address.rpartition(":")[2])


def _listen(text: str, port: int) -> tuple[str, int]:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        if ":" in text:
            return split(text)
    return text.strip("[]"), port
