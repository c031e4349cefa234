"""Files with which role processes make themselves known: private, fresh, without secrets, forgotten in time."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paramserver.config.private import ENV_RUNTIME_DIR
from paramserver.errors import ConfigError
from paramserver.machine.jobs import Job, list_jobs, publish_job
from paramserver.machine.presence import Presence, list_signs
from paramserver.processes.alive import process_birth

# Beyond any pid_max.
NO_PID = 2**30


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime directory of this test; it does not exist yet."""
    path = tmp_path / "runtime"
    monkeypatch.setenv(ENV_RUNTIME_DIR, str(path))
    return path


def own_file(directory: Path, role: str = "server") -> Path:
    return directory / f"{role}-{os.getpid()}.role"


def test_a_published_role_is_seen_until_it_leaves(directory: Path) -> None:
    assert list_signs() == []
    presence = Presence.publish("server", "digits", "127.0.0.1:4711")
    (sign,) = list_signs()
    assert (sign.role, sign.job, sign.address, sign.pid) == ("server", "digits", "127.0.0.1:4711", os.getpid())
    assert sign.alive
    assert not sign.ready
    assert sign.silence(time.monotonic()) < 10
    assert sign.title == f"server (process {os.getpid()})"
    presence.close()
    presence.close()
    assert list_signs() == []
    assert list(directory.iterdir()) == []


def test_an_update_changes_what_it_names_and_the_beat() -> None:
    presence = Presence.publish("worker", "digits", "")
    (before,) = list_signs()
    presence.update(name="worker-3", ready=True, state="training")
    presence.update(state="waiting")
    (after,) = list_signs()
    assert (after.name, after.ready, after.state) == ("worker-3", True, "waiting")
    assert after.beat > before.beat
    presence.update(address="127.0.0.1:4711")
    assert [sign.address for sign in list_signs()] == ["127.0.0.1:4711"]
    assert replace(after, beat=512.0).silence(532.0) == 20.0
    assert replace(after, beat=512.0).silence(500.0) == 0.0
    assert after.title == f"worker-3 (process {os.getpid()})"


