"""The memory of this process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import is_fake

# As the kernel names the memory of `transport.shm.segments`.
_SEGMENT = "/memfd:paramserver"
_BLOCK = 512


def resident_bytes() -> int:
    """What this process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Tensors:
    """The tensors that are made from now on. Views, and memory that processes share, count once."""

    def __init__(self) -> None:
        gc.collect()
        # Kept, so that nothing new comes to lie where they are.
        self._before = list(_tensors())
        self._former = {tensor.untyped_storage().data_ptr() for tensor in self._before}
        self._former_segments = _segments()

    def nbytes(self) -> int:
        """Bytes of those that are there now."""
        storages: dict[int, int] = {}
        for tensor in _tensors():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._former:
                storages[storage.data_ptr()] = max(storages.get(storage.data_ptr(), 0), storage.nbytes())
        shared = list(_shared())
        own = sum(n for start, n in storages.items() if not any(lo <= start < hi for lo, hi in shared))
        return own + sum(n for inode, n in _segments().items() if inode not in self._former_segments)


def _tensors() -> Iterator[torch.Tensor]:
    # Not isinstance, which asks some objects for more than their type. Of other tests: sparse tensors have no storage,
    # and fake tensors of torch.compile have no memory.
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return (tensor for tensor in tensors if tensor.layout is torch.strided and not is_fake(tensor))


def _segments() -> dict[int, int]:
    """Bytes that are taken of each memory that this process can share, by inode."""
    found: dict[int, int] = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(link).startswith(_SEGMENT):
                facts = os.stat(link)
                found[facts.st_ino] = facts.st_blocks * _BLOCK
        except OSError:  # it was closed meanwhile
            continue
    return found


def _shared() -> Iterator[tuple[int, int]]:
    """Where that memory lies in this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if _SEGMENT in line:
            start, _, stop = line.split()[0].partition("-")
            yield int(start, 16), int(stop, 16)
