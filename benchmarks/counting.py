"""Exact counts of a step: calls, operations on the store, encoded versions, copied bytes.

A whole job in this process, with its workers in threads. Sent and received messages are counted at the transport.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import torch
from google.protobuf.message import Message
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from paramserver import logs
from paramserver.alone.job import InProcessJob
from paramserver.config import load_settings
from paramserver.coordinator.options import JobOptions
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.frames import AnyFrame
from paramserver.tensors.codec import split_frame
from paramserver.transport.base import Channel, Frames, Neighbour, Place, each
from paramserver.worker.context import Context
from paramserver.worker.engine import Connect

# Steps that count begin after the steps in which connections and memory are set up.
FIRST, STEPS = 3, 10
_WAIT_S = 60.0
_COPIES = ("aten::copy_", "aten::clone", "aten::_to_copy")


@dataclass(slots=True)
class Counts:
    """Totals over :data:`STEPS` steps."""

    servers: int
    workers: int
    # Bytes of all parameters.
    model_bytes: int = 0
    # By method, the calls of workers.
    calls: Counter[str] = field(default_factory=Counter)
    store_operations: int = 0
    # Frames with data that were made for pulls. A frame that several workers get counts once.
    encoded: int = 0
    # Bytes of frames that workers have sent.
    pushed_bytes: int = 0
    # CPU seconds of this whole process: workers, servers, coordinator.
    cpu_s: float = 0.0
    # Bytes that torch has copied in one worker's `optimizer.step`.
    copied_bytes: int = 0

    def per_worker_step(self, method: str) -> float:
        """Calls of a method that a worker makes to each server in a step."""
        return self.calls[method] / (self.workers * self.servers * STEPS)

    def of_the_coordinator(self) -> int:
        """Calls of workers to it."""
        return sum(n for method, n in self.calls.items() if method.startswith("Coordinator."))

    @property
    def encoded_per_version(self) -> float:
        """Frames with data per version and server."""
        return self.encoded / (STEPS * self.servers)

    @property
    def pushed_per_byte(self) -> float:
        """Bytes sent for each byte of gradient."""
        return self.pushed_bytes / (self.model_bytes * self.workers * STEPS)

    @property
    def copied_per_byte(self) -> float:
        """Copies of each byte of the model by torch, in a step of a worker."""
        return self.copied_bytes / (self.model_bytes * STEPS)


class _Tap:
    """Between the workers and the network; counts between :meth:`begin` and :meth:`end`."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.on = False
        # Kept, so that each has an identity of its own.
        self.frames: dict[int, AnyFrame] = {}

    def wrap(self, connect: Connect) -> Connect:
        """The same channels, counted."""
        return lambda address: _Counted(connect(address), self)

    def note(self, method: str) -> None:
        """A call begins."""
        if self.on:
            self.counts.calls[method] += 1


class _Counted:
    """See `base.Channel`."""

    def __init__(self, inner: Channel, tap: _Tap) -> None:
        self.kind, self.address = inner.kind, inner.address
        self._inner, self._tap = inner, tap

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        self._tap.note(method)
        return await self._inner.call(method, request, timeout=timeout)

    async def upload(self, method: str, frames: Frames, *, timeout: float) -> Message:
        self._tap.note(method)

        async def counted() -> AsyncIterator[AnyFrame]:
            async for raw in each(frames):
                if self._tap.on:
                    self._tap.counts.pushed_bytes += len(raw)
                yield raw

        return await self._inner.upload(method, counted(), timeout=timeout)

    async def download(
        self, method: str, request: Message, *, timeout: float, place: Place | None = None
    ) -> AsyncGenerator[AnyFrame, None]:
        self._tap.note(method)
        async for raw in self._inner.download(method, request, timeout=timeout, place=place):
            if self._tap.on and split_frame(raw)[1]:
                self._tap.frames[id(raw)] = raw
            yield raw

    def session(self, method: str, requests: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        return self._inner.session(method, requests)

    def beside(self, sock: socket.socket) -> Neighbour:
        return _CountedNeighbour(self._inner.beside(sock), self._tap)

    async def close(self) -> None:
        await self._inner.close()


class _CountedNeighbour:
    """See `base.Neighbour`. All calls are counted, so no call may go past the counter."""

    undisturbed = False

    def __init__(self, inner: Neighbour, tap: _Tap) -> None:
        self._inner, self._tap = inner, tap

    async def call(self, method: str, request: Message, *, timeout: float) -> Message:
        self._tap.note(method)
        return await self._inner.call(method, request, timeout=timeout)

    async def close(self) -> None:
        await self._inner.close()


class _Copied(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that torch copies in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _COPIES:
            self.bytes += result.nbytes
        return result


def network() -> nn.Module:
    """100,000 parameters, all of which have a gradient in every step."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 128))


def count(workers: int, servers: int) -> Counts:
    """Train, and count :data:`STEPS` steps in the middle. Raises the error of a worker."""
    logs.configure("warning")
    counts = Counts(servers, workers, sum(p.nbytes for p in network().parameters()))
    tap = _Tap(counts)
    options = JobOptions("count", servers, workers, Consistency(Mode.SYNC))
    job = InProcessJob(options)
    failures: list[BaseException] = []

    def at(step: int) -> None:
        """All workers have the weights of this step and have sent nothing."""
        journal = job.coordinator.job.journal
        if step == FIRST:
            tap.on, counts.store_operations, counts.cpu_s = True, -journal.operations, -time.process_time()
        else:
            tap.on, counts.cpu_s = False, counts.cpu_s + time.process_time()
            counts.store_operations += journal.operations

    stops = {step: threading.Barrier(workers, lambda step=step: at(step)) for step in (FIRST, FIRST + STEPS)}  # type: ignore[misc]

    def work(rank: int) -> None:
        try:
            _train(job, rank, tap, stops)
        except BaseException as error:
            failures.append(error)
            for barrier in stops.values():
                barrier.abort()

    try:
        job.start()
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_WAIT_S)
        if failures:
            raise failures[0]
    finally:
        job.close()
    counts.encoded = len(tap.frames)
    return counts


def _train(job: InProcessJob, rank: int, tap: _Tap, stops: dict[int, threading.Barrier]) -> None:
    torch.set_num_threads(1)
    settings = load_settings(None, {"training.device": "cpu"}, environ={})
    engine = job.worker(rank, tap.wrap(job.network.connect))
    ctx = Context(settings, engine, lambda closing: closing.engine.close())
    model = network()
    samples = TensorDataset(torch.ones((FIRST + STEPS + 1) * job.options.workers, 64))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(samples, batch_size=1))
    for _ in ctx.epochs(1):
        for (x,) in loader:
            if stop := stops.get(ctx.version):
                stop.wait(_WAIT_S)
            model(x).sum().backward()
            if rank == 0 and FIRST <= ctx.version < FIRST + STEPS:
                with _Copied() as copied:
                    optimizer.step()
                tap.counts.copied_bytes += copied.bytes
            else:
                optimizer.step()
            optimizer.zero_grad()
    ctx.close()
