"""Reads some samples of a loader when it is prepared, to compare them with those of other workers.

A forked process reads them, each twice with the same seeds. So the script's generators, open files, connections and
caches stay as they are, a sample that kills its reader kills nobody, and reading ends in time.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import signal
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog

from paramserver.core.work.slices import slice_seed
from paramserver.worker.data.digests import digest_of

log = structlog.get_logger("paramserver.worker")

SAMPLES = 12
# How long the process may read, and after how many seconds it ends in any case.
LIMIT_S, _ALARM_S = 0.4, 3
# Digests of so many bits travel, so many in a number of 52 bits, beside the rank. 0: was not compared.
_BITS, _IN_NUMBER = 13, 3
NUMBERS = SAMPLES // _IN_NUMBER
# Gives a sample; a batch of samples.
Read = Callable[[int, int], Any]
Collate = Callable[[list[Any]], Any]


@dataclass(slots=True)
class Probe:
    """What was read: ``digests`` by number of the sample in ``indices``, 0 for one that cannot be compared."""

    indices: Sequence[int]
    digests: list[int] = field(default_factory=list)
    # What differs between two readings with the same seeds; empty: nothing does.
    chance: str = ""
    # A type that was not compared; the error of a sample that could not be read.
    unknown: str = ""
    failed: str = ""

    def numbers(self, rank: int) -> list[float]:
        """The digests as whole numbers that float64 keeps, each with the rank of the worker that gives it."""
        digests = [*self.digests, *[0] * (SAMPLES - len(self.digests))]
        return [
            float(sum(digests[first + k] << (_BITS * (k + 1)) for k in range(_IN_NUMBER)) | min(rank, (1 << _BITS) - 1))
            for first in range(0, SAMPLES, _IN_NUMBER)
        ]

    def differs(self, number: int, theirs: float) -> tuple[int, int] | None:
        """The first index whose sample is another one in the worker of this number, and the worker's rank."""
        value = int(theirs)
        for k in range(_IN_NUMBER):
            at = number * _IN_NUMBER + k
            mine = self.digests[at] if at < len(self.digests) else 0
            other = value >> (_BITS * (k + 1)) & ((1 << _BITS) - 1)
            if mine and other and mine != other:
                return self.indices[at], value & ((1 << _BITS) - 1)
        return None


def indices_of(length: int, seed: int) -> list[int]:
    """Which samples are read: the first and the last, and others by chance, the same in all workers. In order."""
    chance = random.Random(slice_seed(seed, 0, length, "probe"))
    return sorted({0, length - 1, *chance.sample(range(length), min(length, SAMPLES - 2))}) if length else []


def read(indices: Sequence[int], seed: int, sample: Read, collate: Collate, begin: Callable[[], object]) -> Probe:
    """Read these samples in another process, as far as time allows. ``begin`` is called there first.

    ``sample(index, seed)`` reads one.
    """
    found = Probe(indices)
    reading, writing = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a process with threads forks
            pid = os.fork()
    except OSError as error:  # too little memory, or too many processes
        os.close(reading)
        os.close(writing)
        found.failed = _short(error)
        return found
    if pid == 0:
        try:
            os.close(reading)
            _alone_with(writing)
            begin()
            for found_now in _readings(indices, seed, sample, collate):
                os.write(writing, json.dumps(found_now).encode() + b"\n")
        except BaseException as error:
            with suppress(BaseException):
                os.write(writing, json.dumps({"failed": _short(error)}).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(writing)
    try:
        data = _all_of(reading, time.monotonic() + LIMIT_S)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError, ChildProcessError):  # where SIGCHLD is ignored, it may have gone
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for told in map(json.loads, data.split(b"\n")[:-1]):
        if "digest" in told:
            found.digests.append(told["digest"])
        found.chance = found.chance or told.get("chance", "")
        found.unknown = found.unknown or told.get("unknown", "")
        found.failed = found.failed or told.get("failed", "")
    return found


def _all_of(reading: int, until: float) -> bytes:
    """What the other process writes until its end, or until then."""
    data = b""
    while (left := until - time.monotonic()) > 0 and select.select([reading], [], [], left)[0]:
        part = os.read(reading, 1 << 16)
        if not part:
            break
        data += part
    return data


# ---- in the other process


def _readings(indices: Sequence[int], seed: int, sample: Read, collate: Collate) -> Iterator[dict[str, Any]]:
    """A line for each sample, and one for the ``collate_fn``."""
    steady = True
    for number, index in enumerate(indices):
        own = slice_seed(seed, 0, number, "probe")
        try:
            first, unknown = digest_of(sample(index, own))
            again, _ = digest_of(sample(index, own))
        except Exception as error:
            yield {"digest": 0, "failed": _short(error)}
            continue
        if first != again:
            steady = False
            yield {"digest": 0, "chance": f"sample {index}", "unknown": unknown}
        else:
            yield {"digest": first % ((1 << _BITS) - 1) + 1, "unknown": unknown}
    with suppress(Exception):  # of few samples it may be unable to make a batch

        def batch() -> int:
            few = [sample(index, slice_seed(seed, 0, number, "probe")) for number, index in enumerate(indices[:4])]
            return digest_of(collate(few))[0]

        if steady and batch() != batch():
            yield {"chance": "what collate_fn makes of the same samples"}


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _alone_with(writing: int) -> None:
    """Nothing that this process does may be seen by the one that it was forked from, but what it writes here.

    Open files get positions of their own. Connections and pipes are closed: another end of them must hear nothing.
    """
    signal.alarm(_ALARM_S)
    for one in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd in (writing, nothing):
            continue
        with suppress(OSError):
            _separate(fd, os.fstat(fd).st_mode, nothing)


def _separate(fd: int, mode: int, nothing: int) -> None:
    if fd in (1, 2) or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISCHR(mode)):
        os.dup2(nothing, fd)
    elif stat.S_ISREG(mode):
        own = os.open(f"/proc/self/fd/{fd}", fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE)
        os.lseek(own, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, fd)
        os.close(own)
