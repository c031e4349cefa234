"""Unit tests are pure: whoever opens a connection or sleeps here fails."""

from __future__ import annotations

import os
import socket
import time
from typing import NoReturn

import pytest


def _no_socket(*_: object, **__: object) -> NoReturn:
    raise AssertionError("unit tests use no sockets; move the test to tests/integration")


def _no_sleep(*_: object, **__: object) -> NoReturn:
    raise AssertionError("unit tests do not sleep; pass the time as an argument")


@pytest.fixture(autouse=True)
def _pure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid sockets and sleeping, and hide the PARAMSERVER_* variables of whoever runs the tests."""
    for name in ("connect", "connect_ex", "bind", "listen"):
        monkeypatch.setattr(socket.socket, name, _no_socket)
    monkeypatch.setattr(time, "sleep", _no_sleep)
    for name in [name for name in os.environ if name.startswith("PARAMSERVER_")]:
        monkeypatch.delenv(name)
