"""Which addresses a coordinator calls because somebody names them, and what the caller learns from that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from paramserver import errors
from paramserver.coordinator.leadership import dialling
from paramserver.coordinator.leadership.dialling import Dialling
from paramserver.transport.addresses import target
from paramserver.transport.base import set_host

CALLER = "10.0.0.7"
NAMES = {"server-0": CALLER, "gateway": "192.0.2.1", "inside": "127.0.0.1", "metadata": "169.254.169.254"}


class Dialled:
    """The addresses that are called. ``answer``: raised in place of an answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Exception | None = None) -> None:
        monkeypatch.setattr(dialling, "_FOREIGN_S", 0.05)
        monkeypatch.setattr(dialling, "is_here", lambda host: host in ("127.0.0.1", "10.0.0.1"))
        self.calls: list[str] = []
        self.now = 0.0
        self._answer = answer
        self._dialling = Dialling(self._resolve, lambda: self.now)

    async def _resolve(self, host: str) -> frozenset[str]:
        host = NAMES.get(host, host)
        return frozenset([host] if host[:1].isdigit() else [])

    def _ask(self, address: str) -> Callable[[float], Awaitable[object]]:
        async def ask(_: float) -> None:
            self.calls.append(address)
            if self._answer is not None:
                raise self._answer

        return ask

    async def dial(self, address: str, caller: str = CALLER) -> str:
        """What the caller hears; empty if a server was reached."""
        set_host(caller)
        try:
            await self._dialling.back(address, 1.0, self._ask(address))
        except errors.ParamServerError as error:
            return f"{type(error).__name__}: {error}"
        return ""


@pytest.mark.parametrize(
    ("caller", "address"),
    [
        (CALLER, f"{CALLER}:8791"),
        (CALLER, "server-0:22"),
        (CALLER, "gateway:8791"),  # behind a translation of addresses
        ("127.0.0.1", "10.0.0.1:8791"),  # this machine under another address
        ("10.0.0.1", "inside:8791"),
        ("", "192.0.2.1:22"),  # without a network there is no host
    ],
)
def test_addresses_under_which_a_caller_may_be_are_dialled(
    monkeypatch: pytest.MonkeyPatch, caller: str, address: str
) -> None:
    dialled = Dialled(monkeypatch)
    assert asyncio.run(dialled.dial(address, caller)) == ""
    assert dialled.calls == [address]


@pytest.mark.parametrize(
    "address",
    ["inside:8791", "metadata:8080", "gateway:22", "0.0.0.0:8791", "nobody:8791", "gateway", "gateway:" + "9" * 5000],
)
def test_addresses_under_which_no_server_can_be_are_not_dialled(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    dialled = Dialled(monkeypatch)
    text = asyncio.run(dialled.dial(address))
    assert text.startswith(f"ConfigError: the coordinator cannot reach the server at {address[:200]}, ")
    assert dialled.calls == []


@pytest.mark.parametrize("port", ["", "0", "65536", "9" * 5000, "\u0663"])
def test_a_port_that_is_none_is_refused_in_one_sentence(port: str) -> None:
    with pytest.raises(errors.ConfigError, match="is no address: write host:port"):
        target(f"127.0.0.1:{port}")


def test_nothing_of_what_listens_at_a_foreign_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every failure has the same words, and takes the same time."""
    words = set()
    for answer in (errors.DeniedError("secret"), errors.UnavailableError("refused"), errors.VersionMismatchError("v")):
        dialled = Dialled(monkeypatch, answer)

        async def timed(dialled: Dialled = dialled) -> str:
            began = asyncio.get_running_loop().time()
            text = await dialled.dial("gateway:8791")
            assert asyncio.get_running_loop().time() - began >= 0.049
            return text

        words.add(asyncio.run(timed()))
        assert dialled.calls == ["gateway:8791"]
    assert len(words) == 1


def test_a_caller_hears_why_its_own_address_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled = Dialled(monkeypatch, errors.DeniedError("a certificate of another job"))
    assert asyncio.run(dialled.dial("server-0:8791")) == "DeniedError: a certificate of another job"


def test_failures_at_foreign_addresses_are_limited_per_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "_MOST", 3)
    dialled = Dialled(monkeypatch, errors.UnavailableError("refused"))

    async def story() -> None:
        told = await asyncio.gather(*(dialled.dial(f"gateway:{port}") for port in range(2000, 2010)))
        assert [text.partition(":")[0] for text in told] == ["ConfigError"] * 3 + ["OverloadedError"] * 7
        assert len(dialled.calls) == 3
        assert (await dialled.dial("gateway:8791", "10.0.0.8")).startswith("ConfigError")
        assert (await dialled.dial("server-0:8791")).startswith("ConfigError")  # its own address
        dialled.now = 60.0
        assert (await dialled.dial("gateway:8791")).startswith("ConfigError")

    asyncio.run(story())


def test_callers_that_name_foreign_addresses_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "_MOST_CALLERS", 10)
    one = Dialling()
    for number in range(100):
        one._recent(f"10.0.0.{number}").append(0.0)
    assert list(one._failures) == [f"10.0.0.{number}" for number in range(90, 100)]
