"""How runs end: well, by a signal, by an error, by a death; and that nothing of them is left."""

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

from tests.integration.harness import GONE_S, SCRIPTS, Place, Running, place_fixture, read_summary, until

TRAIN = SCRIPTS / "train.py"
PACED = ["--pace", "0.05", "--epochs", "100000"]
FAST_STORE = ["--store", "memory"]
# Nothing that dies is started again; test_restarts.py is about that.
ALONE = ["--set", "cluster.max_restarts=0"]
# One worker leaves, the other one would wait for hours.
LEAVES = """
import os, sys, time
if os.environ["PARAMSERVER_INTERNAL_INDEX"] == "1":
    sys.exit(7)
time.sleep(10000)
"""
TRAINS = r"worker-\d \| rank \d of \d trains"

# A command that fails at once, start of Python and all, beside other tests; one that waits for somebody takes a minute.
AT_ONCE_S = 20.0


@pytest.fixture
def place() -> Iterator[Place]:
    yield from place_fixture()


def counts(servers: int, workers: int) -> list[str]:
    return ["--servers", str(servers), "--workers", str(workers)]


def pid_of(status: dict[str, Any], name: str) -> int:
    (pid,) = [process["pid"] for process in status["processes"] if process["name"] == name]
    assert isinstance(pid, int)
    return pid


def job_files(place: Place) -> list[Path]:
    return list((place.temporary / f"paramserver-{os.getuid()}").glob("*"))


def training(place: Place, servers: int, workers: int, *flags: str | Path, script: tuple[str, ...] = ()) -> Running:
    """A run in which every worker has begun to train, and which would go on for hours."""
    running = place.launch("run", TRAIN, *counts(servers, workers), *flags, "--", *PACED, *script)
    running.wait_for(TRAINS, count=workers)
    return running


# ---- signals


def test_ctrl_c_stops_everything(place: Place) -> None:
    running = training(place, 1, 2)
    assert len(job_files(place)) == 1
    commands = " ".join(place.processes().values())
    for part in ("valkey-server", "guard.py", "roles coordinator", "roles server", "roles worker"):
        assert part in commands
    begin = time.monotonic()
    running.send(signal.SIGINT)
    done = running.wait(GONE_S).check(130)
    place.wait_until_gone(begin)
    assert "Traceback" not in done.said, done.text
    assert "error" not in done.said, done.text
    assert place.leftovers() == []


def test_sigterm_while_everything_starts(place: Place) -> None:
    running = place.launch("run", TRAIN, *counts(1, 1))
    running.wait_for("coordinator at ")
    begin = time.monotonic()
    running.send(signal.SIGTERM)
    done = running.wait(GONE_S).check(143)
    place.wait_until_gone(begin)
    assert "Traceback" not in done.said, done.text
    assert place.leftovers() == []


def test_killed_launcher_leaves_nothing(place: Place) -> None:
    running = training(place, 1, 2, script=("--num-workers", "1"))
    # Launcher, guard, store, coordinator, server, two workers with a loading process each.
    until("the loading processes", lambda: len(place.processes()) >= 9, 30.0)
    begin = time.monotonic()
    running.send(signal.SIGKILL)
    place.wait_until_gone(begin)
    assert running.wait(GONE_S).code == -signal.SIGKILL
    until("the directory of the run is gone", lambda: not list(place.temporary.glob("paramserver-*/store")), GONE_S)
    # The file of the dead job is no running job.
    assert "no job runs" in place.paramserver("status").check(3).err
    # Python's own multiprocessing had no chance to remove its directories.
    assert [name for name in place.leftovers() if not name.startswith("pymp-")] == []


def test_store_in_another_directory_is_removed_with_a_killed_launcher() -> None:
    # Too long a path for a socket.
    with Place(temporary="/".join(["d" * 60] * 2)) as place:
        running = place.launch("run", TRAIN, *counts(1, 1))
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


# ---- scripts and workers that fail


def test_script_that_raises(place: Place) -> None:
    script = ["--", "--misbehave", "1:3:raise"]
    done = place.paramserver("run", TRAIN, *counts(1, 2), *FAST_STORE, *script).check(1)
    shown = [line.removeprefix("worker-1 | ") for line in done.out.splitlines() if line.startswith("worker-1 | ")]
    begin = shown.index("Traceback (most recent call last):")
    assert shown[-1] == "RuntimeError: the cat sat on the keyboard"
    frames = [line for line in shown[begin:] if line.startswith("  File ")]
    assert len(frames) == 3
    assert all(f'File "{TRAIN}"' in frame for frame in frames)
    assert done.said.count("Traceback") == 1, done.text
    assert "worker-1 failed with exit code 1" in done.out
    assert place.leftovers() == []


def test_script_that_cannot_be_compiled(place: Place) -> None:
    script = place.work / "broken.py"
    script.write_text("import paramserver as ps\nctx = = 1\n")
    done = place.paramserver("run", script, *counts(1, 1), *FAST_STORE).check(1)
    shown = [line for line in done.out.splitlines() if line.startswith("worker-0 | ")]
    assert shown[-1] == "worker-0 | SyntaxError: invalid syntax"
    assert [line for line in shown if "  File " in line] == [f'worker-0 |   File "{script}", line 2']


def test_exit_code_of_a_script(place: Place) -> None:
    script = place.work / "leaves.py"
    script.write_text(LEAVES)
    done = place.paramserver("run", script, *counts(1, 2), *FAST_STORE).check(7)
    assert "worker-1 failed with exit code 7" in done.out
    assert "Traceback" not in done.said, done.text


@pytest.mark.long
def test_slices_of_a_killed_worker_go_to_the_others(place: Place) -> None:
    alone, path = place.work / "alone.json", place.work / "killed.json"
    environ = {"PARAMSERVER_RUN__SUMMARY": str(alone), "PARAMSERVER_TRAINING__SLICES_PER_STEP": "4"}
    place.python(TRAIN, environ=environ).check()
    flags = ["--slices-per-step", "4", "--summary", str(path), *ALONE]
    done = place.paramserver("run", TRAIN, *counts(2, 2), *flags, "--", "--misbehave", "1:5:kill").check()
    assert "worker-1 was killed by signal 9; its slices go to the others" in done.out
    well, killed = read_summary(alone), read_summary(path)
    for key in ("weights_sha256", "buffers_sha256", "optimizer_sha256", "steps", "contributions_applied"):
        assert killed[key] == well[key], key
    assert place.leftovers() == []


def test_all_workers_killed(place: Place) -> None:
    running = training(place, 1, 1, *FAST_STORE, *ALONE)
    os.kill(pid_of(place.status(), "worker-0"), signal.SIGKILL)
    done = running.wait().check(137)
    assert "worker-0 was killed by signal 9" in done.out
    assert "Traceback" not in done.said, done.text


def test_killed_server_ends_the_run(place: Place) -> None:
    running = training(place, 2, 1, *FAST_STORE, *ALONE)
    os.kill(pid_of(place.status(), "server-1"), signal.SIGKILL)
    done = running.wait(30.0).check(1)
    assert "paramserver: error: server-1 ended unexpectedly (signal 9); the run cannot go on\n" in done.err
    assert "Traceback" not in done.said, done.text
    assert place.processes() == {}
    assert place.leftovers() == []


# ---- ports and stores


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


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_store_of_ones_own(place: Place, kind: str) -> None:
    import redis

    from paramserver.local.valkey import EmbeddedStore, find_program

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
            place.paramserver("run", TRAIN, *counts(1, 1), *flags, "--", "--epochs", "1").check()
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
