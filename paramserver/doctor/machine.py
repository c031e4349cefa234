"""Checks of this machine, or container: processors, memory, files, shared memory."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from paramserver.config import Settings
from paramserver.config.private import secure_runtime_directory
from paramserver.doctor.finding import Finding, Level, clean, is_writable_directory, sentence
from paramserver.errors import ConfigError
from paramserver.transport.shm.meeting import Meeting

MIN_OPEN_FILES = 1024
# The least memory. torch alone takes about half of it.
MIN_MEMORY_BYTES = 1 << 30
# The shared memory of a container, unless its options ask for more.
SMALL_SHM_BYTES = 64 << 20
_UNLIMITED_BYTES = 1 << 60  # a number this large in a version 1 control group stands for no limit


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the control group; None: no limit."""

    memory_bytes: int | None = None
    cpus: float | None = None


def usable_cpus() -> int:
    """Processors this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def check_cpus(usable: int, limits: Limits, settings: Settings) -> Finding:
    """Whether there are as many processors as threads that compute."""
    cpus = min(float(usable), limits.cpus or usable)
    training, cluster = settings.training, settings.cluster
    value = f"{cpus:g}"
    per_server = max(1, training.threads_per_server)
    threads = max(training.threads_per_worker, per_server)
    if threads > max(cpus, 1.0):
        remedy = f"set training.threads_per_worker and training.threads_per_server to {max(int(cpus), 1)} or less"
        return Finding("cpu", Level.WARN, f"{value}, for {threads} threads of one process", remedy)
    together = cluster.workers * training.threads_per_worker + cluster.servers * per_server
    if not cluster.coordinator and together > cpus:
        counts = f"cluster.workers {cluster.workers}, cluster.servers {cluster.servers}"
        remedy = "with `run`, fewer workers train as fast here"
        return Finding("cpu", Level.NOTE, f"{value}, for {together} threads together ({counts})", remedy)
    return Finding("cpu", Level.OK, value)


def read_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Limits:
    """The limits of the control groups, of either version, that this process is in."""
    memory: list[int] = []
    cpus: list[float] = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return Limits()
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            for group in _upwards(root, path):
                memory += _whole_number(group / "memory.max")
                cpus += _quota(_words(group / "cpu.max"))
            continue
        for controller in controllers.split(","):
            for group in _upwards(root / controller, path):
                if controller == "memory":
                    memory += _whole_number(group / "memory.limit_in_bytes")
                if controller == "cpu":
                    cpus += _quota(_words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us"))
    memory = [limit for limit in memory if limit < _UNLIMITED_BYTES]
    return Limits(min(memory, default=None), min(cpus, default=None))


def _upwards(root: Path, path: str) -> list[Path]:
    """The group and the groups around it. In a container its own group may be the root, although the path has parts."""
    below = root / path.lstrip("/")
    return [root, *(group for group in (below, *below.parents) if group != root and group.is_relative_to(root))]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _whole_number(path: Path) -> list[int]:
    return [int(word) for word in _words(path)[:1] if word.isdecimal()]


def _quota(words: list[str]) -> list[float]:
    if len(words) < 2 or not words[0].isdecimal() or not words[1].isdecimal() or int(words[1]) == 0:
        return []  # "max" and -1 stand for no limit
    return [int(words[0]) / int(words[1])]


def check_limits(limits: Limits) -> Finding:
    """The limits of this container, or of this unit of the supervisor."""
    parts = []
    if limits.memory_bytes is not None:
        parts.append(f"memory {_size(limits.memory_bytes)}")
    if limits.cpus is not None:
        parts.append(f"{limits.cpus:g} processors")
    if not parts:
        return Finding("limits", Level.OK, "none")
    if limits.memory_bytes is not None and limits.memory_bytes < MIN_MEMORY_BYTES:
        remedy = f"allow {_size(MIN_MEMORY_BYTES)} or more: torch alone takes half of it"
        return Finding("limits", Level.WARN, ", ".join(parts), remedy)
    return Finding("limits", Level.NOTE, ", ".join(parts))


def check_open_files(soft: int) -> Finding:
    """How many files and connections a process may have open."""
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return Finding("open files", Level.OK, "unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    remedy = "ulimit -n 65536 (systemd: LimitNOFILE=65536; compose: ulimits: {nofile: 65536})"
    return Finding("open files", Level.WARN, f"{soft}, but each connection and each file counts", remedy)


def check_shared_memory(path: Path = Path("/dev/shm"), size: int | None = None) -> Finding:
    """The memory through which DataLoader workers hand over batches. ``size`` in bytes, found out if None."""
    name = str(path)
    if not path.is_dir():
        return Finding(name, Level.NOTE, "not there; needed by DataLoaders with workers, on Linux")
    if size is None:
        facts = os.statvfs(path)
        size = facts.f_blocks * facts.f_frsize
    if why := is_writable_directory(path):
        remedy = "mount a tmpfs there that this user can write (docker: --tmpfs /dev/shm, or no user namespace)"
        return Finding(name, Level.WARN, f"{_size(size)}, but not writable ({why})", remedy)
    if size <= SMALL_SHM_BYTES:
        remedy = "give containers more (shm_size: 1g), or DataLoaders with workers may die with a bus error"
        return Finding(name, Level.WARN, _size(size), remedy)
    return Finding(name, Level.OK, f"{_size(size)}, writable")


def check_meeting(folder: Path, host_tier: bool) -> Finding:
    """Whether this process can meet others of its host in ``folder`` (cluster.meeting_dir), to share memory.

    ``host_tier``: whether the settings let workers of one host pull once.
    """
    try:
        Meeting(folder).close()
    except OSError as error:
        remedy = (
            "mount a volume there that servers and workers of this host have in common, and that this user can write"
        )
        return Finding("shared memory", Level.WARN, clean(str(error)), remedy)
    pulls = "workers here pull once where servers are elsewhere" if host_tier else "each worker here pulls by itself"
    return Finding("shared memory", Level.OK, f"processes of this host can meet in {folder}; {pulls}")


def check_runtime_directory() -> Finding:
    """The directory of the files of running jobs, for this user alone."""
    try:
        directory = secure_runtime_directory()
    except ConfigError as error:
        return sentence("runtime directory", Level.FAIL, str(error), "set XDG_RUNTIME_DIR to a directory of yours")
    if why := is_writable_directory(directory):
        remedy = "set XDG_RUNTIME_DIR to a directory of yours that can be written (a tmpfs in a container)"
        return Finding("runtime directory", Level.FAIL, f"{directory} cannot be written ({why})", remedy)
    return Finding("runtime directory", Level.OK, f"{directory}, private")


def _size(count: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
