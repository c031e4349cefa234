"""Doctor on processors, memory, files and shared memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from paramserver.config import load_settings
from paramserver.config.private import ENV_RUNTIME_DIR
from paramserver.doctor.finding import Level
from paramserver.doctor.machine import (
    Limits,
    check_cpus,
    check_limits,
    check_open_files,
    check_runtime_directory,
    check_shared_memory,
    read_limits,
)

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("usable", "quota", "overrides", "level", "says"),
    [
        (8, None, {}, Level.OK, "8"),
        (2, None, {}, Level.NOTE, "2, for 3 threads together"),
        (2, None, {"cluster.coordinator": "h:1"}, Level.OK, "2"),
        (8, 2.0, {"training.threads_per_worker": 4}, Level.WARN, "2, for 4 threads of one process"),
        (2, None, {"training.threads_per_server": 4}, Level.WARN, "2, for 4 threads of one process"),
        (8, 0.5, {"cluster.coordinator": "h:1"}, Level.OK, "0.5"),
    ],
)
def test_processors_for_threads(
    usable: int, quota: float | None, overrides: dict[str, object], level: Level, says: str
) -> None:
    found = check_cpus(usable, Limits(cpus=quota), load_settings(overrides=overrides, environ={}))
    assert found.level is level
    assert found.value.startswith(says)
    if level is Level.WARN:
        assert found.remedy.endswith("to 2 or less")


def test_limits_of_version_2_of_all_groups_around(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/jobs/mine\n")
    root = tmp_path / "fs"
    (root / "jobs" / "mine").mkdir(parents=True)
    (root / "jobs" / "mine" / "memory.max").write_text("max\n")
    (root / "jobs" / "mine" / "cpu.max").write_text("150000 100000\n")
    (root / "jobs" / "memory.max").write_text(f"{2 * GIB}\n")
    (root / "jobs" / "cpu.max").write_text("max 100000\n")
    assert read_limits(root, own) == Limits(2 * GIB, 1.5)
    (root / "memory.max").write_text(f"{GIB}\n")  # as inside of a container
    assert read_limits(root, own) == Limits(GIB, 1.5)


def test_limits_of_version_1(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("5:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/\n")
    memory, cpu = tmp_path / "fs" / "memory", tmp_path / "fs" / "cpu"
    (memory / "docker" / "x").mkdir(parents=True)
    cpu.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (memory / "docker" / "x" / "memory.limit_in_bytes").write_text(f"{512 * MIB}\n")
    (cpu / "cpu.cfs_quota_us").write_text("50000\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    assert read_limits(tmp_path / "fs", own) == Limits(512 * MIB, 0.5)
    (cpu / "cpu.cfs_quota_us").write_text("-1\n")
    assert read_limits(tmp_path / "fs", own).cpus is None


def test_no_limits(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    assert read_limits(tmp_path, own) == Limits()
    own.write_text("0::/../../outside\n")
    assert read_limits(tmp_path, own) == Limits()
    assert check_limits(Limits()).value == "none"


def test_limits_are_shown_and_small_memory_is_a_warning() -> None:
    found = check_limits(Limits(4 * GIB, 1.5))
    assert (found.level, found.value) == (Level.NOTE, "memory 4.0 GiB, 1.5 processors")
    found = check_limits(Limits(512 * MIB))
    assert (found.level, found.value) == (Level.WARN, "memory 512.0 MiB")
    assert found.remedy.startswith("allow 1.0 GiB or more")


@pytest.mark.parametrize(
    ("soft", "level"), [(1024, Level.OK), (resource.RLIM_INFINITY, Level.OK), (256, Level.WARN), (1023, Level.WARN)]
)
def test_open_files(soft: int, level: Level) -> None:
    found = check_open_files(soft)
    assert found.level is level
    assert ("ulimit -n 65536" in found.remedy) is (level is Level.WARN)


def test_shared_memory(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path, GIB).value == "1.0 GiB, writable"
    assert check_shared_memory(tmp_path).value.endswith("writable")
    small = check_shared_memory(tmp_path, 64 * MIB)
    assert (small.level, small.value) == (Level.WARN, "64.0 MiB")
    assert "shm_size: 1g" in small.remedy
    absent = check_shared_memory(tmp_path / "absent")
    assert absent.level is Level.NOTE


def test_shared_memory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    found = check_shared_memory(tmp_path, GIB)
    assert found.level is Level.WARN
    assert "not writable (Permission denied" in found.value
    assert "mount a tmpfs" in found.remedy


def test_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runtime"
    monkeypatch.setenv(ENV_RUNTIME_DIR, str(path))
    assert check_runtime_directory().value == f"{path}, private"
    path.chmod(0o755)
    found = check_runtime_directory()
    assert (found.level, found.value) == (Level.FAIL, f'runtime directory "{path}" is open to others')
    assert found.remedy == f'run: chmod 700 "{path}"'
    path.chmod(0o700)

    def refuse(name: Path, *_: object) -> int:
        raise OSError(30, "Read-only file system", str(name))

    monkeypatch.setattr(os, "open", refuse)
    found = check_runtime_directory()
    assert found.level is Level.FAIL
    assert "Read-only file system" in found.value
    assert "XDG_RUNTIME_DIR" in found.remedy
