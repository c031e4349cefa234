"""How many servers a job should have: it is simulated with several numbers of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paramserver.simulate import formulas
from paramserver.simulate.cluster import simulate
from paramserver.simulate.scenario import MAX_SERVERS, Outcome, Scenario

# Within this part of the best is good enough.
_NEAR = 0.05
_STEPS = 60


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Outcomes by number of servers, and the smallest number that is within 5 % of the best."""

    outcomes: dict[int, Outcome]
    servers: int


def numbers(workers: int) -> list[int]:
    """The numbers of servers to try, up to one per worker: more help no link."""
    steps = [1, 2, 3, 4, 6]
    while steps[-1] < workers:
        steps.append(steps[-2] * 2)
    tried = [number for number in steps if number < workers]
    return [*tried, min(workers, MAX_SERVERS)]


def suggest(scenario: Scenario) -> Suggestion:
    """Simulate the job with several numbers of servers."""
    outcomes = {}
    for servers in numbers(scenario.workers):
        tried = replace(scenario, servers=servers, steps=min(scenario.steps, _STEPS))
        outcomes[servers] = simulate(tried)[0]
    best = max(outcome.steps_per_s for outcome in outcomes.values())
    enough = next(k for k, outcome in outcomes.items() if outcome.steps_per_s >= (1 - _NEAR) * best)
    return Suggestion(outcomes, enough)


def by_formula(scenario: Scenario) -> dict[str, float]:
    """Seconds of communication per step without anything else, by scheme, for the given number of servers."""
    n, servers, size, bandwidth = scenario.workers, scenario.servers, scenario.nbytes, scenario.bandwidth
    many = f"{servers} server{'s' if servers > 1 else ''}"
    found = {
        f"{many}, gradients then weights": formulas.dedicated(n, servers, size, bandwidth, overlapped=False),
        f"{many}, both at once": formulas.dedicated(n, servers, size, bandwidth, overlapped=True),
    }
    if n > 1:
        found["ring all-reduce"] = formulas.all_reduce(n, size, bandwidth)
        if servers <= n:
            found[f"{many} and shards at the workers (BytePS)"] = formulas.byteps_split(n, servers, size, bandwidth)
    return found
