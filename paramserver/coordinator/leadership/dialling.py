"""Calls back to addresses that a caller names: whether a server can be reached there.

A caller could name any address, and learn from the answer what listens there. Its own address, and another one of its
machine, are dialled as they are. Other addresses may be right as well, behind a translation of addresses. There the
caller hears only whether a server has answered, failures come after one and the same time, and their number is
limited.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from paramserver import errors
from paramserver.transport.addresses import host_of, is_here, network_of, plain_host
from paramserver.transport.base import caller_host

# A call to an address that is not the caller's.
_FOREIGN_S = 5.0
# So many of them may fail for one caller within a time.
_MOST, _WITHIN_S = 32, 60.0
_MOST_CALLERS = 1000
# Ports below belong to services of the system.
_FIRST_PORT = 1024

Resolve = Callable[[str], Awaitable[frozenset[str]]]


async def resolved(host: str) -> frozenset[str]:
    """The numbers of a host; none if nobody knows the name."""
    with suppress(OSError, UnicodeError):
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return frozenset(plain_host(str(where[0])) for *_, where in found)
    return frozenset()


class Dialling:
    """Dials addresses that callers name."""

    def __init__(self, resolve: Resolve = resolved, clock: Callable[[], float] = time.monotonic) -> None:
        self._resolve, self._clock = resolve, clock
        # Callers -> when they named addresses of others at which no server has answered yet.
        self._failures: dict[str, list[float]] = {}

    async def back(self, address: str, timeout_s: float, ask: Callable[[float], Awaitable[object]]) -> None:
        """``ask`` calls a server at the address, within so many seconds.

        Raises ConfigError with a hint if no server can be reached there, OverloadedError after many failures.
        """
        caller, hosts = caller_host(), await self._resolve(host_of(address))
        if not caller or await _belongs(caller, hosts):
            try:
                await ask(timeout_s)
            except errors.RetryableError as error:
                raise _unreachable(address) from error
            return
        failures, now = self._recent(network_of(caller)), self._clock()
        if len(failures) >= _MOST:
            raise errors.OverloadedError("too many addresses were named at which no server answers: try again later")
        failures.append(now)
        ends = asyncio.get_running_loop().time() + min(_FOREIGN_S, timeout_s)
        if not _forbidden(address, hosts):
            with suppress(errors.ParamServerError, TimeoutError):
                async with asyncio.timeout_at(ends):
                    await ask(timeout_s)
                    failures.remove(now)
                    return
        await asyncio.sleep(max(0.0, ends - asyncio.get_running_loop().time()))
        raise _unreachable(address)

    def _recent(self, caller: str) -> list[float]:
        failures = self._failures.pop(caller, [])
        failures[:] = [at for at in failures if self._clock() - at < _WITHIN_S]
        while len(self._failures) >= _MOST_CALLERS:
            del self._failures[next(iter(self._failures))]
        self._failures[caller] = failures
        return failures


def _unreachable(address: str) -> errors.ConfigError:
    return errors.ConfigError(
        f"the coordinator cannot reach the server at {address[:200]}, the address it advertised: "
        "check the host name, the firewall, or give another one with --advertise-host"
    )


async def _belongs(caller: str, hosts: frozenset[str]) -> bool:
    """Whether these are addresses of the caller's machine. For this machine every own address is one."""
    if not hosts or hosts <= {caller}:
        return bool(hosts)
    return await asyncio.to_thread(lambda: all(is_here(host) for host in (caller, *hosts)))


def _forbidden(address: str, hosts: frozenset[str]) -> bool:
    """Whether these are no addresses under which a server of another machine can be."""
    port = address.rpartition(":")[2]
    if not hosts or not (port.isascii() and port.isdecimal() and len(port) <= 5) or int(port) < _FIRST_PORT:
        return True
    found = [ipaddress.ip_address(host) for host in hosts]
    return any(
        host.is_loopback or host.is_link_local or host.is_multicast or host.is_unspecified or host.is_reserved
        for host in found
    )
