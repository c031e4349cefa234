"""The cost of the decisions of a step: many simulated workers and the real state machines, without tensors and sockets.

One unit of work is one step of one worker: its contribution arrives, it asks for the next version, it is answered.
Asynchronous workers also lease slices from the coordinator, sixteen at a time. Seconds are CPU seconds.
Beside ours: the same barrier as two operations of each worker on a store (torch's TCPStore, Valkey).
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from statistics import median

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.counting import STEPS
from benchmarks.counting import count as count_steps
from benchmarks.rows import Row, rows
from paramserver.core.job.membership import Admitted, Joined, Membership, Renewed, Role, Tick
from paramserver.core.shards.shard import ShardState
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.events import (
    Activated,
    AnswerPull,
    Arrived,
    AtClock,
    AtLeast,
    Build,
    Built,
    CallGone,
    Effect,
    Event,
    Joining,
    MembersChanged,
    PullAsked,
    Want,
)
from paramserver.core.versions.names import AsyncName, SyncName
from paramserver.core.work.leases import SliceLeases
from paramserver.machine.valkey import EmbeddedStore
from paramserver.store import open_store

WORKERS = (10, 100, 1000)
STALENESS = 3
# Worker-steps of one measurement, at least two steps.
_ENOUGH = 4000
_LEASED, _LOW = 16, 4
_LEASE_S, _STEP_S = 5.0, 0.1
OURS_SYNC, OURS_SSP = "ours, sync", "ours, SSP"
# Workers that really train, as threads of this process, without sockets.
REAL = 64


def run(repetitions: int) -> list[Row]:
    """Every number of workers. Raises RuntimeError if a simulated worker is not answered."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        valkey = EmbeddedStore()
        url = valkey.start(Path(directory))
        try:
            tcp = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60))
            for workers in WORKERS:
                found += _case(workers, repetitions, {"TCPStore": _tcp(tcp), "Valkey": _valkey(url)})
        finally:
            valkey.stop()
    return found


def real(repetitions: int) -> list[Row]:
    """CPU seconds per worker-step of 64 workers and 2 servers in this process, all included: messages, compute, update.

    Raises RuntimeError if a steady step has asked the coordinator or the store.
    """
    seconds = []
    for _ in range(repetitions):
        counts = count_steps(REAL, 2)
        seconds.append(counts.cpu_s / (REAL * STEPS))
        if counts.of_the_coordinator() or counts.store_operations:
            raise RuntimeError(f"steps asked the coordinator or the store: {counts}")
    print(f"{REAL} threads that train, all included: {median(seconds) * 1e6:.0f} µs per worker-step", file=sys.stderr)
    return rows("ctrl", f"{REAL} workers that train, all included", {"ours": seconds}, "ours")


