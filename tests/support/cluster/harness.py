"""A whole job in one process, its workers in threads: start, train, look at what came out. Every wait has a deadline.

The random numbers of torch belong to the process, so models that draw any (dropout) need a single worker here;
tests/integration trains those with processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TypeVar

import pytest
import torch

import paramserver as ps
from paramserver import errors, logs
from paramserver.alone.finish import gather
from paramserver.alone.job import COORDINATOR, InProcessJob, worker_options
from paramserver.config import load_settings
from paramserver.coordinator.options import JobOptions
from paramserver.core.layout.plan import Chunk
from paramserver.membership.settings import consistency_of
from paramserver.results.collect import Result
from paramserver.server.arithmetic.state import State
from paramserver.server.service import ServerService
from paramserver.server.versions.shard import Contribution, ShardTensors
from paramserver.server.versions.version import Version
from paramserver.tensors.dtypes import torch_dtype
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.worker.client import RawClient
from paramserver.worker.context import Context
from paramserver.worker.engine import Engine
from paramserver.worker.pace import Item
from tests.support.cluster.faults import Connect, FaultPlan

# How long a whole job may take on a busy machine before it counts as stuck.
JOB_S = 60.0
# How long a single call may take.
CALL_S = 20.0

T = TypeVar("T")
Script = Callable[[Context], object]


class Died(BaseException):
    """Raised by a test's script where its worker is to vanish without a word."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left of a job: its summary, and the state gathered from the servers."""

    summary: Mapping[str, Any]
    result: Result

    @property
    def digests(self) -> tuple[str, str, str]:
        """Of weights, optimizer state and buffers."""
        return (
            self.result.weights_sha256(),
            self.result.optimizer_sha256(),
            self.result.buffers_sha256(),
        )

    def tensor(self, name: str) -> torch.Tensor:
        """The final value of a parameter or buffer, in the master type."""
        for placement, spec, data in zip(
            self.result.layout.placements, self.result.layout.tensors, self.result.tensors, strict=True
        ):
            if spec.name == name:
                dtype = torch_dtype(self.result.layout.segments[placement.segment].dtype)
                whole = torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
                return whole.view(spec.shape)
        raise KeyError(name)

    def state(self, name: str, key: str) -> bytes:
        """Raw optimizer state of a parameter."""
        index = next(i for i, spec in enumerate(self.result.layout.tensors) if spec.name == name)
        return self.result.states[(index, key)]


