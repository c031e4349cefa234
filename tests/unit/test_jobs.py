"""Files of running jobs: private, found by name, forgotten when their launcher is gone."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paramserver.config.private import ENV_RUNTIME_DIR, runtime_directory, temporary_directory
from paramserver.errors import ConfigError, UnavailableError
from paramserver.machine.jobs import Job, find_job, list_jobs, publish_job, withdraw_job
from paramserver.processes.alive import process_birth

# Beyond any pid_max.
NO_PID = 2**30


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime directory of this test; it does not exist yet."""
    path = tmp_path / "runtime"
    monkeypatch.setenv(ENV_RUNTIME_DIR, str(path))
    return path


def job(name: str = "digits", pid: int | None = None) -> Job:
    pid = os.getpid() if pid is None else pid
    return Job(name=name, coordinator="127.0.0.1:8790", pid=pid, started=1.5, birth=process_birth(pid))


def test_published_job_is_found_and_withdrawn(directory: Path) -> None:
    assert list_jobs() == []
    path = publish_job(job())
    assert path == directory / "digits.json"
    assert find_job() == find_job("digits") == job()
    withdraw_job(job())
    assert list_jobs() == []
    withdraw_job(job())


def test_files_are_for_this_user_only(directory: Path) -> None:
    path = publish_job(job())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(directory.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_directory_open_to_others_is_refused(directory: Path, mode: int) -> None:
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 700"):
        publish_job(job())
    with pytest.raises(ConfigError, match="chmod 700"):
        list_jobs()


def test_link_in_place_of_the_directory_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a directory of yours"):
        publish_job(job())


def test_jobs_whose_launcher_is_gone_are_forgotten(directory: Path) -> None:
    gone = publish_job(job("gone", pid=NO_PID))
    publish_job(job("here"))
    assert find_job() == job("here")
    assert not gone.exists()


def test_another_process_with_the_same_pid_is_not_the_launcher(directory: Path) -> None:
    born = process_birth(os.getpid())
    assert born > 0
    publish_job(Job("old", "127.0.0.1:1", os.getpid(), 1.0, birth=born - 1))
    with pytest.raises(UnavailableError, match="no job runs on this machine"):
        find_job()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"name": "bad"}',
        json.dumps({"name": "bad", "coordinator": "nowhere", "pid": 1, "started": 1.0}),
        json.dumps({"name": "bad", "coordinator": "h:1", "pid": "1", "started": 1.0}),
        json.dumps({"name": "other", "coordinator": "h:1", "pid": os.getpid(), "started": 1.0}),
    ],
    ids=["empty", "list", "no keys", "a key", "no address", "pid is text", "another name"],
)
def test_senseless_files_are_removed(directory: Path, text: str) -> None:
    publish_job(job())
    (directory / "bad.json").write_text(text)
    assert list_jobs() == [job()]
    assert not (directory / "bad.json").exists()


def test_several_jobs_ask_for_a_name(directory: Path) -> None:
    publish_job(job("a"))
    publish_job(job("b"))
    with pytest.raises(ConfigError, match=r"2 jobs run here \(a, b\); choose one with --job NAME"):
        find_job()
    assert find_job("b").name == "b"
    with pytest.raises(UnavailableError, match=r'no job named "c" runs here; running: a, b'):
        find_job("c")


def test_name_of_a_running_job_is_taken(directory: Path) -> None:
    publish_job(job())
    publish_job(job())  # by the same launcher: published anew
    parent = os.getppid()
    with pytest.raises(ConfigError, match='a job named "digits" runs already'):
        publish_job(job(pid=parent))
    assert find_job() == job()


def test_withdrawing_leaves_a_successor_alone(directory: Path) -> None:
    publish_job(job(pid=NO_PID))
    publish_job(job())
    withdraw_job(job(pid=NO_PID))
    assert find_job() == job()


def test_runtime_directory_by_precedence() -> None:
    assert runtime_directory({ENV_RUNTIME_DIR: "/x", "XDG_RUNTIME_DIR": "/run/user/1"}) == Path("/x")
    assert runtime_directory({"XDG_RUNTIME_DIR": "/run/user/1"}) == Path("/run/user/1/paramserver")


def test_without_a_session_the_runtime_directory_is_where_no_other_user_can_take_its_name(tmp_path: Path) -> None:
    """In the directory for temporary files anybody could make the directory first, and block all commands for ever."""
    found = runtime_directory({"XDG_STATE_HOME": str(tmp_path / "state")})
    assert found == tmp_path / "state" / "paramserver" / f".runtime-{os.uname().nodename}"
    assert found.is_relative_to(tmp_path)


def test_a_user_without_a_place_of_its_own_has_the_directory_for_temporary_files() -> None:
    assert runtime_directory({"XDG_STATE_HOME": "/proc/1"}).name == f"paramserver-{os.getuid()}"


def test_without_a_place_for_temporary_files_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(**_: str) -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    monkeypatch.setattr(tempfile, "mkdtemp", nowhere)
    wishes: list[Callable[[], Path]] = [lambda: runtime_directory({"XDG_STATE_HOME": "/proc/1"}), temporary_directory]
    for wanted in wishes:
        with pytest.raises(
            ConfigError, match=r"cannot be written \(No usable .*\): set TMPDIR to a directory of yours"
        ):
            wanted()
