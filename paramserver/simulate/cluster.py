"""Put a cluster together, let it run, and sum up its records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from paramserver.core.layout.thresholds import EARLY_PUSH_BYTES
from paramserver.core.work.leases import SliceLeases
from paramserver.errors import ConfigError
from paramserver.simulate.costs import STATE
from paramserver.simulate.formulas import dedicated
from paramserver.simulate.machinery.blame import NOTHING, Part, between, largest
from paramserver.simulate.machinery.clock import VirtualClock, start
from paramserver.simulate.machinery.cores import Cores
from paramserver.simulate.parts.asynchronous import AsyncWorker
from paramserver.simulate.parts.host_tier import HostTier
from paramserver.simulate.parts.hosts import Host, Network, Program
from paramserver.simulate.parts.member import Member
from paramserver.simulate.parts.pieces import pieces_of
from paramserver.simulate.parts.seats import Seating, seating, shares_memory, shares_pulls
from paramserver.simulate.parts.stragglers import draws
from paramserver.simulate.parts.synchronous import SyncWorker
from paramserver.simulate.scenario import Outcome, Record, Scenario, busy, shares
from paramserver.simulate.servers.placement import Means, Placement
from paramserver.simulate.servers.rules import Published, Rules
from paramserver.simulate.servers.shard import Shard

# The largest numbers of pieces: of the model, and of all workers' pushes in a step. A simulation takes longer with more
# pieces. There are fewer pieces only if links take more than this part of the time of a slice.
_MOST, _FEWEST, _IN_ALL, _WORTH_IT = 256, 16, 8192, 0.02
# This part of the steps, at the beginning, does not count.
_WARM_UP = 0.05


def simulate(scenario: Scenario) -> tuple[Outcome, Record]:
    """Simulate a job up to its last step; the outcome, and the records of single steps."""
    clock, record, seats = VirtualClock(), Record(), seating(scenario)
    versions = scenario.steps if scenario.sync else scenario.steps * scenario.slices
    # Between hosts, large models go over the network to all servers, so that gradients leave during the backward pass.
    apart = len({*seats.workers, *seats.servers}) > 1 and scenario.nbytes >= EARLY_PUSH_BYTES
    shared = shares_memory(scenario) and not apart
    hosts = {
        name: Host(clock, scenario.bandwidth, Cores(clock, scenario.cores or math.inf))
        for name in dict.fromkeys([*seats.workers, *seats.servers])
    }
    placement = _servers(scenario, seats, hosts, shared, clock, record)
    members = placement.followers = _workers(scenario, seats, hosts, shared, clock, placement)
    early = not shared and scenario.moves and scenario.backward > 0 and scenario.nbytes >= EARLY_PUSH_BYTES
    leases = SliceLeases(0)
    tiers = _tiers(scenario, members) if shares_pulls(scenario) else {}
    synchronous = [
        SyncWorker(member, scenario.workers, scenario.slices, scenario.moves, early, tiers.get(member.program.host))
        for member in members
    ]
    asynchronous = [AsyncWorker(member, leases, scenario.workers, early) for member in members]
    for worker in synchronous if scenario.sync else asynchronous:
        start(worker.run())
    clock.run(lambda: len(record.published_at) >= versions)
    if (last := max((event.at_s for event in scenario.events), default=0.0)) > clock.now:
        raise ConfigError(f"the job is over after {clock.now:.4g} s, before an event at {last:g} s: give more --steps")
    record.spans = [member.spans for member in members]
    record.happened = placement.happened
    record.again = sum(member.again for member in members)
    first = placement.primaries[0].state
    record.max_clock_spread = first.pulls.max_spread
    record.applied = first.counters.applied
    record.moved = sum(worker.moved for worker in synchronous)
    record.repeated = first.counters.duplicate
    return summed_up(scenario, record), record


def _servers(
    scenario: Scenario, seats: Seating, hosts: Mapping[str, Host], shared: bool, clock: VirtualClock, record: Record
) -> Placement:
    """The servers with their shards. ``shared``: weights and gradients go through the memory of a host."""
    costs = scenario.costs
    rules = Rules(
        clock,
        Network(clock, costs, scenario.seed),
        costs,
        scenario.consistency,
        range(1, scenario.workers + 1),
        costs.apply(scenario.optimizer),
        _Publishing(clock, record, seats.plan.shards, scenario.sync),
        STATE[scenario.optimizer],
    )
    cut = pieces_of(seats.plan, _most_pieces(scenario))
    means = Means(
        clock,
        lambda server: Program(hosts[seats.servers[server]], Part.SERVER_LINK, shared, costs.faster(seats.threads)),
        lambda index, program, backup: Shard(rules, index, program, cut[index], backup),
        _repair_mbps(scenario),
        costs.call_s,
        scenario.lease_s,
    )
    placement = Placement(scenario.servers, scenario.replicas, means)
    placement.plan(scenario.events)
    return placement


def _workers(
    scenario: Scenario,
    seats: Seating,
    hosts: Mapping[str, Host],
    shared: bool,
    clock: VirtualClock,
    placement: Placement,
) -> list[Member]:
    """The workers, as members of the job. ``shared``: as above."""
    costs, tiered = scenario.costs, shares_pulls(scenario)
    begins = not shared and not scenario.gpu and scenario.backward > 0
    return [
        Member(
            clock,
            rank,
            placement.primaries,
            Program(hosts[place], Part.WORKER_LINK, shared),
            scenario.compute_s,
            draws(scenario.stragglers, rank, scenario.workers, scenario.seed),
            costs.call_s,
            costs.hand_ns * 1e-9 * scenario.params,
            0.0 if scenario.gpu else scenario.worker_threads,
            scenario.backward,
            begins=begins and not (tiered and seats.workers.count(place) > 1),
        )
        for rank, place in enumerate(seats.workers)
    ]


def _tiers(scenario: Scenario, members: Sequence[Member]) -> dict[Host, HostTier]:
    """By host with several workers, its one push and pull."""
    tiers, costs = {}, scenario.costs
    for host in dict.fromkeys(member.program.host for member in members):
        own = [member for member in members if member.program.host is host]
        if len(own) > 1:
            tiers[host] = HostTier(own[0].clock, own[0], len(own), costs, costs.sum_ns * 1e-9 * scenario.params)
    return tiers


class _Publishing:
    """Counts a version when all shards have published it."""

    def __init__(self, clock: VirtualClock, record: Record, shards: int, sync: bool) -> None:
        self._clock, self._record, self._sync = clock, record, sync
        # By shard, its newest version; by version, how many shards have published it.
        self._newest, self._made = [0] * shards, Counter[int]()

    def __call__(self, one: Published) -> None:
        """A new primary publishes its newest version again, which the former primary may have published."""
        for version in range(self._newest[one.shard] + 1, one.version + 1):
            self._newest[one.shard] = version
            self._made[version] += 1
            if not self._sync and not one.shard:
                self._record.behind[one.behind] += 1
            if self._made[version] == len(self._newest):
                del self._made[version]
                self._record.published_at.append(self._clock.now)
                self._record.chains.append(one.chain)
                self._record.last_worker.append(one.worker - 1)


def _repair_mbps(scenario: Scenario) -> float:
    """Megabits per second for a new backup: half of the link, as for coordinators."""
    return scenario.repair_mbps or (scenario.link_mbps or 8e-6 * scenario.bandwidth) / 2


def blocks(scenario: Scenario) -> int:
    """About how many pieces all workers push in a step; the time of a simulation grows with this number."""
    return scenario.workers * (1 if scenario.hosts == 1 else _most_pieces(scenario))


def _most_pieces(scenario: Scenario) -> int:
    """Into how many pieces the model is cut."""
    rate = min(scenario.bandwidth, scenario.costs.push_bytes_s, scenario.costs.pull_bytes_s)
    sending_s = dedicated(scenario.workers, scenario.servers, scenario.nbytes, rate, overlapped=False)
    if sending_s <= _WORTH_IT * scenario.compute_s:
        return 1
    return max(_FEWEST, min(_MOST, _IN_ALL // scenario.workers))


def summed_up(scenario: Scenario, record: Record) -> Outcome:
    """Rates and parts, without the first steps."""
    per_step = 1 if scenario.sync else scenario.slices
    skipped = int(_WARM_UP * scenario.steps) * per_step
    times, chains = [0.0, *record.published_at], [NOTHING, *record.chains]
    begin, end = times[skipped], times[-1]
    steps = (len(times) - 1 - skipped) / per_step
    spent = between(chains[skipped], chains[-1])
    of_steps = [between(a, b) for a, b in zip(chains[skipped:], chains[skipped + 1 :], strict=False)]
    limits = Counter(int(largest(one)) for one in of_steps)
    computed = [busy(spans, begin, end) for spans in record.spans]
    rate = steps / (end - begin)
    return Outcome(
        steps_per_s=rate,
        slices_per_s=rate * scenario.slices,
        waiting=1.0 - fmean(computed) / (end - begin),
        step_parts={part: max(0.0, spent[part]) / steps for part in Part},
        limits={Part(part): share for part, share in shares(limits).items()},
        waited_for=shares(Counter(record.last_worker[skipped:])),
        behind=shares(record.behind),
        max_clock_spread=record.max_clock_spread,
        moved=record.moved / record.applied,
        repeated=record.repeated / record.applied,
    )
