"""Which slice comes next, and when this worker may go on: one object per mode, the same face.

Blocking: called from the training loop; the network is worked in the background.
"""

from __future__ import annotations

from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.work.slices import SyncSchedule
from paramserver.worker.pace.asynchronous import AsyncPace
from paramserver.worker.pace.base import Item, Pace, PaceHost
from paramserver.worker.pace.sync import SyncPace

__all__ = ["AsyncPace", "Item", "Pace", "PaceHost", "SyncPace", "make_pace"]


def make_pace(engine: PaceHost, consistency: Consistency, schedule: SyncSchedule) -> SyncPace | AsyncPace:
    """The pace of a mode."""
    return SyncPace(engine, schedule) if consistency.mode is Mode.SYNC else AsyncPace(engine)
