"""The place of the checkpoints is claimed for a job that is led here, or for a job that `run` launches."""

from __future__ import annotations

import asyncio

from paramserver.checkpoint import owner
from paramserver.checkpoint.owner import Holding, Wish
from paramserver.config import Settings
from paramserver.resume.checkpointing import begins, choices, place_of
from paramserver.resume.claiming import Claim, claim
from paramserver.resume.options import Options
from paramserver.v1 import coordinator_pb2


async def hold(
    settings: Settings, options: Options, address: str, record: coordinator_pb2.JobRecord | None, stood_by: bool
) -> Holding | None:
    """The hold of a coordinator at ``address`` that leads; None if there are no checkpoints.

    ``record``: of the job that it takes over. ``stood_by``: it waited for the end of another coordinator. Raises
    ConfigError if the place belongs to another job.
    """
    fresh = options.fresh and record is None and not stood_by
    place = await asyncio.to_thread(place_of, settings, fresh)
    if place is None:
        return None
    if options.histories:
        return Holding(place, options.histories, private=options.private)
    wish = begins(settings, fresh, options.resume or stood_by)
    histories: tuple[str, ...] = ()
    if record is not None:
        wish, histories = Wish.TAKE_OVER, tuple(record.histories)
    return await claim(
        place, Claim(settings.cluster.job, wish, address, histories, choices("start coordinator", place))
    )


async def hold_for_run(settings: Settings, fresh: bool, private: bool) -> Holding:
    """The hold of a launcher. ``private``: the place is its own, and goes with it. Raises ConfigError like `hold`."""
    place = await asyncio.to_thread(place_of, settings, fresh and not private)
    assert place is not None
    if private:
        return Holding(place, owner.continued(()), private=True)
    wish = begins(settings, fresh)
    return await claim(place, Claim(settings.cluster.job, wish, choices=choices("run", place)))
