"""Copies between main memory and the memory of the model's device, beside its computing.

A copy goes on by itself after it has begun. Until a thread has waited for its ticket, no code in main memory may read
the target or change the source. The device orders its own computations and copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor

log = structlog.get_logger("paramserver.worker")

# cudaHostRegister: the flag for reading only; its answer for memory that is locked already.
_READ_ONLY = 8
_LOCKED_ALREADY = 712


class Ticket(Protocol):
    """A copy that was begun."""

    def wait(self) -> None:
        """Return when the copy is complete. From any thread, as often as wanted."""


class Mover(Protocol):
    """The copies of one device. An interface, since copies overlap with computations only where there is a GPU.

    Tensors are flat, and come in pairs of equal length. Sources and targets must not change until the copy is complete.
    """

    def fetch(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        """Begin to copy from the device, after all computations that this thread has asked for."""

    def bring(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        """Begin to copy to the device, between the computations that this thread asks for before and after."""

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Main memory that can be copied from and to the device."""

    def lock(self, memory: Tensor, writable: bool) -> None:
        """Prepare memory, which stays until :meth:`release`, for copies. A second call for it changes nothing."""

    def release(self) -> None:
        """Wait for all copies and unlock memory."""


def mover_for(device: torch.device) -> Mover | None:
    """The mover of a device; None for the CPU, where nothing needs to be moved."""
    if device.type == "cpu":
        return None
    return CudaMover(device) if device.type == "cuda" else PlainMover()


class _Done(Ticket):
    def wait(self) -> None:
        """The copy is complete already."""


class PlainMover(Mover):
    """Copies at once: for devices without anything better."""

    def fetch(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return _Done()

    bring = fetch

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(elements, dtype=dtype)

    def lock(self, memory: Tensor, writable: bool) -> None:
        pass

    def release(self) -> None:
        pass


class _Event(Ticket):
    """A copy on a stream; keeps its tensors alive until it is complete."""

    def __init__(self, event: torch.cuda.Event, tensors: Sequence[Tensor]) -> None:
        self._event, self._tensors = event, list(tensors)

    def wait(self) -> None:
        self._event.synchronize()
        self._tensors.clear()


class CudaMover(Mover):
    """A stream for each direction, and page-locked memory. If memory cannot be locked, copies block this thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
        self._out, self._in = stream(device), stream(device)
        self._locked: dict[int, Tensor] = {}
        self._told = False

    def fetch(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        return self._copy(self._out, sources, targets)

    def bring(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        ticket = self._copy(self._in, sources, targets)
        torch.cuda.current_stream(self._device).wait_stream(self._in)
        return ticket

    def _copy(self, stream: torch.cuda.Stream, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits takes no core
            event.record(stream)
        return _Event(event, [*sources, *targets])

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        try:
            return torch.zeros(elements, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            self._tell(str(error))
            return torch.zeros(elements, dtype=dtype)

    def lock(self, memory: Tensor, writable: bool) -> None:
        address = memory.data_ptr()
        if address in self._locked or not memory.nbytes:
            return
        with torch.cuda.device(self._device):
            status = int(_runtime().cudaHostRegister(address, memory.nbytes, 0 if writable else _READ_ONLY))
        if status == 0:
            self._locked[address] = memory
            return
        with contextlib.suppress(RuntimeError):  # a failed call is otherwise blamed on the next kernel
            torch.zeros(1, device=self._device)
        if status != _LOCKED_ALREADY:
            self._tell(f"cudaHostRegister answers {status}")

    def release(self) -> None:
        for stream in (self._out, self._in):
            stream.synchronize()
        for address in self._locked:
            _runtime().cudaHostUnregister(address)
        self._locked.clear()

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told = True
            log.warning("memory cannot be page-locked: copies to and from the GPU are slower", reason=reason)


def _runtime() -> Any:
    """The calls of CUDA's runtime that torch offers."""
    found: Callable[[], Any] = torch.cuda.cudart
    return found()
