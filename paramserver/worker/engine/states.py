"""Reading the optimizer state for the script."""

from __future__ import annotations

import structlog

from paramserver import errors
from paramserver.core.versions.consistency import Mode
from paramserver.worker.engine.originals import Originals
from paramserver.worker.engine.rollback import GoingBack
from paramserver.worker.links.states import Parts

log = structlog.get_logger("paramserver.worker")


class States(GoingBack, Originals):
    """Nobody else takes part in it: servers tell what they have, whatever this worker's step is at."""

    def optimizer_state(self) -> Parts:
        """The pieces of state of all shards.

        Synchronous: of the version at hand. If others have finished the step of this worker meanwhile, that is the
        version after it, which is then taken in. Asynchronous: of each shard's present version.
        """
        while True:
            try:
                if self.rolled_back():
                    raise errors.RolledBackError("the job goes back to a checkpoint")
                together = self.consistency.mode is Mode.SYNC
                asked = self.version if together else 0
                version, parts = self._watch(self.background.submit(self.links.states.read(asked, together)))
                if not together or version == self.version:
                    return parts
                log.info("others have finished the step: its weights are taken in", version=version)
                self._pull_latest()
                if version == self.version:
                    return parts
            except errors.RolledBackError:
                self.follow()
