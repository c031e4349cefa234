"""A job's communication by formula, beside the communication of other schemes; when another scheme is faster."""

from __future__ import annotations

from paramserver.simulate import formulas
from paramserver.simulate.scenario import Scenario
from paramserver.simulate.units import milliseconds

# A difference that is smaller than this part does not count.
_WORTH_IT = 0.05


def by_formula(scenario: Scenario) -> dict[str, float]:
    """Seconds per step of communication alone, by scheme, for the given number of servers.

    Empty if workers share a host: the formulas are for workers that have a link each.
    """
    if scenario.workers_per_host > 1:
        return {}
    n, alone, size, bandwidth = scenario.workers, scenario.alone, scenario.nbytes, scenario.bandwidth
    many = f"{alone} server{'s' if alone != 1 else ''}"
    found = {}
    if alone:
        copies = f", {backups(scenario)}" if scenario.replicas else ""
        for how, overlapped in (("gradients then weights", False), ("both at once", True)):
            found[f"{many}{copies}, {how}"] = formulas.dedicated(
                n, alone, size, bandwidth, overlapped=overlapped, replicas=scenario.replicas
            )
    if n > 1:
        found["ring all-reduce"] = formulas.all_reduce(n, size, bandwidth)
        if alone <= n:
            found[f"{many} and shards at the workers (BytePS)"] = formulas.byteps_split(n, alone, size, bandwidth)
    return found


def backups(scenario: Scenario) -> str:
    """How many copies of each shard there are, in words."""
    return f"{scenario.replicas} backup{'s' if scenario.replicas > 1 else ''} of each shard"


def advice(scenario: Scenario) -> str | None:
    """A sentence if the formulas say that a synchronous step takes less time with all-reduce than with these servers.

    The formulas are for equal machines that have one process each. So there is no sentence for jobs with stragglers,
    for asynchronous jobs, and if processes share a machine. Servers beside workers are no slower than all-reduce.
    """
    together = scenario.servers_per_host > 1 or scenario.workers_per_host > 1
    alike = not (scenario.stragglers or scenario.hosts or scenario.with_server or together)
    n, size, bandwidth, replicas = scenario.workers, scenario.nbytes, scenario.bandwidth, scenario.replicas
    if not (scenario.sync and alike and n > 1):
        return None
    compute_s = scenario.compute_s * -(-scenario.slices // n)
    ours = formulas.dedicated(n, scenario.servers, size, bandwidth, overlapped=True, replicas=replicas)
    step, ring = max(ours, compute_s), max(formulas.all_reduce(n, size, bandwidth), compute_s)
    if step <= (1 + _WORTH_IT) * ring:
        return None
    enough = formulas.enough_servers(n, size, bandwidth, ring, replicas=replicas)
    return (
        f"Use all-reduce or FSDP, or {enough} servers: by formula a step takes {milliseconds(step)} or more with "
        f"{scenario.servers} server{'s' if scenario.servers > 1 else ''}, and {milliseconds(ring)} with all-reduce."
    )
