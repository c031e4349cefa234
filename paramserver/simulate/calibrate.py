"""Measure what calls, bytes and arithmetic cost here: our own transport between two processes, and torch's kernels."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from statistics import median
from typing import Any

from paramserver.errors import UnavailableError
from paramserver.simulate.costs import Costs
from paramserver.simulate.echo import CHUNKS, NBYTES, frames_of
from paramserver.v1 import shard_pb2

# Parameters of the flat tensors that are summed and updated: more than fit any cache.
_PARAMS = 4_000_000
_CALLS, _AT_ONCE, _ROUNDS, _REPEATS = 100, 8, 5, 5
_TIMEOUT_S = 30.0


def calibrate() -> Costs:
    """Takes a few seconds. Raises UnavailableError if the other process does not start."""
    with _peer() as address:
        call_s, serve_s, push_bytes_s, pull_bytes_s = asyncio.run(_network(address))
    sum_ns, apply_ns = _arithmetic()
    return Costs(call_s, serve_s, push_bytes_s, pull_bytes_s, sum_ns, apply_ns)


@contextlib.contextmanager
def _peer() -> Iterator[str]:
    """A process that answers calls; its address."""
    command = [sys.executable, "-m", "paramserver.simulate.echo"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise UnavailableError("the process to measure the transport with did not start")
            yield address
        finally:
            process.kill()


async def _network(address: str) -> tuple[float, float, float, float]:
    """Seconds of a small call alone, and of one among many; bytes per second of pushing and of pulling."""
    from paramserver.transport.grpc import connect

    channel = connect(address)
    try:
        request = shard_pb2.StatsRequest()

        async def calls() -> None:
            for _ in range(_CALLS):
                await channel.call("Shard.Stats", request, timeout=_TIMEOUT_S)

        async def push() -> None:
            await channel.upload("Shard.Push", frames_of(shard_pb2.PushHeader(chunks=CHUNKS)), timeout=_TIMEOUT_S)

        async def pull() -> None:
            async with aclosing(channel.download("Shard.Pull", shard_pb2.PullRequest(), timeout=_TIMEOUT_S)) as frames:
                async for _ in frames:
                    pass

        for warm_up in (calls, push, pull):
            await warm_up()
        alone_s, pushing_s, pulling_s = [], [], []
        for _ in range(_ROUNDS):
            alone_s.append(await _timed(calls()) / _CALLS)
            pushing_s.append(await _timed(push()))
            pulling_s.append(await _timed(pull()))
        many_s = await _timed(asyncio.gather(*(calls() for _ in range(_AT_ONCE)))) / (_CALLS * _AT_ONCE)
    finally:
        await channel.close()
    call_s = median(alone_s)
    return call_s, min(call_s, many_s), NBYTES / median(pushing_s), NBYTES / median(pulling_s)


async def _timed(work: Any) -> float:
    begin = time.perf_counter()
    await work
    return time.perf_counter() - begin


def _arithmetic() -> tuple[float, dict[str, float]]:
    """Nanoseconds per parameter, with one thread: to check and add a gradient, and to apply it, by optimizer."""
    import torch

    from paramserver.tensors.finite import is_finite
    from paramserver.tensors.optimizers import torch_class

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        weights, gradient, into = (torch.full((_PARAMS,), 0.5) for _ in range(3))

        def take_in() -> None:
            is_finite(gradient)
            into.add_(gradient)

        def applying(name: str, **hypers: float) -> Callable[[], None]:
            make: Any = torch_class(name)
            optimizer = make([weights], fused=True, **hypers)
            weights.grad = gradient

            def apply() -> None:
                into.copy_(weights)  # versions are published beside each other
                optimizer.step()

            return apply

        updates = {
            "sgd": applying("sgd", lr=1e-6),
            "momentum": applying("sgd", lr=1e-6, momentum=0.9),
            "adamw": applying("adamw", lr=1e-6),
        }
        return _ns(take_in), {name: _ns(update) for name, update in updates.items()}
    finally:
        torch.set_num_threads(threads)


def _ns(work: Callable[[], None]) -> float:
    """Nanoseconds per parameter, the median of a few times."""
    work()
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return 1e9 * median(times) / _PARAMS
