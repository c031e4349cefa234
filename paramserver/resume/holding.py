"""The place of the checkpoints is claimed for a job that is led here, or for a job that `run` launches."""

from __future__ import annotations

import asyncio

import structlog

from paramserver import errors
from paramserver.checkpoint import owner
from paramserver.checkpoint.owner import Holding, Wish
from paramserver.checkpoint.place import Place
from paramserver.config import Settings
from paramserver.resume.checkpointing import begins, choices, place_of
from paramserver.resume.claiming import Claim, claim
from paramserver.resume.options import Options
from paramserver.v1 import coordinator_pb2

log = structlog.get_logger("paramserver.checkpoint")

# A job that trains does not wait longer for its place.
_CLAIM_S = 5.0


async def hold(
    settings: Settings, options: Options, address: str, record: coordinator_pb2.JobRecord | None, stood_by: bool
) -> Holding | None:
    """The hold of a coordinator at ``address`` that leads; None if there are no checkpoints.

    ``record``: of the job that it takes over: that job goes on also if the place cannot be had now. ``stood_by``: it
    waited for the end of another coordinator. Raises ConfigError if the place belongs to another job.
    """
    if record is not None:
        return await _hold_again(settings, options, address, tuple(record.histories))
    fresh = options.fresh and not stood_by
    place = await asyncio.to_thread(place_of, settings, fresh)
    if place is None:
        return None
    if options.histories:
        return Holding(place, options.histories, private=options.private)
    wish = begins(settings, fresh, options.resume or stood_by)
    return await claim(place, Claim(settings.cluster.job, wish, address, (), choices("start coordinator", place)))


async def _hold_again(settings: Settings, options: Options, address: str, histories: tuple[str, ...]) -> Holding | None:
    """The hold of a job that is taken over. The place is not made again: it may be a volume that comes back."""
    if not settings.checkpoint.place:
        return None
    place = Place(settings.checkpoint.place)
    if options.histories:
        return Holding(place, options.histories, private=options.private)
    wanted = Claim(settings.cluster.job, Wish.TAKE_OVER, address, histories, choices("start coordinator", place))
    try:
        async with asyncio.timeout(_CLAIM_S):
            return await claim(place, wanted)
    except (errors.ParamServerError, TimeoutError) as error:
        if not histories:
            raise
        log.warning("the job goes on without its place of checkpoints", place=str(place), reason=str(error) or "slow")
        return Holding(place, histories, later=lambda: claim(place, wanted))


async def hold_for_run(settings: Settings, fresh: bool, private: bool) -> Holding:
    """The hold of a launcher. ``private``: the place is its own, and goes with it. Raises ConfigError like `hold`."""
    place = await asyncio.to_thread(place_of, settings, fresh and not private)
    assert place is not None
    if private:
        return Holding(place, owner.continued(()), private=True)
    wish = begins(settings, fresh)
    return await claim(place, Claim(settings.cluster.job, wish, choices=choices("run", place)))
