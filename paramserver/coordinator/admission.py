"""Whom the coordinator lets in: one protocol, one set of settings on all members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paramserver import errors
from paramserver.core.consistency import Mode
from paramserver.core.membership import Role
from paramserver.transport.messages import PROTOCOL, mode_to_proto
from paramserver.v1 import coordinator_pb2, types_pb2

if TYPE_CHECKING:
    from paramserver.coordinator.service import CoordinatorService


def check_join(job: CoordinatorService, request: coordinator_pb2.JoinRequest, role: Role) -> None:
    """Raise what a newcomer is refused with: a failed job, another job, other versions, other settings."""
    if job.state == types_pb2.JOB_STATE_FAILED:
        raise errors.JobFailedError(job.reason)
    if request.job and request.job != job.options.job:
        raise errors.ConfigError(f"this coordinator runs job {job.options.job!r}, not {request.job[:100]!r}")
    if request.protocol != PROTOCOL:
        theirs = ", ".join(f"{name} {version}" for name, version in sorted(request.versions.items()))
        raise errors.VersionMismatchError(
            f"the coordinator speaks protocol {PROTOCOL}, this {role.value} speaks {request.protocol} ({theirs}): "
            "install the same version of paramserver on all machines"
        )
    if role is Role.OBSERVER or request.mode == types_pb2.MODE_UNSPECIFIED:
        return
    mine = job.consistency
    theirs_text = "async" if request.mode == types_pb2.MODE_ASYNC else "sync"
    if request.mode != mode_to_proto(mine.mode):
        raise errors.ConfigError(
            f"this {role.value} was started with consistency.mode = {theirs_text}, the job runs {mine}: use one setting"
        )
    staleness = request.staleness if request.HasField("staleness") else None
    if mine.mode is Mode.ASYNC and staleness != mine.staleness:
        text = "unbounded" if staleness is None else staleness
        raise errors.ConfigError(
            f"this {role.value} was started with consistency.staleness = {text}, the job runs {mine}: use one setting"
        )
    if request.HasField("slices_per_step") and request.slices_per_step not in (0, job.slices_per_step):
        raise errors.ConfigError(
            f"this {role.value} was started with training.slices_per_step = "
            f"{request.slices_per_step}, "
            f"the job has {job.slices_per_step}: use one setting"
        )
    if request.HasField("seed") and request.seed != job.options.seed:
        raise errors.ConfigError(
            f"this {role.value} was started with training.seed = {request.seed}, "
            f"the job has {job.options.seed}: use one setting"
        )
