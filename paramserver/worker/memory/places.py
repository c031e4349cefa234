"""Memory for a worker's contributions: on the model's device, copies in main memory, the inbox that others read."""

from __future__ import annotations

from paramserver.core.layout.plan import Layout
from paramserver.worker.device import Mover, mover_for
from paramserver.worker.flat import FlatSpace, PartialSumPool, no_space
from paramserver.worker.gradients.staging import Staging
from paramserver.worker.memory.inbox import Inbox


class Places:
    """Memory for the contributions of one model; made anew when the worker has met other servers."""

    def __init__(self) -> None:
        # Copies between a device and main memory; None for a model in main memory.
        self.mover: Mover | None = None
        # Copies of a device's contributions in main memory.
        self.staging: Staging | None = None
        # Memory for contributions; exists after a model was registered.
        self.pool: PartialSumPool

    def renew(self, space: FlatSpace, inbox: Inbox | None) -> None:
        """Make all memory anew for weights that lie in ``space``; ``inbox``: the memory that others read."""
        layout: Layout = space.layout
        spaces = inbox.space if inbox is not None else no_space
        self.release()
        self.mover = self.mover or mover_for(space.device)
        self.staging = Staging(layout, self.mover, spaces) if self.mover is not None else None
        self.pool = PartialSumPool(layout, space.device, spaces if self.mover is None else no_space)

    def installed(self, version: int) -> None:
        """All shards have published ``version``: nobody needs contributions of earlier steps any more."""
        self.pool.installed(version)
        if self.staging is not None:
            self.staging.pool.installed(version)

    def release(self) -> None:
        """Let go of memory that was locked."""
        if self.mover is not None:
            self.mover.release()
