"""Payloads between two processes over loopback: our frames over gRPC beside bare grpcio, stock protobuf, gloo, PyTorch
RPC and raw TCP. The figures show the gain of a faster transport, and whether grpcio is the limit.

A payload is a tensor at the sender and a tensor at the receiver, which may be a view of the received bytes. "bytes"
over grpcio is neither encoded nor decoded: it is the limit of grpcio. Cases that end with "CPU" are CPU seconds of both
processes.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.rows import Row, rows
from benchmarks.wire.paths import Bare, Gloo, Ours, OursBulk, Path, Peer, Rpc, Stock, Tcp
from paramserver.transport.allocation import keep_memory

SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20)
OURS = "ours, bulk"
WAYS: dict[str, Callable[[Peer], Path]] = {
    OURS: OursBulk,
    "ours, grpc": Ours,
    "grpcio, bytes": Bare,
    "grpcio, protobuf": Stock,
    "gloo": Gloo,
    "PyTorch RPC": Rpc,
    "raw TCP": Tcp,
}
DIRECTIONS = ("push", "pull", "both")
# So much is moved in one go, but not fewer payloads than that.
_MOVED, _FEWEST = 64 << 20, 4


def run(repetitions: int) -> list[Row]:
    """All ways in random order, again and again. Raises RuntimeError if the other process does not start."""
    torch.set_num_threads(1)
    keep_memory()  # as workers do
    found: list[Row] = []
    with Peer(groups=True) as peer:
        ways = {name: make(peer) for name, make in WAYS.items()}
        gc.freeze()
        for size in SIZES:
            for direction in DIRECTIONS:
                found += _case(peer, ways, direction, size, repetitions)
    print("not comparable: raw TCP, gloo and RPC check nothing; RPC is kept off shared memory", file=sys.stderr)
    return found


def _case(peer: Peer, ways: dict[str, Path], direction: str, size: int, repetitions: int) -> list[Row]:
    count = payloads(size)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    shuffled = random.Random(size)
    for way in ways.values():
        getattr(way, direction)(size, 2)
    for _ in range(repetitions):
        for name in shuffled.sample(list(ways), len(ways)):
            used, began = peer.cpu_s(), time.monotonic()
            getattr(ways[name], direction)(size, count)
            seconds[name].append((time.monotonic() - began) / count)
            cpu[name].append((peer.cpu_s() - used) / count)
    case = f"{direction} {size / 2**20:g} MiB"
    moved = size * (2 if direction == "both" else 1)
    for name in ways:
        speed = f"{gigabytes(moved, median(seconds[name])):.2f} GB/s, {median(cpu[name]) / moved * 1e9:.2f} CPU s/GB"
        print(f"{case:<16}{name:<18}{speed}", file=sys.stderr, flush=True)
    return [*rows("wire_bw", case, seconds, OURS), *rows("wire_bw", f"{case}, CPU", cpu, OURS)]


def payloads(size: int) -> int:
    """How many payloads of this size are moved in one go."""
    return max(_FEWEST, min(64, _MOVED // size))


def gigabytes(moved: int, seconds: float) -> float:
    """GB/s, 10⁹ bytes."""
    return moved / seconds / 1e9
