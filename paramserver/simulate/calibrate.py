"""Measure the costs of calls, bytes and arithmetic: our transport between two processes, and torch's kernels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from paramserver.errors import UnavailableError
from paramserver.simulate.cluster import simulate
from paramserver.simulate.costs import Costs
from paramserver.simulate.echo import CHUNKS, NBYTES, frames_of
from paramserver.simulate.scenario import Scenario
from paramserver.transport.grpc import GrpcChannel, connect
from paramserver.v1 import shard_pb2

T = TypeVar("T")

# Parameters of the flat tensors that are summed and updated: more than fit any cache.
_PARAMS = 4_000_000
_CALLS, _AT_ONCE, _REPEATS = 25, 4, 5
# Steps of small jobs whose steps are measured.
_SMALL_STEPS, _LARGE_STEPS = 100, 30
_LEAST_NS = 0.01
# The cost of a chunk lies between these seconds; it is found by halving.
_LEAST_S, _MOST_S, _HALVINGS = 1e-6, 0.01, 12
_TIMEOUT_S, _RUN_S = 30.0, 120.0


def calibrate() -> Costs:
    """Measure the costs of this machine, which takes a minute.

    Raises UnavailableError if a process that the calibration needs does not start.
    """
    call_s, local_call_s = _step_s("grpc", 1, _SMALL_STEPS) / 2, _step_s("shm", 1, _SMALL_STEPS) / 2
    with _peer() as peer:
        caller = _Caller(peer.address)
        try:
            serve_s, push_bytes_s, pull_bytes_s = _network(caller)
            send_ns, take_ns = _per_byte(caller, peer)
        finally:
            caller.close()
    sum_ns, check_ns, apply_ns = _arithmetic(1)
    threads = len(os.sched_getaffinity(0))
    sum_all, _, apply_all = _arithmetic(threads)
    # The time of a step on one host without the server's part.
    faster = max(1.0, (sum_ns + apply_ns["sgd"]) / (sum_all + apply_all["sgd"]))
    whole_ns = 1e9 * (_step_s("shm", _PARAMS, _LARGE_STEPS) - 2 * local_call_s) / _PARAMS
    costs = Costs(
        call_s=call_s,
        serve_s=min(serve_s, call_s),
        push_bytes_s=push_bytes_s,
        pull_bytes_s=pull_bytes_s,
        sum_ns=sum_ns,
        apply_ns=apply_ns,
        check_ns=check_ns,
        hand_ns=max(_LEAST_NS, whole_ns - (sum_ns + apply_ns["sgd"]) / faster),
        parallel=faster,
        send_ns=send_ns,
        take_ns=take_ns,
        local_call_s=local_call_s,
        local_serve_s=local_call_s * min(serve_s, call_s) / call_s,
    )
    return replace(costs, frame_s=_frame_s(costs, _step_s("grpc", _PARAMS, _LARGE_STEPS), threads))


def _frame_s(costs: Costs, step_s: float, cores: int) -> float:
    """Seconds per chunk with which a simulated step takes as long as the measured step."""
    scenario = Scenario(
        workers=1,
        servers=1,
        params=_PARAMS,
        compute_s=1e-6,
        bandwidth=1e12,
        hosts=1,
        transport="grpc",
        cores=cores,
        steps=5,
    )
    least, most = _LEAST_S, _MOST_S
    for _ in range(_HALVINGS):
        tried = (least + most) / 2
        outcome, _ = simulate(replace(scenario, costs=replace(costs, frame_s=tried)))
        if 1 / outcome.steps_per_s < step_s:
            least = tried
        else:
            most = tried
    return least


def _step_s(transport: str, params: int, steps: int) -> float:
    """Seconds of a step without compute: a push and a pull, with the work of a worker around them."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "seconds"
        script = Path(__file__).with_name("probe.py")
        sizes = ["--workers", "1", "--servers", "1", "--store", "memory"]
        words = [*sizes, "--set", f"cluster.transport={transport}", "--", str(out), str(params), str(steps)]
        command = [sys.executable, "-m", "paramserver", "run", str(script), *words]
        # The probe has settings of its own.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PARAMSERVER_")}
        environ["PARAMSERVER_CONFIG"] = ""
        try:
            subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_RUN_S, check=True)
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"the small job to measure calls with is not done after {_RUN_S:g} s") from None
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip()[-500:]
            raise UnavailableError(f"the small job to measure calls with has failed: {said}") from error
        return float(out.read_text())


