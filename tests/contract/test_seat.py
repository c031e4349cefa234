"""The seat of a host: one process has it, others find it, and the kernel gives it back."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paramserver.transport.shm import meeting, seat
from paramserver.transport.shm.meeting import connected, receive
from paramserver.transport.shm.segments import PAGE, Foreign, Segment

NAME = seat.seat_name("secret", "job", 0)
_TAKES = """
import sys, time
from pathlib import Path
from paramserver.transport.shm import seat
taken = seat.take(sys.argv[2], Path(sys.argv[1]))
print("taken" if taken else "not free", flush=True)
sys.stdin.read()
"""
_FORKS = _TAKES.replace("sys.stdin.read()", "import os\nif os.fork() == 0:\n    print(os.getpid(), flush=True)\n") + (
    "time.sleep(60)\n"
)


def test_the_word_of_a_host_is_that_of_the_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers of one machine that do not meet are two hosts."""
    other = folder / "other"
    other.mkdir()
    words = []
    for place in (folder, other, folder / "missing", folder):
        monkeypatch.setattr(seat, "place", lambda place=place: place)
        words.append(seat.host_word("secret"))
    assert words[0] == words[3] != seat.host_word("another secret")
    assert len({*words[:3]}) == 3
    assert words[2] == ""


@pytest.fixture
def folder() -> Iterator[Path]:
    """The path of a socket must be short."""
    with tempfile.TemporaryDirectory(prefix="pst-") as short:
        yield Path(short)


@contextmanager
def other(folder: Path, text: str = _TAKES) -> Iterator[subprocess.Popen[str]]:
    """Another process, which takes the seat; it is killed at the end."""
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", text, str(folder), NAME]
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "taken"
            yield process
        finally:
            process.kill()


def test_one_has_it_and_hands_descriptors_to_those_who_come(folder: Path) -> None:
    taken = seat.take(NAME, folder)
    assert taken is not None
    assert seat.take(NAME, folder) is None
    assert taken.welcome([]) is None
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    memory = Segment(PAGE)
    memory.view[7] = 7
    visitor = connected(NAME, folder)
    connection = taken.welcome([memory.reading_fd])
    assert connection is not None
    assert select.select([visitor], [], [], 5.0)[0]
    (fd,) = receive(visitor, 1)
    assert Foreign(fd, PAGE).view[7] == 7
    connection.close()
    assert visitor.recv(1) == b""
    visitor.close()
    taken.close()
    assert list(folder.iterdir()) == []


def test_it_is_free_when_it_is_left(folder: Path) -> None:
    first = seat.take(NAME, folder)
    assert first is not None
    first.close()
    with pytest.raises(FileNotFoundError):
        connected(NAME, folder)
    second = seat.take(NAME, folder)
    assert second is not None
    first.close()
    assert seat.take(NAME, folder) is None
    second.close()


@pytest.mark.parametrize("text", [_TAKES, _FORKS])
def test_it_is_free_when_its_process_is_killed(folder: Path, text: str) -> None:
    """Also if a child of this process lives on, as those of a DataLoader may."""
    with other(folder, text) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline()) if text == _FORKS else 0
        try:
            assert seat.take(NAME, folder) is None
            visitor = connected(NAME, folder)
            process.kill()
            process.wait(10.0)
            assert select.select([visitor], [], [], 5.0)[0]
            visitor.close()
            taken = seat.take(NAME, folder)
            assert taken is not None
            taken.close()
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
    assert list(folder.iterdir()) == []


def test_what_killed_processes_have_left_is_removed(folder: Path) -> None:
    with other(folder) as process:
        process.kill()
        process.wait(10.0)
    assert len(list(folder.iterdir())) == 2
    (folder / "paramserver-host-else").touch()
    taken = seat.take(seat.seat_name("secret", "another job", 0), folder)
    assert taken is not None
    taken.close()
    assert [path.name for path in folder.iterdir()] == ["paramserver-host-else"]


def test_who_does_not_know_the_secret_does_not_find_it() -> None:
    assert NAME != seat.seat_name("another secret", "job", 0) != seat.seat_name("secret", "job", 1)


def test_a_directory_that_cannot_be_used(folder: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        seat.take(NAME, folder / "missing")


def test_only_processes_of_the_same_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise PermissionError("the other process belongs to another user")

    taken = seat.take(NAME, folder)
    assert taken is not None
    visitor = connected(NAME, folder)
    monkeypatch.setattr(seat, "check_peer", refuse)
    assert taken.welcome([0]) is None
    assert visitor.recv(1) == b""
    visitor.close()
    monkeypatch.setattr(meeting, "check_peer", refuse)
    with pytest.raises(PermissionError):
        connected(NAME, folder)
    taken.close()
