"""The servers of each shard as values, and the choice of servers by what each of them holds: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backup:
    """A server with a copy of a shard. ``since``: the number of the placement with which it began to catch up.

    ``whole``: it has all of the shard, so that it can become the primary.
    """

    server: int
    since: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """The servers of one shard, by their indices. ``lost``: its primary is gone, and no backup could take its place."""

    primary: int
    backups: tuple[Backup, ...] = ()
    lost: bool = False

    def backup(self, server: int) -> Backup | None:
        """This server as a backup; None if it is none."""
        return next((one for one in self.backups if one.server == server), None)


def primaries(shards: Sequence[Held]) -> Counter[int]:
    """Of how many shards each server is the primary."""
    return Counter(held.primary for held in shards)


def copies(shards: Sequence[Held]) -> Counter[int]:
    """How many shards each server holds, as primary or backup."""
    count = primaries(shards)
    for held in shards:
        count.update(one.server for one in held.backups)
    return count


def even(shards: Sequence[Held], present: Collection[int]) -> bool:
    """Whether the servers that are there are primaries of about as many shards, and hold about as many."""
    return all(
        max(count[server] for server in present) - min(count[server] for server in present) < 2
        for count in (primaries(shards), copies(shards))
    )


def successor(shards: Sequence[Held], shard: int, present: Collection[int]) -> int | None:
    """The backup that is to become the primary: one that is there and has all of the shard. None if there is none."""
    able = [one.server for one in shards[shard].backups if one.whole and one.server in present]
    loads = primaries(shards)
    return min(able, key=lambda server: (loads[server], server), default=None)


def newcomer(
    shards: Sequence[Held], shard: int, present: Collection[int], retiring: Collection[int] = ()
) -> int | None:
    """The server that is to become another backup of the shard: one with few shards, and not always the same one."""
    held = shards[shard]
    able = [s for s in present if s not in {held.primary, *retiring} and held.backup(s) is None]
    loads = copies(shards)
    # Backups of the shards that have the same primary.
    together = Counter(one.server for other in shards if other.primary == held.primary for one in other.backups)
    return min(able, key=lambda s: (together[s], loads[s], (s - held.primary) % (max(present) + 1)), default=None)


def relief(shards: Sequence[Held], present: Collection[int]) -> tuple[int, int] | None:
    """(shard, server): a copy that the server with the fewest is to take from a backup with many; None: no need."""
    count = copies(shards)
    light = min(present, key=lambda server: (count[server], server))
    heavy = [server for server in present if count[server] - count[light] >= 2]
    for shard, held in enumerate(shards):
        elsewhere = held.primary != light and held.backup(light) is None
        if elsewhere and any(one.server in heavy for one in held.backups):
            return shard, light
    return None