@contextlib.contextmanager
def _peer() -> Iterator[_Peer]:
    """A process that answers calls."""
    command = [sys.executable, "-m", "paramserver.simulate.echo"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise UnavailableError("the process to measure the transport with did not start")
            yield _Peer(address, process)
        finally:
            process.kill()


class _Peer:
    """The other process: its address, and the processor time that it has used."""

    def __init__(self, address: str, process: subprocess.Popen[str]) -> None:
        self.address, self._process = address, process

    def cpu_s(self) -> float:
        """Seconds so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


class _Caller:
    """Calls as a worker makes them: its network lives in a thread of its own, and it waits for each answer."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._channel = self.run(_connected(address))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Let the other thread do it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_TIMEOUT_S)

    def close(self) -> None:
        """Close the channel and end the thread."""
        self.run(self._channel.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def push(self, chunks: int) -> None:
        """Bring so many chunks."""
        frames = frames_of(shard_pb2.PushHeader(chunks=chunks), chunks)
        await self._channel.upload("Shard.Push", frames, timeout=_TIMEOUT_S)

    async def pull(self, chunks: int) -> None:
        """Get a version, or its header alone."""
        request = shard_pb2.PullRequest(header_only=not chunks)
        async with aclosing(self._channel.download("Shard.Pull", request, timeout=_TIMEOUT_S)) as frames:
            async for _ in frames:
                pass

    async def in_a_row(self) -> None:
        """As many small calls as one of several callers makes."""
        for _ in range(_CALLS):
            await self.push(0)
            await self.pull(0)


async def _connected(address: str) -> GrpcChannel:
    return connect(address)


def _network(caller: _Caller) -> tuple[float, float, float]:
    """Seconds of a small call among many; bytes per second of pushing and of pulling."""

    async def at_once() -> None:
        await asyncio.gather(*(caller.in_a_row() for _ in range(_AT_ONCE)))

    many_s = _seconds(lambda: caller.run(at_once())) / (2 * _CALLS * _AT_ONCE)
    pushing_s = _seconds(lambda: caller.run(caller.push(CHUNKS)))
    pulling_s = _seconds(lambda: caller.run(caller.pull(CHUNKS)))
    return many_s, NBYTES / pushing_s, NBYTES / pulling_s


def _per_byte(caller: _Caller, peer: _Peer) -> tuple[float, float]:
    """Nanoseconds of a processor to send a byte, and to take one in; of pushes and pulls together."""
    here, there = time.process_time(), peer.cpu_s()
    for _ in range(_REPEATS):
        caller.run(caller.push(CHUNKS))
    sent, taken = time.process_time() - here, peer.cpu_s() - there
    here, there = time.process_time(), peer.cpu_s()
    for _ in range(_REPEATS):
        caller.run(caller.pull(CHUNKS))
    taken += time.process_time() - here
    sent += peer.cpu_s() - there
    whole = 2 * _REPEATS * NBYTES
    return 1e9 * sent / whole, 1e9 * taken / whole


def _arithmetic(used: int) -> tuple[float, float, dict[str, float]]:
    """Nanoseconds per parameter, with so many threads: to add a gradient, to check it, to apply it, by optimizer."""
    import torch

    from paramserver.tensors.finite import is_finite
    from paramserver.tensors.optimizers import torch_class

    threads = torch.get_num_threads()
    torch.set_num_threads(used)
    try:
        weights, gradient, into = (torch.full((_PARAMS,), 0.5) for _ in range(3))

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
        return (
            _ns(lambda: into.add_(gradient)),
            _ns(lambda: is_finite(gradient)),
            {name: _ns(update) for name, update in updates.items()},
        )
    finally:
        torch.set_num_threads(threads)


def _ns(work: Callable[[], object]) -> float:
    """Nanoseconds per parameter."""
    return 1e9 * _seconds(work) / _PARAMS


def _seconds(work: Callable[[], object]) -> float:
    """Seconds of a call: the median of a few calls, after a first call that does not count."""
    work()
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return median(times)
