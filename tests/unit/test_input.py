"""Standard input of `run`: each worker reads all of it, also a worker that is started again."""

from __future__ import annotations

import os
import pty
import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paramserver.launcher.input import Input
from paramserver.processes.environment import ENV_TERMINAL

Standing = Callable[[int], None]


@pytest.fixture
def standing() -> Iterator[Standing]:
    """Makes a descriptor the standard input of this process, and closes the descriptor."""
    before = os.dup(0)

    def put(fd: int) -> None:
        os.dup2(fd, 0)
        os.close(fd)

    yield put
    os.dup2(before, 0)
    os.close(before)


def read(given: Input, worker: bool = True) -> bytes | None:
    """What a process reads to the end."""
    with given.opened(worker) as stdin:
        return None if stdin is None else b"".join(iter(lambda: os.read(stdin, 10000), b""))


def test_a_file_is_read_by_all_from_where_it_stands(standing: Standing, tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_bytes(b"header\nfirst\nsecond\n")
    file = os.open(path, os.O_RDONLY)
    os.read(file, len(b"header\n"))
    standing(file)
    given = Input(lambda line: None)
    assert [read(given), read(given), read(given, worker=False)] == [b"first\nsecond\n", b"first\nsecond\n", None]
    assert os.lseek(0, 0, os.SEEK_CUR) == len(b"header\n")


def test_a_pipe_is_read_by_all_from_its_beginning(standing: Standing) -> None:
    """Also by a process that is started when the pipe was read to its end."""
    reading, writing = os.pipe()
    standing(reading)
    said: queue.Queue[str] = queue.Queue()
    given = Input(said.put)
    text = b"".join(b"line %d\n" % number for number in range(50_000))
    with given.opened() as slow, os.fdopen(writing, "wb") as pipe:
        assert slow is not None
        pipe.write(text[:1000])
        pipe.flush()
        assert os.read(slow, 1000) == text[:1000]  # before the end has come
        pipe.write(text[1000:])
    assert said.get(timeout=30.0) == f"standard input is at its end: each worker reads its {len(text)} bytes"
    assert read(given) == read(given) == text


def test_a_terminal_is_not_shared(standing: Standing) -> None:
    controller, terminal = pty.openpty()
    standing(terminal)
    given = Input(lambda line: None)
    assert read(given) is None
    assert given.variables == {ENV_TERMINAL: "1"}
    os.close(controller)


def test_nothing_is_there_to_read(standing: Standing) -> None:
    standing(os.open(os.devnull, os.O_RDONLY))
    given = Input(lambda line: None)
    assert (read(given), given.variables) == (None, {})
