"""Where a worker's contributions lie: memory of the model's device, copies of it, the inbox that servers read."""

from __future__ import annotations

from paramserver.core.layout.plan import Layout
from paramserver.worker.device import Mover, mover_for
from paramserver.worker.flat import FlatSpace, PartialSumPool, no_space
from paramserver.worker.gradients.staging import Staging
from paramserver.worker.memory.shared import SharedMemory


class Places:
    """Of one model; made anew whenever the worker has met other servers."""

    def __init__(self) -> None:
        self._mover: Mover | None = None
        self._staging: Staging | None = None
        self._pool: PartialSumPool | None = None

    @property
    def mover(self) -> Mover | None:
        """What copies between a device and main memory; None for a model in main memory."""
        return self._mover

    @property
    def staging(self) -> Staging | None:
        """Copies of contributions of a device."""
        return self._staging

    @property
    def pool(self) -> PartialSumPool:
        """Memory for contributions; exists after a model was registered."""
        assert self._pool is not None, "register a model first"
        return self._pool

    def renew(self, space: FlatSpace, shared: SharedMemory | None) -> None:
        """For weights that lie in ``space``; ``shared``: the memory that servers read."""
        layout: Layout = space.layout
        inbox = shared.inbox.space if shared is not None else no_space
        self.release()
        self._mover = self._mover or mover_for(space.device)
        self._staging = Staging(layout, self._mover, inbox) if self._mover is not None else None
        self._pool = PartialSumPool(layout, space.device, inbox if self._mover is None else no_space)

    def installed(self, version: int) -> None:
        """All shards have published ``version``: what they were lent for earlier steps is no longer read."""
        self.pool.installed(version)
        if self._staging is not None:
            self._staging.pool.installed(version)

    def release(self) -> None:
        """Let go of memory that was locked."""
        if self._mover is not None:
            self._mover.release()
