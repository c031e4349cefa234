"""The speed of this machine, for comparison with all other results: memory, loopback, small calls, the private store.

Each case has only ceilings, so a ratio compares with the first ceiling.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.rows import Row, rows
from benchmarks.wire.paths import Bare, Ours, Peer, Tcp
from benchmarks.wire_bw import gigabytes
from paramserver.machine.valkey import EmbeddedStore
from paramserver.store import open_store

BYTES = 64 << 20
_CALLS = 50
# Bytes that the memory moves for each byte of the size: a copy reads and writes, the triad reads twice and writes.
_TRAFFIC = {"memcpy": 2, "in-place triad": 3}


def run(repetitions: int) -> list[Row]:
    """All cases in turn. Raises RuntimeError if the other process does not start, StoreError if the store does not."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, Peer() as peer:
        store = EmbeddedStore()
        url = store.start(Path(directory))
        try:
            moving, calling = _moving(peer), _calling(peer, url)
            moved, called = measure(moving, repetitions), measure(calling, repetitions)
        finally:
            store.stop()
    for variant, times in moved.items():
        traffic = BYTES * _TRAFFIC.get(variant, 1)
        print(f"{variant}: {gigabytes(traffic, median(times)):.1f} GB/s", file=sys.stderr)
    called = {variant: [seconds / _CALLS for seconds in times] for variant, times in called.items()}
    for variant, times in called.items():
        print(f"{variant}: {median(times) * 1e6:.0f} µs", file=sys.stderr)
    return [
        *rows("calib", f"{BYTES >> 20} MiB", moved, "memcpy"),
        *rows("calib", "a small call", called, "grpc.aio"),
    ]


def measure(works: dict[str, Callable[[], None]], repetitions: int) -> dict[str, list[float]]:
    """Seconds of each function, by name. One call before the measurement does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(repetitions + 1):
        for name, work in works.items():
            began = time.monotonic()
            work()
            if number:
                seconds[name].append(time.monotonic() - began)
    return seconds


def _moving(peer: Peer) -> dict[str, Callable[[], None]]:
    source, target = torch.ones(BYTES // 4), torch.ones(BYTES // 4)
    tcp = Tcp(peer)

    def copy() -> None:
        target.copy_(source)

    def triad() -> None:
        target.add_(source, alpha=0.5)

    return {"memcpy": copy, "in-place triad": triad, "raw TCP": lambda: tcp.push(BYTES, 1)}


def _calling(peer: Peer, url: str) -> dict[str, Callable[[], None]]:
    bare, ours = Bare(peer), Ours(peer)
    store = open_store(url, "calib")

    async def pings() -> None:
        for _ in range(_CALLS):
            await store.ping()

    return {
        "grpc.aio": lambda: bare.pings(_CALLS),
        "our transport": lambda: ours.pings(_CALLS),
        "store": lambda: peer.background.run(pings(), 60.0),
    }
