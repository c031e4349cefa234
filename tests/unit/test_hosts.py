"""Where processes listen and under which name others reach them."""

from __future__ import annotations

import errno
import socket

import pytest

from paramserver import errors
from paramserver.config import Settings, load_settings
from paramserver.machine import hosts
from paramserver.machine.hosts import coordinator_place, server_place, split
from paramserver.transport.addresses import own_loopback

# The addresses of this machine, as far as these tests are concerned.
HERE = ("127.0.0.1", "localhost", "10.0.0.1", "::1", "0.0.0.0", "::")
ROUTE = "10.0.0.1"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "is_here", lambda host: host in HERE)
    monkeypatch.setattr(hosts, "route_to", lambda addresses: ROUTE)
    monkeypatch.setattr(hosts, "own_loopback", lambda: "127.0.0.1")
    monkeypatch.setattr("socket.gethostname", lambda: "node-1")


def settings(coordinator: str = "", listen: str = "", advertise_host: str = "") -> Settings:
    values = {"cluster.coordinator": coordinator, "cluster.listen": listen, "cluster.advertise_host": advertise_host}
    return load_settings(None, values, environ={})


COORDINATORS = [
    # (cluster.coordinator, listen, advertise_host) -> (host, port, advertised)
    (("", "", ""), ("127.0.0.1", 8790, "127.0.0.1")),
    (("10.0.0.1:9000", "", ""), ("10.0.0.1", 9000, "10.0.0.1")),
    (("10.0.0.2:9000, 10.0.0.1:9001", "", ""), ("10.0.0.1", 9001, "10.0.0.1")),
    (("[::1]:9000", "", ""), ("::1", 9000, "::1")),
    (("", "0.0.0.0", ""), ("0.0.0.0", 8790, "node-1")),
    (("", "0.0.0.0:9000", "ps.example"), ("0.0.0.0", 9000, "ps.example")),
    (("", "10.0.0.1", ""), ("10.0.0.1", 8790, "10.0.0.1")),
    (("", "10.0.0.1:0", ""), ("10.0.0.1", 0, "10.0.0.1")),
    (("", "[::1]:9000", ""), ("::1", 9000, "::1")),
    (("", "::1", ""), ("::1", 8790, "::1")),
    # Behind a name that is not this machine's own (a service, a load balancer, a container): it is what others know.
    (("ps.example:9000", "0.0.0.0", ""), ("0.0.0.0", 9000, "ps.example")),
    (("ps.example:9000", "0.0.0.0:8000", ""), ("0.0.0.0", 8000, "ps.example")),
    (("a.example:9000, b.example:9001", "0.0.0.0", ""), ("0.0.0.0", 9000, "node-1")),
    (("10.0.0.1:9000", "0.0.0.0", ""), ("0.0.0.0", 9000, "10.0.0.1")),
    (("10.0.0.1:9000", "", "ps.example"), ("10.0.0.1", 9000, "ps.example")),
]


@pytest.mark.parametrize(("given", "expected"), COORDINATORS)
def test_coordinators(given: tuple[str, str, str], expected: tuple[str, int, str]) -> None:
    assert coordinator_place(settings(*given)) == expected


def test_a_coordinator_of_another_machine() -> None:
    with pytest.raises(errors.ConfigError, match=r"cluster\.coordinator is 10\.0\.0\.2:9000, which is no address of"):
        coordinator_place(settings("10.0.0.2:9000"))


SERVERS = [
    (("10.0.0.2:9000", "", ""), (ROUTE, 0, ROUTE)),
    (("10.0.0.2:9000", "0.0.0.0", ""), ("0.0.0.0", 0, ROUTE)),
    (("10.0.0.2:9000", "0.0.0.0:7000", ""), ("0.0.0.0", 7000, ROUTE)),
    (("10.0.0.2:9000", "127.0.0.1:7000", ""), ("127.0.0.1", 7000, "127.0.0.1")),
    (("10.0.0.2:9000", "127.0.0.1:0", ""), ("127.0.0.1", 0, "127.0.0.1")),
    (("10.0.0.2:9000", "0.0.0.0", "outside.example"), ("0.0.0.0", 0, "outside.example")),
    # A name that is this machine's own is also where it listens; one that is not belongs to somebody who forwards.
    (("10.0.0.2:9000", "", "localhost"), ("localhost", 0, "localhost")),
    (("10.0.0.2:9000", "", "outside.example"), ("0.0.0.0", 0, "outside.example")),
]


@pytest.mark.parametrize(("given", "expected"), SERVERS)
def test_servers(given: tuple[str, str, str], expected: tuple[str, int, str]) -> None:
    assert server_place(settings(*given)) == expected


def test_addresses_are_split() -> None:
    assert split("a.example:8790") == ("a.example", 8790)
    assert split("[2001:db8::1]:8790") == ("2001:db8::1", 8790)


@pytest.mark.parametrize(
    ("there", "expected"), [(["127.0.0.1", "::1"], "127.0.0.1"), (["::1"], "::1"), ([], "127.0.0.1")]
)
def test_the_loopback_address_of_a_machine_with_ipv6_only(
    there: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bind(_: socket.socket, where: tuple[str, int]) -> None:
        if where[0] not in there:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", bind)
    assert own_loopback.__wrapped__() == expected
