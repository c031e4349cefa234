"""Put a cluster together, let it run, and sum up its records."""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean

from paramserver.core.layout.thresholds import EARLY_PUSH_BYTES
from paramserver.core.work.leases import SliceLeases
from paramserver.simulate.formulas import dedicated
from paramserver.simulate.machinery.blame import NOTHING, Chain, Part, between, largest
from paramserver.simulate.machinery.clock import VirtualClock, start
from paramserver.simulate.machinery.cores import Cores
from paramserver.simulate.parts.asynchronous import AsyncWorker
from paramserver.simulate.parts.hosts import Host, Network, Program
from paramserver.simulate.parts.member import Member
from paramserver.simulate.parts.pieces import pieces_of
from paramserver.simulate.parts.seats import seating, shares_memory
from paramserver.simulate.parts.server import Server
from paramserver.simulate.parts.stragglers import draws
from paramserver.simulate.parts.synchronous import SyncWorker
from paramserver.simulate.scenario import Outcome, Record, Scenario, busy, shares

# The model is cut into so many pieces at most, and all workers send so many in a step, since it is these that take time
# to simulate; they are fewer only where links take more than this part of the time of a slice.
_MOST, _FEWEST, _IN_ALL, _WORTH_IT = 256, 16, 8192, 0.02
# This part of the steps, at the beginning, is left aside.
_WARM_UP = 0.05


def simulate(scenario: Scenario) -> tuple[Outcome, Record]:
    """Simulate a job up to its last step; the outcome, and the records of single steps."""
    clock = VirtualClock()
    record = Record()
    made: dict[int, int] = {}
    versions = scenario.steps if scenario.sync else scenario.steps * scenario.slices

    def on_built(server: int, version: int, chain: Chain, worker: int) -> None:
        made[version] = made.get(version, 0) + 1
        if made[version] == scenario.servers:  # the others have it already
            del made[version]
            record.published_at.append(clock.now)
            record.chains.append(chain)
            record.last_worker.append(worker - 1)

    costs, seats = scenario.costs, seating(scenario)
    # Between hosts large models go over the network everywhere, so that gradients leave during the backward pass.
    apart = len({*seats.workers, *seats.servers}) > 1 and scenario.nbytes >= EARLY_PUSH_BYTES
    shared = shares_memory(scenario) and not apart
    network = Network(clock, costs, scenario.seed)
    count = scenario.cores or math.inf
    hosts = {
        name: Host(clock, scenario.bandwidth, Cores(clock, count))
        for name in dict.fromkeys([*seats.workers, *seats.servers])
    }
    cut = pieces_of(seats.plan, _most_pieces(scenario))
    servers = [
        Server(
            clock,
            index,
            scenario.consistency,
            range(1, scenario.workers + 1),
            Program(hosts[seats.servers[index]], Part.SERVER_LINK, shared),
            network,
            costs,
            costs.apply(scenario.optimizer),
            cut[index],
            on_built,
            seats.threads,
        )
        for index in range(scenario.servers)
    ]
    begins = not shared and not scenario.gpu and scenario.backward > 0
    members = [
        Member(
            clock,
            rank,
            servers,
            Program(hosts[seats.workers[rank]], Part.WORKER_LINK, shared),
            scenario.compute_s,
            draws(scenario.stragglers, rank, scenario.workers, scenario.seed),
            costs.call_s,
            costs.hand_ns * 1e-9 * scenario.params,
            0.0 if scenario.gpu else scenario.worker_threads,
            scenario.backward,
            begins=begins,
        )
        for rank in range(scenario.workers)
    ]
    early = not shared and scenario.moves and scenario.backward > 0 and scenario.nbytes >= EARLY_PUSH_BYTES
    leases = SliceLeases(0)
    synchronous = [SyncWorker(member, scenario.workers, scenario.slices, scenario.moves, early) for member in members]
    asynchronous = [AsyncWorker(member, leases, scenario.workers, early) for member in members]
    for worker in synchronous if scenario.sync else asynchronous:
        start(worker.run())
    clock.run(lambda: len(record.published_at) >= versions)
    record.spans = [member.spans for member in members]
    first = servers[0]
    record.behind = Counter(first.behind)
    record.max_clock_spread = first.state.counters.max_clock_spread
    record.applied = first.state.counters.applied
    record.moved = sum(worker.moved for worker in synchronous)
    record.repeated = first.state.counters.duplicate
    return summed_up(scenario, record), record


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
