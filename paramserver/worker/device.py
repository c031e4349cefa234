"""Copies between main memory and the memory of the model's device, beside its computing.

A copy is begun, and goes on by itself. Until its ticket has been waited for nobody in main memory reads what it writes,
or changes what it reads. What the device computes keeps its order by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor

log = structlog.get_logger("paramserver.worker")

# cudaHostRegister: for reading only; and what it answers for memory that is locked already.
_READ_ONLY = 8
_LOCKED_ALREADY = 712


class Ticket(Protocol):
    """A copy that was begun."""

    def wait(self) -> None:
        """Return when it is done. From any thread, as often as wanted."""


class Mover(Protocol):
    """The copies of one device: a seam, since real ones overlap only where there is a GPU.

    Tensors are flat, and come in pairs of equal length; both stay as they are until the copy is done.
    """

    def fetch(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        """Begin to copy from the device, as it will be when it has computed what this thread has asked for so far."""

    def bring(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        """Begin to copy to the device, after what this thread has asked for; whatever it asks for later finds it."""

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Main memory for such copies."""

    def lock(self, memory: Tensor, writable: bool) -> None:
        """Memory of others, which stays until :meth:`release`, is for such copies from now on. May be repeated."""

    def release(self) -> None:
        """Let go of what was locked, when no copy is under way any more."""


def mover_for(device: torch.device) -> Mover | None:
    """None for the CPU, where nothing needs to be moved."""
    if device.type == "cpu":
        return None
    return CudaMover(device) if device.type == "cuda" else PlainMover()


class _Done:
    def wait(self) -> None:
        """It is."""


class PlainMover:
    """Copies at once: for devices without anything better."""

    def fetch(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        """See :class:`Mover`."""
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return _Done()

    bring = fetch

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Mover`."""
        return torch.zeros(elements, dtype=dtype)

    def lock(self, memory: Tensor, writable: bool) -> None:
        """Changes nothing."""

    def release(self) -> None:
        """Changes nothing."""


class _Event:
    """Keeps what is copied, and where to, until it is."""

    def __init__(self, event: torch.cuda.Event, tensors: Sequence[Tensor]) -> None:
        self._event, self._tensors = event, list(tensors)

    def wait(self) -> None:
        """See :class:`Ticket`."""
        self._event.synchronize()
        self._tensors.clear()


class CudaMover:
    """A stream for each direction, and page-locked memory. Where that cannot be had, copies hold this thread up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
        self._out, self._in = stream(device), stream(device)
        self._locked: dict[int, Tensor] = {}
        self._told = False

    def fetch(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        """See :class:`Mover`."""
        return self._copy(self._out, sources, targets)

    def bring(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        """See :class:`Mover`."""
        ticket = self._copy(self._in, sources, targets)
        torch.cuda.current_stream(self._device).wait_stream(self._in)
        return ticket

    def _copy(self, stream: torch.cuda.Stream, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Ticket:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            event = stream.record_event()
        return _Event(event, [*sources, *targets])

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        """See :class:`Mover`."""
        try:
            return torch.zeros(elements, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            self._tell(str(error))
            return torch.zeros(elements, dtype=dtype)

    def lock(self, memory: Tensor, writable: bool) -> None:
        """See :class:`Mover`."""
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
        """See :class:`Mover`."""
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
    """CUDA's own calls, as far as torch hands them on."""
    found: Callable[[], Any] = torch.cuda.cudart
    return found()
