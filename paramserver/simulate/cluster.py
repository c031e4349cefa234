"""Put a cluster together, let it run, and sum up what was seen."""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean

from paramserver.core.leases import SliceLeases
from paramserver.core.plan import TensorSpec, make_layout, make_plan
from paramserver.simulate.asynchronous import AsyncWorker
from paramserver.simulate.blame import NOTHING, Chain, Part, between, largest
from paramserver.simulate.clock import VirtualClock, start
from paramserver.simulate.formulas import dedicated
from paramserver.simulate.links import Queue, SendingPort
from paramserver.simulate.member import Member
from paramserver.simulate.scenario import Outcome, Record, Scenario, busy, shares
from paramserver.simulate.server import Host, Server
from paramserver.simulate.stragglers import draws
from paramserver.simulate.synchronous import SyncWorker

# A worker's messages of one step are cut into so many blocks in all, at least one per server; only where links take
# more than this part of the time of a slice, since it is the blocks that take time to simulate.
_BLOCKS, _WORTH_IT = 64, 0.02
# This part of the steps, at the beginning, is left aside.
_WARM_UP = 0.05


def simulate(scenario: Scenario) -> tuple[Outcome, Record]:
    """Simulate a job up to its last step; what came out, and the records of single steps."""
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

    idents = range(1, scenario.workers + 1)
    plan = make_plan(
        make_layout([TensorSpec("weights", (scenario.params,), "float32")], scenario.chunk_bytes), scenario.servers
    )
    costs, blocks = scenario.costs, _blocks(scenario)
    servers = [
        Server(
            clock,
            index,
            scenario.consistency,
            idents,
            Host(SendingPort(clock, min(scenario.bandwidth, costs.pull_bytes_s)), Queue(), scenario.bandwidth),
            costs,
            costs.apply(scenario.optimizer),
            plan.nbytes_of(index),
            blocks,
            on_built,
        )
        for index in range(scenario.servers)
    ]
    members = [
        Member(
            clock,
            rank,
            servers,
            Host(SendingPort(clock, min(scenario.bandwidth, costs.push_bytes_s)), Queue(), scenario.bandwidth),
            scenario.compute_s,
            draws(scenario.stragglers, rank, scenario.workers, scenario.seed),
            costs.call_s,
        )
        for rank in range(scenario.workers)
    ]
    leases = SliceLeases(0)
    synchronous = [SyncWorker(member, scenario.workers, scenario.slices, scenario.moves) for member in members]
    asynchronous = [AsyncWorker(member, leases, scenario.workers) for member in members]
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


def _blocks(scenario: Scenario) -> int:
    """Into how many parts a message is cut."""
    rate = min(scenario.bandwidth, scenario.costs.push_bytes_s, scenario.costs.pull_bytes_s)
    sending_s = dedicated(scenario.workers, scenario.servers, scenario.nbytes, rate, overlapped=False)
    return math.ceil(_BLOCKS / scenario.servers) if sending_s > _WORTH_IT * scenario.compute_s else 1


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
