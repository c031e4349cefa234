"""Digests of contributions that a second worker computes, too, on their way to the coordinator."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from paramserver.core.versions.audits import Audit
from paramserver.v1.coordinator_pb2 import AuditedSlice, WorkerReport

if TYPE_CHECKING:
    from paramserver.core.versions.names import SyncName
    from paramserver.worker.flat import PartialSum

# So many slices wait for a report; earlier ones are not compared.
_WAITING = 256


class Audited:
    """The script's thread adds slices, and the background takes them into reports. ``audit`` None: there are none."""

    def __init__(self) -> None:
        self.audit: Audit | None = None
        self._new: deque[AuditedSlice] = deque(maxlen=_WAITING)

    def choose(self, share: float, seed: int) -> None:
        """Before the first slice: this share of the slices is compared."""
        self.audit = Audit(share, seed) if share else None

    def computed(self, timeline: int, name: SyncName, partial: PartialSum) -> None:
        """This worker has computed a slice."""
        if self.audit is not None and self.audit.number(name.step, name.lo) is not None:
            digests = partial.digests()
            self._new.append(AuditedSlice(timeline=timeline, step=name.step, slice=name.lo, digests=digests))

    def report(self, report: WorkerReport) -> None:
        """Add what is new to a report."""
        report.audited.extend([self._new.popleft() for _ in range(len(self._new))])