def test_files_are_for_this_user_only_and_leave_no_other(directory: Path) -> None:
    presence = Presence.publish("coordinator", "digits", "0.0.0.0:8790")
    presence.update(ready=True)
    assert list(directory.iterdir()) == [own_file(directory, "coordinator")]
    assert stat.S_IMODE(own_file(directory, "coordinator").stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_paths_of_certificates_are_good_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Presence.publish("server", "digits", "h:1", certs="certs", token_file="t", insecure=True)
    (sign,) = list_signs()
    assert (sign.certs, sign.token_file, sign.insecure) == (str(tmp_path / "certs"), str(tmp_path / "t"), True)


def test_nothing_comes_back_after_close(directory: Path) -> None:
    presence = Presence.publish("server", "digits", "h:1")
    presence.close()
    presence.update(ready=True)
    assert list(directory.iterdir()) == []


def test_updates_and_close_from_different_threads_leave_nothing(directory: Path) -> None:
    presence = Presence.publish("worker", "digits", "")
    begun, stop = threading.Event(), threading.Event()

    def beat() -> None:
        while not stop.is_set():
            presence.update(ready=True)
            begun.set()

    thread = threading.Thread(target=beat)
    thread.start()
    assert begun.wait(10.0)
    presence.close()
    stop.set()
    thread.join(10.0)
    assert not thread.is_alive()
    assert list(directory.iterdir()) == []


def test_a_forked_child_does_not_speak_for_its_parent(directory: Path) -> None:
    Presence.publish("worker", "digits", "")
    text = own_file(directory, "worker").read_text()
    code = (
        "import os\n"
        "from paramserver.machine.presence import Presence\n"
        "presence = Presence.publish('worker', 'digits', '')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    presence.update(name='child')\n"
        "    presence.close()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "from paramserver.machine.presence import list_signs\n"
        "print([sign.name for sign in list_signs() if sign.pid == os.getpid()])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['']\n"
    assert own_file(directory, "worker").read_text() == text


def test_an_update_comes_back_after_the_directory_was_cleaned_up(directory: Path) -> None:
    presence = Presence.publish("server", "digits", "h:1")
    own_file(directory).unlink()
    directory.rmdir()
    presence.update(ready=True)
    assert [sign.ready for sign in list_signs()] == [True]


def test_an_update_that_cannot_be_written_does_not_disturb(directory: Path) -> None:
    presence = Presence.publish("server", "digits", "h:1")
    directory.chmod(0o755)  # open to others: refused
    presence.update(ready=True)
    directory.chmod(0o700)
    assert [sign.ready for sign in list_signs()] == [False]


def test_a_directory_open_to_others_is_refused(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Presence.publish("server", "digits", "h:1")
    with pytest.raises(ConfigError, match="chmod 700"):
        list_signs()


def rewrite(path: Path, **values: object) -> Path:
    """The same file as another process, or with another fact, would have written it."""
    facts = {**json.loads(path.read_text()), **values}
    target = path.with_name(f"{facts['role']}-{facts['pid']}.role")
    target.write_text(json.dumps(facts))
    return target


def test_a_dead_process_is_told_of_once(directory: Path) -> None:
    Presence.publish("server", "digits", "h:1")
    gone = rewrite(own_file(directory), pid=NO_PID)
    assert sorted(sign.alive for sign in list_signs()) == [False, True]
    assert not gone.exists()
    assert [sign.alive for sign in list_signs()] == [True]


def test_whoever_publishes_removes_the_files_of_the_dead(directory: Path) -> None:
    Presence.publish("server", "digits", "h:1")
    gone = rewrite(own_file(directory), pid=NO_PID)
    Presence.publish("coordinator", "digits", "h:2")
    assert not gone.exists()


def test_what_a_killed_process_was_writing_is_removed(directory: Path) -> None:
    Presence.publish("server", "digits", "h:1")
    left, writing = directory / f".new-{NO_PID}-x1", directory / f".new-{os.getpid()}-x2"
    strange = directory / ".new-x3"
    for path in (left, writing, strange):
        path.touch()
    assert len(list_signs()) == 1
    assert [path.exists() for path in (left, writing, strange)] == [False, True, False]


def test_another_process_with_the_same_pid_is_not_it(directory: Path) -> None:
    Presence.publish("server", "digits", "h:1")
    born = process_birth(os.getpid())
    assert born > 0
    rewrite(own_file(directory), birth=born - 1)
    assert [sign.alive for sign in list_signs()] == [False]


def test_a_process_that_has_ended_unnoticed_is_dead(directory: Path) -> None:
    Presence.publish("server", "digits", "h:1")
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, its exit code not fetched
        rewrite(own_file(directory), pid=child.pid, birth=process_birth(child.pid))
        dead = {sign.pid: sign.alive for sign in list_signs()}
    assert dead == {os.getpid(): True, child.pid: False}


@pytest.mark.parametrize(
    "change",
    [{"beat": "now"}, {"ready": 1}, {"pid": "1"}, {"certs": None}, {"further": 1}, {"role": 3}],
    ids=lambda change: next(iter(change)),
)
def test_senseless_files_are_removed(directory: Path, change: dict[str, object]) -> None:
    Presence.publish("server", "digits", "h:1")
    path = own_file(directory)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert list_signs() == []
    assert not path.exists()


def test_files_of_jobs_and_of_roles_do_not_disturb_each_other(directory: Path) -> None:
    job = Job("digits", "127.0.0.1:8790", os.getpid(), 1.0, process_birth(os.getpid()))
    publish_job(job)
    Presence.publish("coordinator", "digits", "127.0.0.1:8790")
    assert list_jobs() == [job]
    assert [sign.role for sign in list_signs()] == ["coordinator"]
    assert list_jobs() == [job]
