"""What is left of a run on the machine and in a shared store: nothing but the job's record, however the run ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paramserver.coordinator.leadership.journal import parse_record
from paramserver.machine.valkey import EmbeddedStore
from paramserver.v1 import types_pb2
from tests.support.integration.harness import (
    GONE_S,
    SCRIPTS,
    Place,
    Running,
    complaint,
    free_address,
    place_fixture,
    until,
)

TRAIN = SCRIPTS / "train.py"
SHARED_MEMORY = Path("/dev/shm")
# Of a job that has ended: where it stood, and the number that fences off those who led it.
RECORD = {"entry:state", "term"}


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


class Shared:
    """A store that is not the run's own, with somebody else's key in it."""

    def __init__(self, place: Place) -> None:
        import redis

        self.server = EmbeddedStore()
        self.url = self.server.start(place.work / "shared")
        self.client: Any = redis.Redis.from_url(self.url, protocol=3)
        self.client.set("somebody-else", "untouched")

    def keys_of(self, job: str) -> set[str]:
        """What the job has there, without the common prefix."""
        prefix = f"paramserver:{job}:"
        return {key.decode().removeprefix(prefix) for key in self.client.keys("*") if key.decode().startswith(prefix)}

    def keys_of_others(self, job: str) -> set[bytes]:
        """All keys that are not the job's."""
        return {key for key in self.client.keys("*") if not key.startswith(f"paramserver:{job}:".encode())}

    def of(self, job: str) -> dict[bytes, object]:
        """All that the job has there."""
        return {key: self.client.dump(key) for key in self.client.keys(f"paramserver:{job}:*")}

    def close(self) -> None:
        self.client.close()
        self.server.stop()


@pytest.fixture
def shared(place: Place) -> Iterator[Shared]:
    store = Shared(place)
    try:
        yield store
    finally:
        store.close()


class Run:
    """A run of one server and two workers on the shared store, at a known port."""

    def __init__(self, place: Place, shared: Shared, job: str, *script: str) -> None:
        self.place, self.shared, self.job = place, shared, job
        self.before = _loaders_memory()
        self.address = free_address()
        self.running: Running = place.launch(
            *("run", str(TRAIN), "--servers", "1", "--workers", "2", "--store", shared.url, "--job", job),
            *("--set", f"cluster.coordinator={self.address}", "--", "--num-workers", "1", *script),
            environ=place.meeting_apart,
        )

    def train(self) -> None:
        """Until both workers train."""
        self.running.wait_for(r"worker-\d \| rank \d of \d trains", count=2)

    def clean(self, since: float) -> None:
        """Nothing of it is there ``GONE_S`` after ``since``, on the machine or in memory.

        Its port is not asked: processes that are gone have none, and another test may have been given it meanwhile.
        """
        store = self.shared.server.pid
        until(
            "all processes are gone", lambda: set(self.place.processes()) <= {store}, since + GONE_S - time.monotonic()
        )
        until("the directories are gone", lambda: not self._directories(), GONE_S)
        _wait_until_shared_memory_is_as(self.before)
        self.place.check_meetings()

    def _directories(self) -> list[str]:
        # Python's own multiprocessing has no chance to remove its directories if it is killed.
        names = (name.partition("/")[0] for name in self.place.leftovers())
        return [name for name in names if not name.startswith(("pymp-", f"paramserver-{os.getuid()}"))]


def _loaders_memory() -> set[str]:
    """What torch's loading processes have in shared memory, those of other runs on this machine, too."""
    return {entry.name for entry in SHARED_MEMORY.iterdir() if entry.name.startswith(("torch_", "psm_"))}


def _wait_until_shared_memory_is_as(before: set[str]) -> None:
    """Loaders of other runs on this machine have memory there for a moment, too: it goes by itself, ours would stay."""
    new = _loaders_memory() - before
    until(f"nothing is left in shared memory of {new}", lambda: not new & _loaders_memory(), GONE_S)


@pytest.mark.parametrize(
    "end", ["success", *(pytest.param(end, marks=pytest.mark.long) for end in ("failure", "ctrl-c"))]
)
def test_k05_a_run_leaves_its_record_only(place: Place, shared: Shared, end: str) -> None:
    script = {"success": ("--epochs", "1"), "failure": ("--misbehave", "1:3:raise")}
    run = Run(place, shared, "tidy", *script.get(end, ("--epochs", "100000", "--pace", "0.05")))
    if end == "ctrl-c":
        run.train()
        run.running.send(signal.SIGINT)
    begin = time.monotonic()
    done = run.running.wait().check({"success": 0, "failure": 1, "ctrl-c": 130}[end])
    run.clean(begin if end == "ctrl-c" else time.monotonic())
    assert done.said.count("Traceback") == (1 if end == "failure" else 0), done.text
    assert shared.keys_of("tidy") == RECORD
    assert shared.keys_of_others("tidy") == {b"somebody-else"}
    assert shared.client.get("somebody-else") == b"untouched"


@pytest.mark.long
def test_f14_f17_a_killed_run_leaves_what_can_be_gone_on_with_and_others_do_not_touch_it(
    place: Place, shared: Shared
) -> None:
    killed = Run(place, shared, "killed", "--epochs", "100000", "--pace", "0.05")
    killed.train()
    begin = time.monotonic()
    killed.running.send(signal.SIGKILL)
    killed.clean(begin)
    assert shared.keys_of("killed") - {"leader"} == RECORD | {"entry:model"}
    until("its lease ends", lambda: shared.keys_of("killed") == RECORD | {"entry:model"}, 10.0)
    before = shared.of("killed")
    other = Run(place, shared, "other", "--epochs", "1")
    other.running.wait().check()
    other.clean(time.monotonic())
    assert shared.of("killed") == before
    assert shared.keys_of("other") == RECORD


@pytest.mark.long
def test_k05_start_leaves_its_record_only(place: Place, shared: Shared) -> None:
    address = free_address()
    common = ("--join", address)
    before = _loaders_memory()
    commands: list[tuple[str | Path, ...]] = [
        ("coordinator", "--listen", address, "--job", "apart", "--store", shared.url, "--workers", "1"),
        ("server", *common),
        ("worker", *common, "--", TRAIN, "--epochs", "1"),
    ]
    roles = [place.launch("start", *command, environ=place.meeting_apart) for command in commands]
    for role in roles:
        role.wait().check()
    assert set(place.processes()) <= {shared.server.pid}
    assert place.leftovers() == []
    _wait_until_shared_memory_is_as(before)
    place.check_meetings()
    assert shared.keys_of("apart") == RECORD
    entry = parse_record(shared.client.hget("paramserver:apart:entry:state", "value") or b"")
    assert entry.view.state == types_pb2.JOB_STATE_DONE


def test_f16_a_port_that_is_taken(place: Place) -> None:
    address = free_address()
    start = ("start", "coordinator", "--listen", address, "--store", "memory", "--job")
    first = place.launch(*start, "first")
    first.wait_for("(?m)^coordinator of job")
    port = address.rpartition(":")[2]
    for late in (
        place.launch(*start, "late"),
        place.launch("start", "server", "--join", address, "--listen", f"127.0.0.1:{port}"),
    ):
        done = late.wait(30.0)
        assert f"port {port} on 127.0.0.1 is in use" in complaint(done, 2)
    first.send(signal.SIGTERM)
    first.wait(GONE_S).check(143)
    assert place.processes() == {}
    assert place.leftovers() == []
