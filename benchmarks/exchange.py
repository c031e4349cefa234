"""One whole synchronous step on one host: from gradients ready to new weights readable by all, in real processes.

Ours over shared memory, over sockets (also with TLS) and over gRPC, beside gloo's all-reduce with the local fused
optimizer, a parameter server on PyTorch RPC (TCP), gRPC and sockets that only move as many bytes, and the floor: the
time of the least traffic at the speed of an in-place triad on all processors. A step begins when the last
worker's gradients are ready, and ends when the last worker has the weights.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.launch import call, flags
from benchmarks.rows import Row, rows

SCRIPT = Path(__file__).parent / "scripts" / "exchange.py"
PEERS = SCRIPT.with_name("exchange_peers.py")
MEGABYTES, STEPS, SKIP = 256, 14, 4
# (workers, optimizer)
CASES = ((2, "sgd"), (2, "adamw"), (4, "sgd"), (4, "adamw"))
# Bytes per parameter beside the gradients, each of which is read once: docs/performance.md.
_FLOOR_BYTES = {"sgd": 8, "adamw": 24}
OURS, BULK, TLS, GRPC = "ours, shm", "ours, bulk", "ours, bulk, TLS", "ours, gRPC"
GLOO, FLOOR = "gloo + fused", "DRAM floor"
RPC, BARE, TCP = "PyTorch RPC", "grpcio, bytes", "TCP, bytes"
MEASURED = (OURS, BULK, TLS, GRPC, GLOO, RPC, BARE, TCP)
# cluster.transport of ours.
_TRANSPORT = {OURS: "shm", BULK: "bulk", TLS: "bulk", GRPC: "grpc"}

Case = tuple[int, str]


def run(repetitions: int) -> list[Row]:
    """All cases and variants in turn. Raises RuntimeError if a run fails, or if the weights differ."""
    seconds: dict[Case, dict[str, list[float]]] = {case: {v: [] for v in (*MEASURED, FLOOR)} for case in CASES}
    for number in range(repetitions):
        for case in CASES:
            weights = {}
            for variant in MEASURED:
                times, weights[variant] = measure(case, variant)
                seconds[case][variant] += times
            seconds[case][FLOOR].append(floor(case))
            said = ", ".join(f"{v} {min(t) * 1000:.0f} to {max(t) * 1000:.0f} ms" for v, t in seconds[case].items())
            print(f"repetition {number + 1} of {repetitions}, {_text(case)}: {said}", file=sys.stderr, flush=True)
            same = all(abs(weights[OURS] - weights[other]) <= 1e-6 * abs(weights[other]) for other in (GLOO, RPC))
            if len({weights[ours] for ours in _TRANSPORT}) > 1 or not same:
                raise RuntimeError(f"the weights differ: {weights}")
    return [row for case in CASES for row in rows("exchange", _text(case), seconds[case], OURS)]


def _text(case: Case) -> str:
    return f"{MEGABYTES} MiB, {case[0]} workers, {case[1]}"


def measure(case: Case, variant: str) -> tuple[list[float], float]:
    """Seconds of each step without the first steps, and a weight after the last step."""
    workers, optimizer = case
    with tempfile.TemporaryDirectory() as directory:
        numbers = {"--megabytes": MEGABYTES, "--ranks": workers, "--steps": STEPS, "--optimizer": optimizer}
        script = [*flags(numbers), "--out", directory]
        if variant not in _TRANSPORT:
            ranks = workers if variant == GLOO else workers + 1
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            how = {
                GLOO: [str(SCRIPT), "--gloo"],
                RPC: [str(PEERS), "--how", "rpc"],
                BARE: [str(PEERS), "--how", "bare"],
                TCP: [str(PEERS), "--how", "sockets"],
            }
            call([*torchrun, *how[variant], *script])
        else:
            how_sent = f"cluster.transport={_TRANSPORT[variant]}"
            # The workers stand for workers of several hosts.
            sizes = ["--servers", "1", "--workers", str(workers), "--set", how_sent, "--set", "cluster.host_tier=off"]
            if variant == TLS:
                certs = str(Path(directory) / "certs")
                call([sys.executable, "-m", "paramserver", "certs", "init", certs])
                sizes += ["--set", f"security.certs={certs}"]
            call([sys.executable, "-m", "paramserver", "run", str(SCRIPT), *sizes, "--", *script])
        found = [json.loads(path.read_text()) for path in Path(directory).glob("*.json")]
    if len(found) != workers or len({one["weight"] for one in found}) != 1:
        raise RuntimeError(f"{variant}: the workers' weights differ: {[one['weight'] for one in found]}")
    return steps_of(found, SKIP), found[0]["weight"]


def steps_of(found: list[dict[str, Any]], skip: int) -> list[float]:
    """Seconds of each step without the first ones, out of the times of all workers.

    A step in which a worker took no part, since another one was quicker to take its slice, does not count. Raises
    RuntimeError if more than a quarter of the steps do not count.
    """
    ends: dict[int, list[tuple[float, float]]] = {}
    for one in found:
        for step, began, ended in one["times"]:
            ends.setdefault(step, []).append((began, ended))
    whole = {step: both for step, both in ends.items() if len(both) == len(found)}
    if 4 * len(whole) < 3 * len(ends):
        raise RuntimeError("not every worker took part in every step: is the machine busy?")
    return [max(e for _, e in both) - max(b for b, _ in both) for step, both in whole.items() if step >= skip]


def floor(case: Case) -> float:
    """Seconds that the memory needs for the least traffic of a step."""
    workers, optimizer = case
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        elements = MEGABYTES * 2**20 // 4
        one, other = torch.ones(elements), torch.ones(elements)
        one.add_(other, alpha=0.5)
        times = []
        for _ in range(5):
            began = time.monotonic()
            one.add_(other, alpha=0.5)
            times.append(time.monotonic() - began)
    finally:
        torch.set_num_threads(threads)
    per_byte = min(times) / (12 * elements)
    return per_byte * elements * (4 * workers + _FLOOR_BYTES[optimizer])
