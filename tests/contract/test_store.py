"""One suite for every store: in memory, and a real server that `paramserver.local.valkey` starts."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from paramserver.errors import ConfigError, StoreError, UserError
from paramserver.local import valkey
from paramserver.local.valkey import EmbeddedStore
from paramserver.store import ConflictError, Entry, Store, open_store
from paramserver.store.base import redacted

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server."""
    embedded = EmbeddedStore()
    yield embedded.start(tmp_path_factory.mktemp("store"))
    embedded.stop()


@pytest.fixture(params=["memory", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    """Of each store in turn."""
    if request.param == "memory":
        return "memory"
    address: str = request.getfixturevalue("server")
    return address


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


# ---- the contract


def test_a_value_is_kept_with_its_revision(url: str) -> None:
    async def test(store: Store) -> None:
        await store.ping()
        assert await store.load("job") is None
        assert await store.save("job", b"\x00\xff\r\n one", 0) == 1
        assert await store.load("job") == Entry(b"\x00\xff\r\n one", 1)
        assert await store.save("job", b"", 1) == 2
        assert await store.load("job") == Entry(b"", 2)
        assert store.operations == 6

    run(url, "kept", test)


def test_a_save_on_another_revision_changes_nothing(url: str) -> None:
    async def test(store: Store) -> None:
        with pytest.raises(ConflictError, match="revision 0 of the store, not 1"):
            await store.save("job", b"x", 1)
        assert await store.load("job") is None
        await store.save("job", b"x", 0)
        for wrong in (0, 2, 7):
            with pytest.raises(ConflictError, match=f"job is at revision 1 of the store, not {wrong}"):
                await store.save("job", b"y", wrong)
        assert await store.load("job") == Entry(b"x", 1)

    run(url, "compared", test)


def test_the_same_bytes_from_two_writers_are_still_a_conflict(url: str) -> None:
    async def test(store: Store) -> None:
        assert await store.save("job", b"same", 0) == 1
        with pytest.raises(ConflictError):
            await store.save("job", b"same", 0)

    run(url, "same", test)


def test_of_many_writers_one_wins_each_round(url: str) -> None:
    async def test(store: Store) -> None:
        for round_ in range(5):
            writes = [store.save("job", str(writer).encode(), round_) for writer in range(20)]
            results = await asyncio.gather(*writes, return_exceptions=True)
            assert [result for result in results if isinstance(result, int)] == [round_ + 1]
            assert len([result for result in results if isinstance(result, ConflictError)]) == 19

    run(url, "race", test)


def test_a_deleted_key_begins_again(url: str) -> None:
    async def test(store: Store) -> None:
        await store.save("job", b"x", 0)
        await store.save("job", b"x", 1)
        await store.delete("job")
        await store.delete("never-there")
        assert await store.load("job") is None
        assert await store.save("job", b"new", 0) == 1

    run(url, "deleted", test)


def test_keys_are_listed_by_prefix(url: str) -> None:
    async def test(store: Store) -> None:
        for key in ("b/2", "a", "b/1", "b*", "bc", "käse"):
            await store.save(key, b"", 0)
        assert await store.keys() == ["a", "b*", "b/1", "b/2", "bc", "käse"]
        assert await store.keys("b/") == ["b/1", "b/2"]
        assert await store.keys("b*") == ["b*"]
        assert await store.keys("[a-z]") == []

    run(url, "list[1]*", test)


def test_a_large_value_is_kept(url: str) -> None:
    async def test(store: Store) -> None:
        value = os.urandom(2**22)
        await store.save("big", value, 0)
        assert await store.load("big") == Entry(value, 1)

    run(url, "large", test)


# ---- addresses and errors


@pytest.mark.parametrize(
    "url",
    [
        "",
        "auto",
        "mongodb://host",
        "http://user:canary@host",
        "redis:/host",
        "redis",
        "memory://",
        "redis://host:port/0",
    ],
)
def test_an_address_of_no_store_is_the_users_mistake(url: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.store") as caught:
        open_store(url, "p")
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:canary@host/0",
        "redis://:ca?canary@host",
        "redis://:ca#canary@host",
        "redis://:ca/canary@host",
        "redis://:ca@canary@host",
        "redis://host/0?password=a@canary",
        "user:canary@host",
    ],
)
def test_a_password_is_never_shown(url: str) -> None:
    assert "canary" not in redacted(url)
    assert ":ca" not in redacted(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:canary@127.0.0.1:1/0", "redis://…@127.0.0.1:1/0"),
        ("redis://127.0.0.1:1/0?password=canary", "redis://127.0.0.1:1/0"),
        ("unix://:canary@/nowhere/store.sock?db=0", "unix://…@/nowhere/store.sock"),
        ("unix:///nowhere/store.sock?password=canary", "unix:///nowhere/store.sock"),
    ],
    ids=lambda text: text.partition("://")[0],
)
def test_a_store_that_does_not_answer_is_named_without_its_password(url: str, shown: str) -> None:
    async def test(store: Store) -> None:
        for operation in (
            store.ping(),
            store.load("k"),
            store.save("k", b"", 0),
            store.delete("k"),
            store.keys(),
        ):
            with pytest.raises(StoreError, match=r"no store answers at .*: start Redis or Valkey there") as caught:
                await operation
            assert shown in str(caught.value)
            error: BaseException | None = caught.value
            while error is not None:
                assert "canary" not in str(error) + repr(error)
                error = error.__cause__ or error.__context__
        assert store.operations == 5

    run(url, "p", test)


def test_a_wrong_password_and_a_foreign_key_are_told_apart(server: str) -> None:
    async def test(store: Store) -> None:
        with pytest.raises(StoreError, match="does not let us read: correct user and password") as caught:
            await store.load("k")
        assert "canary" not in str(caught.value)

    run(server.replace("unix://", "unix://somebody:canary@"), "p", test)

    async def foreign(store: Store) -> None:
        await store._client.set("p:k", b"not a hash")  # type: ignore[attr-defined]
        with pytest.raises(StoreError, match="could not read: WRONGTYPE"):
            await store.load("k")
        with pytest.raises(StoreError, match="could not write: "):
            await store.save("k", b"", 0)

    run(server, "p", foreign)


def test_a_save_that_is_sent_twice_counts_once(server: str) -> None:
    """The connection breaks after the script ran; the client sends it again, under the same name."""

    async def test(store: Store) -> None:
        script = store._script  # type: ignore[attr-defined]
        request = {"keys": ["twice:job"], "args": [0, b"x", "request-1"]}
        assert await script(**request) == [1, 1]
        assert await script(**request) == [1, 1]
        assert await store.load("job") == Entry(b"x", 1)

    run(server, "twice", test)


def test_a_script_that_the_server_forgot_is_loaded_again(server: str) -> None:
    async def test(store: Store) -> None:
        assert await store.save("job", b"", 0) == 1
        await store._client.script_flush()  # type: ignore[attr-defined]
        assert await store.save("job", b"", 1) == 2

    run(server, "forgot", test)


def test_prefixes_do_not_see_each_other(server: str) -> None:
    async def test(store: Store) -> None:
        other = open_store(server, "one-more")
        try:
            await store.save("k", b"mine", 0)
            assert await other.load("k") is None
            assert await other.keys() == []
        finally:
            await other.close()

    run(server, "one", test)


# ---- the embedded server


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
        "from paramserver.local.valkey import EmbeddedStore\n"
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
