"""Address ranges in which pages of other processes' memory are lent to this one, put together to one version.

A lent page shows the bytes that its owner writes, until this process writes to the page. Then this process has a
private copy, which must be given back before the range shows another version. Linux only.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

import numpy as np

from paramserver.transport.shm.segments import PAGE

_FIXED, _NORESERVE, _ANONYMOUS = 0x10, 0x4000, 0x20
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value
# Bits of an entry of /proc/self/pagemap, which stands for one page.
_PRESENT, _OF_A_FILE = np.uint64(1 << 63), np.uint64(1 << 61)
_ENTRY = 8


class Region:
    """``nbytes`` (whole pages) of addresses. ``view`` keeps them; they are private zeros until pages are lent."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError."""
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | _ANONYMOUS | _NORESERVE)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def lend(self, start: int, length: int, fd: int, offset: int) -> None:
        """Show ``length`` bytes from ``offset`` of a file. Raises OSError."""
        self._map(start, length, mmap.MAP_PRIVATE | _NORESERVE, fd, offset)

    def own(self, start: int, length: int) -> None:
        """Private zeros again. Raises OSError."""
        self._map(start, length, mmap.MAP_PRIVATE | _ANONYMOUS | _NORESERVE, -1, 0)

    def give_back(self, start: int, length: int) -> None:
        """Give up the private copies of all pages that these bytes touch: the pages show their owner's bytes again."""
        first, end = start // PAGE * PAGE, -(-(start + length) // PAGE) * PAGE
        self._memory.madvise(mmap.MADV_DONTNEED, first, min(end, self.nbytes) - first)

    def written(self, start: int, length: int) -> list[int]:
        """The byte offsets of private copies among these (whole) pages. Empty where that cannot be told."""
        found = os.pread(_pagemap(), length // PAGE * _ENTRY, (self.address + start) // PAGE * _ENTRY)
        entries = np.frombuffer(found, dtype=np.uint64)
        private = ((entries & _PRESENT) != 0) & ((entries & _OF_A_FILE) == 0)
        return [start + int(index) * PAGE for index in np.flatnonzero(private)]

    def _map(self, start: int, length: int, flags: int, fd: int, offset: int) -> None:
        assert start in range(0, self.nbytes, PAGE), (start, self.nbytes)
        length = min(-(-length // PAGE) * PAGE, self.nbytes - start)
        place = _libc().mmap(self.address + start, length, _PROTECTION, flags | _FIXED, fd, offset)
        if place == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    )
    return libc


@functools.cache
def _pagemap_of(pid: int) -> int:
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)


def _pagemap() -> int:
    return _pagemap_of(os.getpid())
