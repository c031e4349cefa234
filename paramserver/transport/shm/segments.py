"""Memory that processes of one host share. It has no name anywhere, so it ends with the last process that has it.

A segment is created by one process, which may write to it; others get a descriptor that is for reading only (see
`transport.shm.meeting`), and map it. A process could open this descriptor anew for writing, by its name in /proc. So
the segment is sealed as soon as its maker has mapped it: nobody can write to it but through that mapping, and its size
is fixed for good, so reading it cannot fail. Memory is taken page by page when it is reserved or first written to. A
writer reserves it first: a mere write where memory is full kills the process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

PAGE = mmap.PAGESIZE
# The size; writing but through mappings that are there (F_SEAL_FUTURE_WRITE, Linux 5.1); these seals themselves.
_SEALS = 0x2 | 0x4 | 0x10 | 0x1


def available() -> bool:
    """Whether this system has such memory: Linux does."""
    return hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")


class Segment:
    """``nbytes`` of zeros, writable here. Views keep the memory; :meth:`close` ends the descriptors only.

    ``reading_fd``: the descriptor to hand out; nothing can be written with it.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises OSError if there is no such memory."""
        self.nbytes = nbytes
        self.reading_fd = -1
        self._fd = os.memfd_create("paramserver", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            self.view = memoryview(mmap.mmap(self._fd, nbytes))
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self.reading_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def reserve(self, start: int, length: int) -> None:
        """See to it that these bytes can be written to. Raises OSError if there is not enough memory."""
        os.posix_fallocate(self._fd, start, length)

    def close(self) -> None:
        """No more descriptors; memory that is mapped stays until nobody uses it. May be repeated."""
        fds, self._fd, self.reading_fd = (self._fd, self.reading_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


class Foreign:
    """Another process's segment: ``view`` is for reading only. Views keep the memory, this object the descriptor."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes ``fd`` over. Raises OSError, or ValueError if that is no segment of this size."""
        self.fd = fd
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_size != nbytes:
            raise ValueError("what came is no shared memory of the size that was announced")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("the shared memory that came may still change its size, or be written to by others")
        self.view = memoryview(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ))

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)
