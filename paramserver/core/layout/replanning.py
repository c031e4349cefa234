"""Another number of servers: numbers of plans, and which chunks a shard of a new plan gets from which former shard.

A job begins with plan 0. Each change of the number of servers has a plan with a number of its own, also if the change
is given up. So a server process can hold shards of two plans at once, each at its own address.
"""

from __future__ import annotations

from paramserver.core.layout.plan import MAX_SHARDS, Plan


def shard_number(plan: int, shard: int) -> int:
    """The number of a shard in addresses: unique among the shards of all plans of a job."""
    assert 0 <= shard < MAX_SHARDS, f"there is no shard {shard}"
    return plan * MAX_SHARDS + shard


def plan_number(number: int) -> int:
    """The number of the plan to which the shard with this number in addresses belongs."""
    return number // MAX_SHARDS


def sources(former: Plan, plan: Plan, shard: int) -> dict[int, tuple[int, ...]]:
    """The chunks of ``shard`` of the new ``plan``, by the former shard that has them. Both plans have one layout."""
    assert former.layout.digest == plan.layout.digest, "a layout never changes"
    found: dict[int, list[int]] = {}
    for chunk in plan.chunks_of(shard):
        found.setdefault(former.owner[chunk.index], []).append(chunk.index)
    return {source: tuple(chunks) for source, chunks in sorted(found.items())}
