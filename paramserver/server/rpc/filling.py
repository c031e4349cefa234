"""Makes the last step of a job without a data set: slices that will never come count as empty."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from paramserver import errors
from paramserver.core.versions.names import SyncName
from paramserver.core.versions.reduction import cover
from paramserver.server.running import RunningShard
from paramserver.v1 import shard_pb2


async def fill(shard: RunningShard, version: int, missing: Sequence[tuple[int, int]], of: int) -> bool:
    """Make the open step of the slices that came: the ``missing`` ones of ``of`` count as empty. Idempotent.

    False if this is not the open step, or nothing of it has come. Raises ProtocolError for impossible slices.
    """
    if not shard.can_cut(version):
        return False
    opened = (one for one in shard.buffers.values() if isinstance(one.name, SyncName) and one.name.step == version)
    like = next(opened, None)
    if like is None:
        return False
    if not all(0 <= lo < hi <= of for lo, hi in missing):
        raise errors.ProtocolError(f"slices {list(missing)} lie outside of a step of {of}")
    header = shard_pb2.PushHeader(timeline=shard.state.timeline, nonce=secrets.randbits(63) | 1)
    for lo, hi in (node for gap in missing for node in cover(*gap, of)):
        name = SyncName(version, lo, hi, of)
        empty = replace(
            like, name=name, worker=0, samples=0, overflow=False, used=frozenset(), chunks={}, checked=False
        )
        await shard.push(empty, header, filler=True)
    return True
