"""The best number of servers for a job, found by simulations with several numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paramserver.simulate.cluster import blocks, simulate
from paramserver.simulate.scenario import MAX_SERVERS, Outcome, Scenario

# Within this part of the best is good enough.
_NEAR = 0.05
# Steps of each, so that all take some seconds.
_STEPS, _FEWEST, _BLOCKS = 60, 8, 40_000


@dataclass(frozen=True, slots=True)
class Servers:
    """Numbers of servers: on hosts of their own, and beside workers (none, or one for each worker)."""

    alone: int
    beside: int = 0


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Outcomes by servers, and the fewest of these with which a job is within 5 % of the best."""

    outcomes: dict[Servers, Outcome]
    enough: Servers


def numbers(workers: int) -> list[int]:
    """The numbers of servers to try, up to one per worker: further servers help no link."""
    steps = [1, 2, 3, 4, 6]
    while steps[-1] < workers:
        steps.append(steps[-2] * 2)
    tried = [number for number in steps if number < workers]
    return [*tried, min(workers, MAX_SERVERS)]


def suggest(scenario: Scenario, replicas: int = 0) -> Suggestion:
    """Simulate the job with several numbers of servers; between hosts also with servers beside workers.

    Among the numbers that are fast enough, the number with the fewest machines is best. Servers beside workers count as
    one machine. ``replicas``: the backups of each shard, or the number of other servers if that is less.
    """
    alone = numbers(scenario.workers)
    tried = [Servers(number) for number in alone]
    apart = not scenario.hosts and scenario.workers_per_host == 1
    if apart and 1 < scenario.workers <= MAX_SERVERS // 2:
        tried += [Servers(number, scenario.workers) for number in [0, *alone] if number <= scenario.workers / 2]
    outcomes = {one: simulate(_with(scenario, one, replicas))[0] for one in tried}
    best = max(outcome.steps_per_s for outcome in outcomes.values())
    good = [one for one, outcome in outcomes.items() if outcome.steps_per_s >= (1 - _NEAR) * best]
    return Suggestion(outcomes, min(good, key=lambda one: (one.alone + (one.beside > 0), one.beside)))


def _with(scenario: Scenario, servers: Servers, replicas: int) -> Scenario:
    tried = replace(
        scenario,
        servers=servers.alone + servers.beside,
        with_server=servers.beside > 0,
        placement="auto" if servers.beside else "balanced",
        replicas=min(replicas, servers.alone + servers.beside - 1),
        events=(),
    )
    return replace(tried, steps=min(scenario.steps, max(_FEWEST, min(_STEPS, _BLOCKS // blocks(tried)))))