def _case(workers: int, repetitions: int, others: dict[str, Callable[[int], float]]) -> list[Row]:
    steps = max(2, _ENOUGH // workers)
    works: dict[str, Callable[[], float]] = {
        OURS_SYNC: lambda: sync(workers, steps),
        OURS_SSP: lambda: bounded(workers, steps),
        "membership": lambda: membership(workers, steps),
        **{name: lambda work=work: work(workers) for name, work in others.items()},  # type: ignore[misc]
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repetitions):
        for name, work in works.items():
            gc.collect()
            seconds[name].append(work())
    for name, times in seconds.items():
        print(f"{workers:>5} workers, {name:<12}{median(times) * 1e6:8.1f} µs per worker-step", file=sys.stderr)
    return rows("ctrl", f"{workers} workers", seconds, OURS_SYNC)


class Shard:
    """A shard without tensors: a version is built at once."""

    def __init__(self, consistency: Consistency, workers: int) -> None:
        self.state = ShardState(consistency)
        self.answered: deque[int] = deque()
        self._calls: dict[int, int] = {}
        self._numbers = count(1)
        self.happen(MembersChanged(1, frozenset(range(1, workers + 1))))
        self.happen(Activated(0))

    def happen(self, event: Event) -> None:
        """Carry effects out as the server does, without the arithmetic."""
        effects: deque[Effect] = deque(self.state.handle(event))
        while effects:
            effect = effects.popleft()
            if isinstance(effect, Build):
                effects.extend(self.state.handle(Built(effect.version)))
            elif isinstance(effect, AnswerPull):
                self.state.handle(CallGone(effect.call))
                self.answered.append(self._calls.pop(effect.call))

    def push(self, worker: int, name: SyncName | AsyncName, clock: int = 0) -> None:
        """A worker's contribution arrives."""
        self.happen(Arrived(next(self._numbers), name, next(self._numbers), worker, 0, clock))

    def pull(self, worker: int, want: Want) -> None:
        """A worker asks for a version."""
        call = next(self._numbers)
        self._calls[call] = worker
        self.happen(PullAsked(call, worker, want, 0))

    def take(self, expected: int) -> None:
        """Forget the workers that have been answered. Raises RuntimeError if they are not ``expected`` many."""
        if len(self.answered) != expected:
            raise RuntimeError(f"{len(self.answered)} workers were answered, not {expected}")
        self.answered.clear()


def sync(workers: int, steps: int) -> float:
    """CPU seconds per worker-step, one slice for each worker."""
    shard = Shard(Consistency(Mode.SYNC), workers)
    began = time.process_time()
    for step in range(steps):
        for worker in range(workers):
            shard.push(worker + 1, SyncName(step, worker, worker + 1, workers))
            shard.pull(worker + 1, AtLeast(step + 1))
        shard.take(workers)
    return (time.process_time() - began) / (workers * steps)


def bounded(workers: int, steps: int) -> float:
    """The same under bounded staleness, with leases; a worker that is answered goes on at once."""
    shard = Shard(Consistency(Mode.ASYNC, STALENESS), workers)
    leases = SliceLeases(workers * steps * 2)
    held: dict[int, deque[AsyncName]] = {worker: deque() for worker in range(1, workers + 1)}
    finished: dict[int, list[AsyncName]] = {worker: [] for worker in held}
    clocks = dict.fromkeys(held, 0)
    for worker in held:
        shard.pull(worker, Joining())
    began, done = time.process_time(), 0
    while done < workers * steps:
        if not shard.answered:
            raise RuntimeError("all workers wait")
        worker = shard.answered.popleft()
        if len(held[worker]) <= _LOW:
            leases.complete(finished[worker])
            finished[worker].clear()
            held[worker].extend(leases.lease(worker, 0, _LEASED, workers))
        name = held[worker].popleft()
        shard.push(worker, name, clocks[worker])
        finished[worker].append(name)
        clocks[worker] += 1
        shard.pull(worker, AtClock(clocks[worker]))
        done += 1
    return (time.process_time() - began) / done


def membership(workers: int, steps: int) -> float:
    """Signs of life and the search for silent members, at steps of 0.1 s, per worker-step."""
    members = Membership(_LEASE_S, 1.0)
    idents = [effect.member.ident for effect in _all_joined(members, workers)]
    renewals = max(1, round(workers * _STEP_S * 3 / _LEASE_S))
    whose = 0
    began = time.process_time()
    for step in range(steps):
        now = step * 1e-6
        for _ in range(renewals):
            members.handle(Renewed(idents[whose % workers]), now)
            whose += 1
        if members.handle(Tick(), now):
            raise RuntimeError("somebody was given up")
    return (time.process_time() - began) / (workers * steps)


def _all_joined(members: Membership, workers: int) -> Iterator[Admitted]:
    for _ in range(workers):
        for effect in members.handle(Joined(Role.WORKER), 0.0):
            if isinstance(effect, Admitted):
                yield effect


def _tcp(store: TCPStore) -> Callable[[int], float]:
    """A usual barrier: each worker adds one and reads the count. Wall time, one worker after the other."""
    numbers = count()

    def work(workers: int) -> float:
        key = f"step{next(numbers)}"
        began = time.monotonic()
        for _ in range(workers):
            store.add(key, 1)
            store.add(key, 0)
        return (time.monotonic() - began) / workers

    return work


def _valkey(url: str) -> Callable[[int], float]:
    """The same against our private store."""

    def work(workers: int) -> float:
        async def go() -> float:
            store = open_store(url, "ctrl")
            await store.ping()
            began = time.monotonic()
            for _ in range(workers):
                await store.ping()
                await store.ping()
            seconds = (time.monotonic() - began) / workers
            await store.close()
            return seconds

        return asyncio.run(go())

    return work
