"""The port and the store of a run: taken, out of reach, somebody's own, and gone with a launcher that was killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.integration.harness import GONE_S, SCRIPTS, Place, Running, place_fixture, until

TRAIN = SCRIPTS / "train.py"
ONE = ("--servers", "1", "--workers", "1")
# A command that fails at once, start of Python and all, beside other tests; one that waits for somebody takes a minute.
AT_ONCE_S = 20.0


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def test_store_in_another_directory_is_removed_with_a_killed_launcher() -> None:
    # Too long a path for a socket.
    with Place(temporary="/".join(["d" * 60] * 2)) as place:
        running = place.launch("run", TRAIN, *ONE)
        running.wait_for("coordinator at ")
        (socket_path,) = _sockets_of(place)
        assert not socket_path.is_relative_to(place.root)
        assert socket_path.exists()
        begin = time.monotonic()
        running.send(signal.SIGKILL)
        place.wait_until_gone(begin)
        until("the directory of the socket is gone", lambda: not socket_path.parent.exists(), GONE_S)


def _sockets_of(place: Place) -> set[Path]:
    """The Unix sockets on which stores of this place listen."""
    (pid,) = [pid for pid, command in place.processes().items() if "valkey-server" in command]
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry)):
            inodes.add(match.group(1))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return {Path(row[7]) for row in rows if len(row) > 7 and row[6] in inodes and row[7].startswith("/")}


def test_port_in_use(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = place.paramserver("run", TRAIN, "--set", f"cluster.coordinator=127.0.0.1:{port}")
    done.check(2)
    assert f"port {port} on 127.0.0.1 is in use" in done.said
    assert "Traceback" not in done.said, done.text
    assert done.seconds < AT_ONCE_S
    assert place.processes() == {}
    assert place.leftovers() == []


def test_store_that_cannot_be_reached(place: Place) -> None:
    done = place.paramserver("run", TRAIN, "--store", "redis://:secret@127.0.0.1:1/0").check(3)
    assert "127.0.0.1:1" in done.said
    assert "secret" not in done.said
    assert "Traceback" not in done.said, done.text
    assert done.seconds < AT_ONCE_S
    assert place.processes() == {}
    assert place.leftovers() == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_store_of_ones_own(place: Place, kind: str) -> None:
    """test_hygiene.py shows the same with a socket of this machine."""
    import redis

    from paramserver.machine.valkey import EmbeddedStore, find_program

    store = EmbeddedStore()
    running: Running | None = None
    try:
        if kind == "unix":
            url = store.start(place.work / "store")
        else:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            running = place.start(find_program(), "--port", str(port), "--bind", "127.0.0.1", "--save", "")
            url = f"redis://127.0.0.1:{port}/0"
        with redis.Redis.from_url(url, protocol=3) as client:
            until("the store answers", lambda: _pings(client), 10.0)
            client.set("somebody-else", "untouched")
            flags = ["--store", url, "--job", "stored"]
            place.paramserver("run", TRAIN, *ONE, *flags, "--", "--epochs", "1").check()
            keys = {key.decode() for key in client.keys("*")}
            assert client.get("somebody-else") == b"untouched"
        assert keys - {"somebody-else"}
        assert all(key.startswith("paramserver:stored:") for key in keys - {"somebody-else"}), keys
    finally:
        store.stop()
        if running is not None:
            running.kill()


def _pings(client: Any) -> bool:
    import redis

    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
