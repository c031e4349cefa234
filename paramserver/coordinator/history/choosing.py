"""The checkpoints from which a job that goes back, or that was told to go on, may choose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.checkpoint import catalog, owner
from paramserver.checkpoint.manifest import Manifest
from paramserver.checkpoint.place import Place
from paramserver.coordinator.history.checkpoints import Checkpoints
from paramserver.coordinator.history.loads import Loads
from paramserver.coordinator.history.manifests import load_from_proto, position_of
from paramserver.coordinator.options import JobOptions
from paramserver.core.procedures.rollback import Saved

log = structlog.get_logger("paramserver.coordinator")


class _Registry(Protocol):
    digest: str


class _Job(Protocol):
    options: JobOptions
    checkpoints: Checkpoints
    loads: Loads

    @property
    def registry(self) -> _Registry: ...


class Choosing:
    """Looks into the places of checkpoints. All methods but :meth:`told` read the storage, so they run in a thread."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        # The place of the checkpoint that the job was told to go on from, until the job has a checkpoint of its own.
        self.source = ""
        self._meant: Manifest | None = None
        # The checkpoints to choose from, by their names.
        self.found: dict[str, Manifest] = {}

    def told(self, source: str, meant: Manifest) -> None:
        """The job was told to go on from this checkpoint. ``source``: its place if it is not the job's own, or ""."""
        self.source, self._meant = source, meant if source else None

    def look(self, place: Place, bad: Collection[str], resuming: bool) -> list[Saved]:
        """The checkpoints to choose from, those of the job's own ``place`` if there are any; ``bad`` ones are left out.

        Raises UnavailableError if the place has lost all of the job's checkpoints: they may come back.
        """
        own = self._fitting(catalog.complete(place, self._job.options.checkpoints.ours), bad, resuming)
        told = [] if own else self._fitting(self._told(), bad, resuming)
        private = self._job.options.checkpoints.private  # nobody puts a private place back
        if not (own or told or resuming or private or owner.used(place)):
            raise errors.UnavailableError(
                f"{place} has no checkpoint any more: put the checkpoints back, or mount the volume again"
            )
        self.found = {one.name: one for one in own or told}
        return [Saved(one.name, one.version, one.timeline, not own) for one in own or told]

    def gone(self, chosen: Saved) -> bool:
        """Whether a checkpoint that was found is there no more."""
        place = Place(self.source) if chosen.elsewhere else self._job.checkpoints.place
        try:
            return place is None or not catalog.exists(place, chosen.name)
        except errors.CheckpointError:
            return True

    def _fitting(self, found: Sequence[Manifest], bad: Collection[str], resuming: bool) -> list[Manifest]:
        """The checkpoints of this model that are finite and not known to be damaged, in their order."""
        digest, fitting = self._job.registry.digest, []
        for saved in found:
            if not saved.finite or saved.name in bad or saved.layout_digest != digest:
                continue
            try:
                loaded = load_from_proto(position_of(saved).loaded)
            except errors.CheckpointError as error:
                log.warning("a checkpoint cannot be used; trying an earlier one", reason=str(error))
                continue
            # Workers that have gone on after a load do not load again.
            if resuming or not self._job.loads.lost(loaded):
                fitting.append(saved)
        return fitting

    def _told(self) -> list[Manifest]:
        """The checkpoint that the job was told to go on from, and older ones in its place."""
        if self._meant is None:
            return []
        place, meant = Place(self.source), self._meant
        found = catalog.complete(place, owner.histories_in(place))
        return [saved for saved in found if catalog.order(saved.name) <= catalog.order(meant.name)]