class Worker:
    """One worker thread that runs a script."""

    def __init__(self, cluster: Cluster, index: int, script: Script, settings: Mapping[str, object]) -> None:
        self.index = index
        self.plan = FaultPlan()
        self.context: Context | None = None
        self.error: BaseException | None = None
        self._cluster, self._script, self._settings = cluster, script, settings
        self._thread = threading.Thread(target=self._run, name=f"worker-{index}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # OpenMP counts per thread; torch tells it at the first parallel operation, which may come after a product.
        torch.set_num_threads(1)
        try:
            ctx = self.context = self._cluster.context(self.index, self.plan, **self._settings)
            try:
                self._script(ctx)
            except Died:  # whoever is dead says nothing, and does not close
                self.cut()
                return
            except BaseException:
                self._cluster.attempt(ctx.close)
                raise
            ctx.close()
        except BaseException as error:
            self.error = error

    def cut(self, silent: bool = False) -> None:
        """Cut this worker off from everybody."""
        self._cluster.call_in_loop(lambda: self.plan.cut(silent))

    def heal(self) -> None:
        """Connect it again."""
        self._cluster.call_in_loop(self.plan.heal)

    @property
    def alive(self) -> bool:
        """Whether its script still runs."""
        return self._thread.is_alive()

    def end(self, timeout_s: float) -> None:
        """Wait for its end for a while."""
        self._thread.join(timeout_s)

    def join(self, deadline: float) -> None:
        """Wait for its end; fails with what the job waits for."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        assert not self._thread.is_alive(), f"worker-{self.index} is stuck\n{self._cluster.where_it_stands()}"


class Cluster:
    """Coordinator and servers in one event loop. Use as a context manager."""

    def __init__(
        self,
        workers: int = 1,
        servers: int = 1,
        mode: str = "sync",
        staleness: int | str = 3,
        slices_per_step: int = 0,
        faults: FaultPlan | None = None,
        wait_timeout_s: float = 30.0,
        transport: str = "grpc",
        beside_workers: int = 0,
        host_tier: bool = False,
        **options: Any,
    ) -> None:
        torch.set_num_threads(1)
        logs.configure("warning")
        self.options = JobOptions(
            "test", servers, workers, consistency_of(mode, staleness), slices_per_step=slices_per_step, **options
        )
        self.job = InProcessJob(self.options, beside_workers=beside_workers)
        self.faults = faults
        self.workers: list[Worker] = []
        # Of the clients and readers, in the order in which they were made.
        self.engines: list[Engine] = []
        self._wait_timeout_s = wait_timeout_s
        self._transport = transport
        self._host_secret = secrets.token_hex(8) if host_tier else None
        self._settings = {
            "consistency.mode": mode,
            "consistency.staleness": staleness,
            "training.slices_per_step": slices_per_step,
            "training.seed": self.options.seed,
            "training.device": "cpu",
        }

    def __enter__(self) -> Cluster:
        self.job.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_workers()
        if kind is None:
            self.job.close()
        else:  # the test's own error counts
            self.attempt(self.job.close)

    def _end_workers(self) -> None:
        """Whoever still waits for something is told that it is over."""
        if any(worker.alive for worker in self.workers):
            self.attempt(lambda: self.job.background.run(self.job.coordinator.job.fail("the test is over"), CALL_S))
            for worker in self.workers:
                worker.heal()  # so that it hears of it
            for worker in self.workers:
                worker.end(5.0)

    def attempt(self, work: Callable[[], object]) -> None:
        """Do it; an error of ours does not matter any more."""
        with suppress(errors.ParamServerError):
            work()

    # ---- workers

    def context(self, index: int, plan: FaultPlan | None = None, **settings: object) -> Context:
        """What `ps.init` gives, for a worker of this job. ``settings``: with two underscores for the dot."""
        connect = self.job.network.connect
        for faults in (plan, self.faults):
            connect = faults.wrap(connect) if faults is not None else connect  # type: ignore[assignment]
        engine = self.job.worker(index, connect, self._wait_timeout_s, self._transport, self._host_secret)
        dotted = {key.replace("__", "."): value for key, value in settings.items()}
        given = {"consistency.mode": self.options.consistency.mode.value, **self._settings, **dotted}
        return Context(load_settings(None, given, environ={}), engine, lambda ctx: ctx.engine.close())

    def client(self, index: int | None = None, plan: FaultPlan | None = None, chunk_bytes: int = 0) -> RawClient:
        """What `ps.Client` gives, for this job."""
        connect = plan.wrap(self.job.network.connect) if plan is not None else None
        engine = self.job.worker(index, connect, self._wait_timeout_s, self._transport, self._host_secret)
        self.engines.append(engine)
        return RawClient(engine, engine.close, chunk_bytes)

    def reader(self, plan: FaultPlan | None = None) -> RawClient:
        """A client from outside: no worker, so nobody waits for it, until it begins the job or pushes."""
        connect: Connect = self.job.network.connect
        connect = plan.wrap(connect) if plan is not None else connect
        options = replace(worker_options(self.options.consistency, self.options, None), role=types_pb2.ROLE_OBSERVER)
        engine = Engine(self.job.background, connect, connect(COORDINATOR), options, self._wait_timeout_s, "grpc")
        engine.join()
        self.engines.append(engine)
        return RawClient(engine, engine.close)

    def start(self, script: Script, settings: Mapping[str, object] | None = None) -> Worker:
        """Run a script in a new worker thread."""
        worker = Worker(self, len(self.workers), script, settings or {})
        self.workers.append(worker)
        return worker

    def join(self, workers: Sequence[Worker] | None = None) -> None:
        """Wait for these (or all) workers; raises the first error of a script."""
        deadline = time.monotonic() + JOB_S
        waited = self.workers if workers is None else workers
        for worker in waited:
            worker.join(deadline)
        for worker in waited:
            if worker.error is not None:
                raise worker.error

    def train(self, script: Script, settings: Mapping[str, object] | None = None) -> Outcome:
        """Run the script in all workers of the job; what came out."""
        for _ in range(self.options.workers):
            self.start(script, settings=settings)
        self.join()
        return self.outcome()

    # ---- looking at it

    def outcome(self) -> Outcome:
        """The present summary and state."""
        summary, result = gather(self.job)
        return Outcome(summary, result)

    def stats(self) -> list[shard_pb2.StatsResponse]:
        """What the servers count."""
        return self.job.background.run(self.job.coordinator.job.shards.stats(), CALL_S)

    def status(self) -> coordinator_pb2.StatusResponse:
        """What the coordinator shows."""
        return self.job.background.run(self.job.coordinator.status(coordinator_pb2.StatusRequest()), CALL_S)

    def set_consistency(
        self, mode: str, staleness: int | str = 3, wait_s: float = 20.0
    ) -> coordinator_pb2.ChangeConsistencyResponse:
        """What `paramserver set` does."""
        wanted = consistency_of(mode, staleness)
        request = coordinator_pb2.ChangeConsistencyRequest(
            mode=types_pb2.MODE_SYNC if mode == "sync" else types_pb2.MODE_ASYNC,
            staleness=wanted.staleness if mode == "async" else None,
            wait_s=wait_s,
        )

        async def go() -> coordinator_pb2.ChangeConsistencyResponse:
            channel = self.job.network.connect(COORDINATOR)
            reply = await channel.call("Coordinator.SetConsistency", request, timeout=wait_s + CALL_S)
            assert isinstance(reply, coordinator_pb2.ChangeConsistencyResponse)
            return reply

        return self.job.background.run(go(), wait_s + CALL_S)

    def where_it_stands(self) -> str:
        """For messages about a job that is stuck."""
        return "\n".join(
            f"{p.name}: {p.state}, version {p.version}, clock {p.clock}, waits for {p.waiting_for or 'nothing'}"
            for p in self.status().processes
        )

    def call_in_loop(self, work: Callable[[], T]) -> T:
        """Call a function in the event loop of the job."""

        async def go() -> T:
            return work()

        return self.job.background.run(go(), CALL_S)


def train(
    script: Script, workers: int = 1, servers: int = 1, settings: Mapping[str, object] | None = None, **options: Any
) -> Outcome:
    """One job from start to end."""
    with Cluster(workers, servers, **options) as cluster:
        return cluster.train(script, settings)


def train_without(
    part: ModuleType, script: Script, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[str, str, str]:
    """The digests of a job in which nothing is large enough for what the module ``part`` does."""
    with monkeypatch.context() as patch:
        patch.setattr(part, "LEAST_BYTES", 1 << 40)
        return train(script, **options).digests


def buffered(service: ServerService) -> int:
    """How many contributions are kept because they are in no version yet."""
    return len(service.first.host.shard.buffers) if service.first.host.shard is not None else 0


def item_of(ctx: Context) -> Item:
    """The slice that a script has and has not stepped on."""
    assert ctx.prepared.steps is not None
    assert ctx.prepared.steps.item is not None
    return ctx.prepared.steps.item


def inside(work: Callable[[Context], object]) -> None:
    """Call something with a context of a job of one worker, in this thread; it is closed whatever happens."""
    with Cluster() as cluster:
        ctx = cluster.context(0)
        try:
            work(ctx)
        finally:
            ctx.close()


def alone(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> dict[str, Any]:
    """The same script as `python script.py` runs it: ``ps.init()`` without a cluster. Its summary."""
    for name in [name for name in os.environ if name.startswith("PARAMSERVER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PARAMSERVER_CONFIG", "")
    summary = tmp_path / "alone.json"
    with ps.init(run__summary=str(summary), log__level="error", **settings) as ctx:
        script(ctx)
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def at_once(cluster: Cluster, *works: Callable[[], object]) -> list[Any]:
    """Call all of them in threads of their own; what they return, or the first error."""
    results: list[Any] = [None] * len(works)
    failures: list[BaseException] = []

    def call(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOB_S)
        assert not thread.is_alive(), cluster.where_it_stands()
    if failures:
        raise failures[0]
    return results


def until(what: str, found: Callable[[], T], deadline_s: float = 20.0) -> T:
    """Ask again and again until the answer counts as true; fails with ``what`` after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (answer := found()):
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.005)
    return answer


