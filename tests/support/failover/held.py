"""Workers that are held in their third slice, and a store that forgets everything."""

from __future__ import annotations

import threading

from paramserver.worker.context import Context
from tests.support.cluster.harness import Died, wait
from tests.support.failover.takeover import Fleet


class Held:
    """Holds all workers before their third slice. ``doomed``: then they die."""

    def __init__(self) -> None:
        self.doomed = False
        self.reached, self.released = threading.Event(), threading.Event()
        self.ranks: set[int] = set()

    def __call__(self, ctx: Context, slices: int) -> None:
        if slices == 2:
            self.ranks.add(ctx.rank)
            self.reached.set()
            wait(self.released, "the release of the workers", 60.0)
            if self.doomed:
                raise Died


def lost_everything(fleet: Fleet) -> None:
    fleet.store.forget()
