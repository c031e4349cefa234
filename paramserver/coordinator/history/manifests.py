"""Facts about the job in a manifest: written for a checkpoint, and read by a job that goes on from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from paramserver import errors
from paramserver.checkpoint.manifest import Manifest
from paramserver.checkpoint.tensorfile import FileInfo
from paramserver.coordinator.history.loads import to_proto
from paramserver.membership.session import versions
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.messages import consistency_from_proto, data_from_proto, schedule_from_proto

if TYPE_CHECKING:
    from paramserver.coordinator.job import Job


def manifest_of(
    job: Job, version: int, parts: Sequence[shard_pb2.CopyStatus], run: Mapping[str, Any] | None
) -> Manifest:
    """The manifest of a version of which all shards have written their parts. ``run``: how the job was started."""
    model = job.registry.model
    assert model is not None
    here = versions()
    return Manifest(
        job=job.options.job,
        timeline=job.timeline,
        version=version,
        term=job.term,
        servers=job.options.servers,
        layout_digest=job.registry.digest,
        model=json_format.MessageToDict(model, preserving_proto_field_name=True),
        weights=tuple(_info(part.weights) for part in parts),
        state=tuple(_info(part.optimizer) for part in parts),
        position=json_format.MessageToDict(position(job), preserving_proto_field_name=True),
        run=dict(run or {}),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        paramserver=here["paramserver"],
        torch=here["torch"],
        finite=all(part.finite for part in parts),
    )


def position(job: Job) -> coordinator_pb2.JobRecord:
    """Where training stands beside the weights: how the data is cut and dealt out, mode, seed."""
    record = job.record()
    view = types_pb2.View(
        timeline=job.timeline,
        consistency=record.view.consistency,
        sync_origin=record.view.sync_origin,
        slices_per_step=record.view.slices_per_step,
        schedule_mode=record.view.schedule_mode,
    )
    return coordinator_pb2.JobRecord(
        view=view,
        settings=record.settings,
        expected_servers=record.expected_servers,
        expected_workers=record.expected_workers,
        data=record.data if record.HasField("data") else None,
        async_from=record.async_from,
        histories=record.histories[:1],
        poisoned=record.poisoned,
        loaded=to_proto(job.loads.saved),
    )


def position_of(manifest: Manifest) -> coordinator_pb2.JobRecord:
    """The same from a manifest; data, mode and schedule can be read from it. Raises CheckpointError if they cannot."""
    try:
        record = json_format.ParseDict(manifest.position, coordinator_pb2.JobRecord(), ignore_unknown_fields=True)
        consistency_from_proto(record.view.consistency)
        data = data_from_proto(record.data) if record.HasField("data") else None
        schedule_from_proto(record.view, data.slices_per_epoch if data else 0)
    except (json_format.ParseError, errors.ProtocolError, ValueError) as error:
        raise errors.CheckpointError(
            f"the manifest of {manifest.name} does not say where training stands: {error}"
        ) from error
    return record


def model_of(manifest: Manifest) -> types_pb2.ModelSpec:
    """The model of a checkpoint. Raises CheckpointError if it makes no sense."""
    try:
        return json_format.ParseDict(manifest.model, types_pb2.ModelSpec(), ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise errors.CheckpointError(f"the manifest of {manifest.name} does not describe a model") from error


def _info(file: shard_pb2.SavedFile) -> FileInfo:
    return FileInfo(PurePath(file.name).name, file.bytes, file.sha256)
