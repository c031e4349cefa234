"""The contributions that a server keeps."""

from __future__ import annotations

from paramserver.server.service import ShardService


def buffered(service: ShardService) -> int:
    """How many contributions are kept because they are in no version yet."""
    return len(service.host.shard.buffers) if service.host.shard is not None else 0