def wait(event: threading.Event, what: str, deadline_s: float = 20.0) -> None:
    """Wait for an event; fails with ``what`` after the deadline."""
    assert event.wait(deadline_s), f"not within {deadline_s:g} s: {what}"


@dataclass(frozen=True, slots=True)
class Applied:
    """One contribution as a shard applied it."""

    shard: int
    contribution: Contribution


@contextmanager
def recorded() -> Iterator[list[Applied]]:
    """Record what every shard applies, in its order, with copies of the bytes."""
    log: list[Applied] = []
    shards: dict[int, int] = {}
    real = ShardTensors.build

    def build(
        self: ShardTensors,
        base: Version,
        contributions: Sequence[Contribution],
        given: Mapping[int, torch.Tensor] | None = None,
        space: Callable[[Chunk], torch.Tensor] | None = None,
        drafted: Mapping[int, tuple[torch.Tensor, State | None]] | None = None,
        keep: Callable[[Chunk], torch.Tensor] | None = None,
    ) -> Version:
        shard = shards.setdefault(id(self), len(shards))
        for one in contributions:
            copies = {index: data.clone() for index, data in one.chunks.items()}
            log.append(Applied(shard, replace(one, chunks=copies)))
        return real(self, base, contributions, given, space, drafted, keep)

    ShardTensors.build = build  # type: ignore[method-assign]
    try:
        yield log
    finally:
        ShardTensors.build = real  # type: ignore[method-assign]


def digest(*tensors: torch.Tensor) -> str:
    """As a run's summary has it: SHA-256 over the raw bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
