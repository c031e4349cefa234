"""Compares what two workers have computed for the same slice (`training.audit`)."""

from __future__ import annotations

from typing import Protocol

import structlog

from paramserver.coordinator.model import ModelRegistry
from paramserver.coordinator.promises import Promises
from paramserver.core.job.membership import Member
from paramserver.core.versions.audits import Comparison, Difference, Told
from paramserver.v1 import coordinator_pb2

log = structlog.get_logger("paramserver.coordinator")

# So many differences are logged.
_LOGGED = 20


class _Job(Protocol):
    promises: Promises
    registry: ModelRegistry


class AuditWatch:
    """Hears of audited slices from the reports of workers. A difference is a broken promise."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self.comparison = Comparison()

    def hear(self, member: Member, report: coordinator_pb2.WorkerReport) -> None:
        """A worker reports."""
        comparison = self.comparison
        for one in report.audited:
            told = Told(member.name, tuple(one.digests))
            found = comparison.hear(one.timeline, one.step, one.slice, told)
            if found is None:
                continue
            if comparison.differ <= _LOGGED:
                log.error(self._sentence(found))
            number, odd = comparison.differ, comparison.odd()
            assert comparison.first is not None
            which = f"{odd} differs from all workers that it was compared with. " if odd else ""
            self._job.promises.broken["audit"] = (
                f"{number} of {comparison.compared} slices that two workers computed came out differently "
                f"(training.audit). {which}The first: {self._sentence(comparison.first)}. A script whose "
                "gradients depend on what its process did before is a reason, and so are unlike processors and damaged "
                "memory (see docs/training.md, Audits)"
            )

    def _sentence(self, found: Difference) -> str:
        tensors = self._job.registry.model.tensors if self._job.registry.model is not None else ()
        name = tensors[found.tensor].name if found.tensor < len(tensors) else str(found.tensor)
        return (
            f"{found.one} and {found.other} have different contributions for slice {found.slice_} of step "
            f"{found.step}, and the first tensor that differs is {name!r}"
        )

    def message(self) -> coordinator_pb2.Audit:
        """For the status."""
        return coordinator_pb2.Audit(compared=self.comparison.compared, differ=self.comparison.differ)
