"""The host of each process, and the share of the model of each server, chosen as by a coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from paramserver.core.job.holders import Holders
from paramserver.core.layout.placement import Seat, choose
from paramserver.core.layout.plan import Layout, Plan, TensorSpec, link_chunk_bytes, make_layout, make_plan
from paramserver.core.layout.thresholds import REST_BYTES, server_threads
from paramserver.errors import ConfigError
from paramserver.simulate.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Seating:
    """By worker and by server, the name of its host; the chunks of each shard, and a server's number of threads."""

    workers: list[str]
    servers: list[str]
    plan: Plan
    threads: int


def seating(scenario: Scenario) -> Seating:
    """Raises ConfigError if the servers do not allow the wanted placement."""
    seats = _servers(scenario)
    layout = _layout(scenario)
    try:
        by_server = choose(scenario.placement, lambda: layout, seats, scenario.workers)
    except ValueError as error:
        raise ConfigError(f'--placement is "{scenario.placement}", but {error}') from error
    primaries = Holders.plan(scenario.servers, scenario.replicas).primaries
    shares = [by_server[primary] for primary in primaries] if by_server else []
    plan = make_plan(layout, len(primaries), shares)
    return Seating(_workers(scenario), [seat.host for seat in seats], plan, _threads(scenario, seats))


def shares_memory(scenario: Scenario) -> bool:
    """Whether processes on one host share memory. Raises ConfigError if they should but cannot."""
    if scenario.transport == "shm" and scenario.hosts != 1:
        raise ConfigError('--transport is "shm", but workers and servers are on several hosts: add --hosts 1')
    return scenario.transport != "grpc"


def shares_pulls(scenario: Scenario) -> bool:
    """Whether the workers of a host push and pull once, as `worker.host.tier` and the settings say."""
    return (
        scenario.sync
        and scenario.host_tier == "auto"
        and scenario.transport in ("auto", "bulk")
        and min(scenario.workers, scenario.workers_per_host) > 1
        and scenario.nbytes >= REST_BYTES
    )


def _workers(scenario: Scenario) -> list[str]:
    if scenario.hosts:
        return [f"h{rank % scenario.hosts}" for rank in range(scenario.workers)]
    return [f"w{rank // scenario.workers_per_host}" for rank in range(scenario.workers)]


def _servers(scenario: Scenario) -> list[Seat]:
    if scenario.hosts:
        return [Seat(f"h{index % scenario.hosts}") for index in range(scenario.servers)]
    alone = scenario.alone
    seats = [Seat(f"s{index // scenario.servers_per_host}") for index in range(alone)]
    return seats + [Seat(f"w{rank}", beside_worker=True) for rank in range(scenario.servers - alone)]


def _layout(scenario: Scenario) -> Layout:
    chunk_bytes = scenario.chunk_bytes
    if not chunk_bytes and scenario.hosts != 1:
        megabits_per_s = min(scenario.link_mbps or 8e-6 * scenario.bandwidth, 1e9)
        chunk_bytes = link_chunk_bytes(scenario.nbytes, megabits_per_s)
    return make_layout([TensorSpec("weights", (scenario.params,), "float32")], chunk_bytes)


def _threads(scenario: Scenario, seats: list[Seat]) -> int:
    """One if the number of processors is not known."""
    if scenario.threads or not scenario.cores:
        return scenario.threads or 1
    together = max(sum(seat.host == other.host for other in seats) for seat in seats)
    return server_threads(scenario.cores, together)
