"""The output of processes in files, and `paramserver logs`."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from paramserver.cli.main import main
from paramserver.config.private import ENV_RUNTIME_DIR
from paramserver.machine.jobs import Job, publish_job
from paramserver.processes.alive import process_birth
from paramserver.processes.logfiles import Logs, Reader, names_in


def made(directory: Path, limit: int = 1 << 20) -> tuple[Logs, list[str]]:
    said: list[str] = []
    return Logs(directory / "logs", said.append, limit), said


def texts(reader: Reader) -> list[str]:
    return [line.text for line in reader.lines()]


def kept(logs: Logs, name: str) -> list[str]:
    """What a reader finds that comes now."""
    with closing(Reader(logs.directory, name)) as reader:
        return texts(reader)


def test_lines_are_read_as_they_come(tmp_path: Path) -> None:
    logs, said = made(tmp_path)
    reader = Reader(logs.directory, "worker-0")
    assert texts(reader) == []
    output = logs.output("worker-0")
    assert names_in(logs.directory) == ["worker-0"], "the name is known before the process writes"
    output.feed(b"one\ntw")
    assert texts(reader) == ["one"]
    output.feed("o für\n\n\r10%\r20%\n".encode())
    output.end()
    assert texts(reader) == ["two für", "", "20%"]
    assert (texts(reader), said) == ([], [])
    reader.close()


def test_the_files_are_bounded_and_private(tmp_path: Path) -> None:
    """A reader that comes late sees the newest lines."""
    logs, _ = made(tmp_path, 1000)
    for number in range(500):
        logs.line("worker-0", f"line {number}")
    assert sum(path.stat().st_size for path in logs.directory.iterdir()) <= 2000
    assert {stat.S_IMODE(path.stat().st_mode) for path in logs.directory.iterdir()} == {0o600}
    assert stat.S_IMODE(logs.directory.stat().st_mode) == 0o700
    numbers = [int(text.split()[1]) for text in kept(logs, "worker-0")]
    assert numbers == list(range(numbers[0], 500))
    assert len(numbers) > 40
    logs.line("worker-0", "x" * 200_000)
    assert len(kept(logs, "worker-0")[-1]) < 70_000


@pytest.mark.parametrize("every", [1, 3, 20, 49])
def test_a_reader_that_keeps_up_misses_no_line(tmp_path: Path, every: int) -> None:
    logs, _ = made(tmp_path, 1000)
    reader, seen = Reader(logs.directory, "worker-0"), list[str]()
    for number in range(300):
        logs.line("worker-0", f"line {number}")
        if number % every == 0:
            seen += texts(reader)
    seen += texts(reader)
    reader.close()
    assert seen == [f"line {number}" for number in range(300)]


def test_a_full_disk_is_said_once(tmp_path: Path) -> None:
    logs, said = made(tmp_path)
    (logs.directory / "worker-0.log").mkdir()
    for _ in range(2):
        logs.line("worker-0", "hello")
    assert said == ["the output of processes is not kept for `paramserver logs` any more: Is a directory"]


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Logs:
    """Of a job that runs."""
    monkeypatch.setenv(ENV_RUNTIME_DIR, str(tmp_path / "runtime"))
    logs, _ = made(tmp_path)
    job = Job("digits", "127.0.0.1:1", os.getpid(), 0.0, process_birth(os.getpid()), logs=str(logs.directory))
    publish_job(job)
    for number, name in enumerate(("worker-0", "run", "worker-1", "worker-0")):
        logs.line(name, f"line {number}")
    return logs


@pytest.mark.parametrize(
    ("tokens", "printed"),
    [
        ([], ["worker-0 | line 0", "run | line 1", "worker-1 | line 2", "worker-0 | line 3"]),
        (["worker-0"], ["worker-0 | line 0", "worker-0 | line 3"]),
        (["worker-0", "worker-1", "--lines", "2"], ["worker-1 | line 2", "worker-0 | line 3"]),
        (["--lines", "0"], []),
    ],
)
def test_logs_are_printed_by_time(
    tokens: list[str], printed: list[str], logs: Logs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", *tokens]) == 0
    assert [line[9:] for line in capsys.readouterr().out.splitlines()] == printed
    assert names_in(logs.directory) == ["run", "worker-0", "worker-1"]


def test_a_wrong_name_is_told_the_names(logs: Logs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "wroker-3"]) == 2
    says = 'paramserver: error: no process is called "wroker-3"; there are: run, worker-0, worker-1\n'
    assert capsys.readouterr().err == says
    assert logs.directory.is_dir()


def test_a_job_that_run_did_not_start_has_its_output_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ENV_RUNTIME_DIR, str(tmp_path / "runtime"))
    publish_job(Job("digits", "127.0.0.1:1", os.getpid(), 0.0, process_birth(os.getpid())))
    assert main(["logs"]) == 2
    assert "job digits was not started by paramserver run" in capsys.readouterr().err
