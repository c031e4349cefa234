"""A shard's part in a cut for readers: stop, apply what other shards have applied, keep that version.

Nothing waits for long. A process that began a cut and has gone silent is not waited for. A missing contribution is
waited for only as long as the coordinator says.
"""

from __future__ import annotations

import asyncio

from paramserver import errors
from paramserver.core.versions.consistency import Mode
from paramserver.core.versions.counted import Runs
from paramserver.core.versions.cuts import lacking
from paramserver.core.versions.events import CutAimed, CutBegun, CutEnded
from paramserver.server.running import RunningShard

# Seconds between the two messages of the coordinator: one asks what is counted, the other says what to apply.
_PAUSED_S = 2.0
# From the cut to the first message of a reader that was told of it.
_KEPT_S = 10.0


async def pause(shard: RunningShard, number: int) -> None:
    """Apply nothing more from now on; returns when nothing is in the making.

    Raises StaleViewError if the job is synchronous by now.
    """
    if shard.state.consistency.mode is not Mode.ASYNC:
        raise errors.StaleViewError("the job is synchronous now: versions of one number are the same on all servers")
    shard.happen(CutBegun(number))
    try:
        while shard.making:
            await shard.moved()
    except BaseException:
        shard.happen(CutEnded(number))
        raise
    asyncio.get_running_loop().call_later(_PAUSED_S, _give_up, shard, number)


async def reach(shard: RunningShard, number: int, target: Runs, wait_s: float) -> str:
    """Apply the contributions of ``target`` that this shard lacks, keep the version, and go on; empty, or the reason.

    ``wait_s``: seconds without any of the contributions that it lacks, after which the cut is given up.
    """
    state = shard.state
    if state.cut.number != number or state.cut.only is None:
        return "the cut was given up meanwhile"
    missing = lacking(target, state.counted())
    if missing is None:
        shard.happen(CutEnded(number))
        return "the shards are too far apart"
    shard.happen(CutAimed(number, missing))
    while state.cut.number == number and state.cut.kept is None:
        before, moved = state.version, shard.moved()
        try:
            async with asyncio.timeout(wait_s):
                await moved
        except TimeoutError:
            if state.version == before and not shard.making:
                break
    if state.cut.number == number and state.cut.kept is not None:
        asyncio.get_running_loop().call_later(_KEPT_S, shard.happen, CutEnded(number))
        return ""
    left = min(state.cut.only) if state.cut.number == number and state.cut.only else None
    shard.happen(CutEnded(number))
    return f"{left} has not come" if left else "the cut was given up meanwhile"


def _give_up(shard: RunningShard, number: int) -> None:
    """The second message has not come."""
    if shard.state.cut.number == number and shard.state.cut.only == set():
        shard.happen(CutEnded(number))
