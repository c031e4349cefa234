"""A job to simulate, and the outcome: plain values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from paramserver.core.job.holders import Holders
from paramserver.core.layout.plan import MAX_SHARDS
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.errors import ConfigError
from paramserver.simulate.costs import Costs
from paramserver.simulate.events import Happening, ServerEvent, check
from paramserver.simulate.machinery.blame import Chain, Part
from paramserver.simulate.parts.stragglers import Straggler

MAX_WORKERS, MAX_SERVERS, MAX_SLICES, MAX_STEPS = 4096, 512, 65536, 10_000_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job to simulate.

    ``params``: float32 parameters, of the optimizer ``optimizer``. ``compute_s``: seconds that an ordinary worker takes
    for a slice. ``bandwidth``: of the link of every host, bytes per second in each direction. ``slices``: per step;
    in asynchronous mode, the number of slices that count as one step. ``steps``: the number of steps to simulate.
    ``moves``: idle workers take slices of other workers, as in a job with a data set.

    ``chunk_bytes``: 0: chosen by ``link_mbps``, or, if that is 0, by ``bandwidth``.

    ``hosts``: on which workers and servers are dealt out in turn; 0: each has one of its own, but ``servers_per_host``,
    ``workers_per_host``, and with ``with_server`` the last servers are beside the workers. ``transport``, ``placement``
    and ``host_tier``: as configured.
    ``cores``: of each host; 0: enough for all.
    ``threads``, ``worker_threads``: of a server's arithmetic (0: chosen) and of a worker's computing. ``gpu``:
    a GPU computes, not the host's processors. ``backward``: the part of a slice in which the backward pass
    makes one gradient after the other.

    ``replicas``: backups of each shard; ``repair_mbps``: as configured, 0: half of the link. ``lease_s``: of a server.
    ``events``: servers that die, come and leave. Raises ConfigError.
    """

    workers: int
    servers: int
    params: int
    compute_s: float
    bandwidth: float
    consistency: Consistency = field(default_factory=lambda: Consistency(Mode.SYNC))
    slices: int = 0
    stragglers: tuple[Straggler, ...] = ()
    steps: int = 200
    seed: int = 0
    optimizer: str = "sgd"
    chunk_bytes: int = 0
    link_mbps: float = 0.0
    moves: bool = True
    hosts: int = 0
    servers_per_host: int = 1
    workers_per_host: int = 1
    host_tier: str = "auto"
    with_server: bool = False
    transport: str = "auto"
    placement: str = "auto"
    cores: float = 0.0
    threads: int = 0
    worker_threads: int = 1
    gpu: bool = False
    backward: float = 2 / 3
    costs: Costs = field(default_factory=Costs)
    replicas: int = 0
    repair_mbps: float = 0.0
    lease_s: float = 5.0
    events: tuple[ServerEvent, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "slices", self.slices or self.workers)
        for name, value, most in (
            ("workers", self.workers, MAX_WORKERS),
            ("servers", self.servers, MAX_SERVERS),
            ("slices", self.slices, MAX_SLICES),
            ("steps", self.steps, MAX_STEPS),
            ("params", self.params, 10**13),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"--{name} is {value}, but must be an integer from 1 to {most}")
        if not 0 < self.compute_s < math.inf:
            raise ConfigError(f"--compute is {self.compute_s:g} s, but must be a time above 0")
        if not self.bandwidth > 0:
            raise ConfigError(f"--bandwidth is {self.bandwidth:g} bytes per second, but must be above 0")
        if not 0 <= self.hosts <= MAX_WORKERS + MAX_SERVERS:
            raise ConfigError(f"--hosts is {self.hosts}, but must be 0 (one for each process) or a number of machines")
        if not 0 <= self.cores < math.inf:
            raise ConfigError(f"--cores is {self.cores:g}, but must be 0 (enough) or the processors of a host")
        if not 0 <= self.backward <= 1:
            raise ConfigError(f"--backward is {self.backward:g}, but must be from 0 to 1")
        if self.with_server and (self.hosts or self.servers < self.workers):
            raise ConfigError(
                f"--with-server starts one server beside each of {self.workers} workers, and --servers counts them: "
                f"it must be {self.workers} or more, not {self.servers}, and --hosts cannot be given"
            )
        if self.workers_per_host < 1 or (self.workers_per_host > 1 and (self.hosts or self.with_server)):
            raise ConfigError(
                f"--workers-per-host is {self.workers_per_host}, but must be 1 or more. Their servers are on other "
                "machines, so with more than 1 neither --hosts nor --with-server can be given"
            )
        if not 0 <= self.replicas < self.servers:
            raise ConfigError(
                f"--replicas is {self.replicas}, but with --servers {self.servers} a shard has 0 to {self.servers - 1} "
                "backups"
            )
        if len(Holders.plan(self.servers, self.replicas)) > MAX_SHARDS:
            raise ConfigError(f"--servers is {self.servers}, which is too many with --replicas {self.replicas}")
        check(self.events, self.servers, self.replicas)
        self.costs.apply(self.optimizer)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, and of a gradient."""
        return 4 * self.params

    @property
    def alone(self) -> int:
        """Servers that are not beside workers."""
        return self.servers - self.workers * self.with_server

    @property
    def sync(self) -> bool:
        """Whether the job is synchronous."""
        return self.consistency.mode is Mode.SYNC


@dataclass(slots=True)
class Record:
    """The records of a simulation. They have only versions that every server has published."""

    # Of each version: when it was published, the chain of its time, and the worker whose contribution came last.
    published_at: list[float] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    last_worker: list[int] = field(default_factory=list)
    # When each worker began and ended each of its slices, in order.
    spans: list[list[tuple[float, float]]] = field(default_factory=list)
    # Asynchronous mode: updates of other workers between the weights of a slice and its own update.
    behind: Counter[int] = field(default_factory=Counter)
    max_clock_spread: int = 0
    # Servers that died, came and left, and the consequences; contributions that were brought again for that reason.
    happened: list[Happening] = field(default_factory=list)
    again: int = 0
    # Slices that were counted; computed by other workers than their owners; brought a second time.
    applied: int = 0
    moved: int = 0
    repeated: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome without the first steps. Times in seconds; parts between 0 and 1.

    ``step_parts``: seconds per step by part; ``limits``: the share of steps in which a part took longest;
    ``waited_for``: by worker, the share of steps whose last contribution was its own. ``behind``: the shares of
    asynchronous contributions by how many updates of others came in between. ``moved``, ``repeated``: slices computed
    by others than their owners, and brought twice, as parts of all.
    """

    steps_per_s: float
    slices_per_s: float
    waiting: float
    step_parts: dict[Part, float]
    limits: dict[Part, float]
    waited_for: dict[int, float]
    behind: dict[int, float]
    max_clock_spread: int
    moved: float
    repeated: float

    @property
    def limit(self) -> Part:
        """The part that takes the largest share of the time."""
        return max(self.step_parts, key=lambda part: self.step_parts[part])


def shares(counts: Counter[int]) -> dict[int, float]:
    """Counts as parts of the whole, the numbers in order."""
    total = sum(counts.values())
    return {number: counts[number] / total for number in sorted(counts)}


def busy(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """How many seconds of ``[begin, end)`` the spans cover."""
    return sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in spans)
