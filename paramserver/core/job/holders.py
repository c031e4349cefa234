"""Which server holds which shard of the model. A shard is a part of the model; a server is a process.

The *primary* of a shard is the server that counts contributions to it and answers pulls.
"""

from __future__ import annotations

from collections.abc import Sequence

from paramserver.core.job.membership import Member


class Holders:
    """``primaries``: by shard, the index of the server that is its primary."""

    def __init__(self, primaries: Sequence[int]) -> None:
        self.primaries = tuple(primaries)

    @classmethod
    def one_each(cls, servers: int) -> Holders:
        """As many shards as servers: shard *i* is on server *i*."""
        return cls(range(servers))

    def __len__(self) -> int:
        """The number of shards."""
        return len(self.primaries)

    def shards_of(self, server: int) -> list[int]:
        """The shards of which this server is the primary, in rising order."""
        return [shard for shard, primary in enumerate(self.primaries) if primary == server]

    def places(self, server: Member) -> list[tuple[int, Member]]:
        """The shards of which this server is the primary, each with the server: where commands to them go."""
        return [(shard, server) for shard in self.shards_of(server.index)]
