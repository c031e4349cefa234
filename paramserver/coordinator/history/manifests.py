"""Facts about the job in a manifest: written for a checkpoint, and read by a job that goes on from one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import PurePath

from google.protobuf import json_format

from paramserver import errors
from paramserver.checkpoint.manifest import Manifest
from paramserver.checkpoint.tensorfile import FileInfo
from paramserver.coordinator.options import JobOptions
from paramserver.core.work.loading import Load, Place
from paramserver.core.work.passes import SAMPLES
from paramserver.membership.joining import versions
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.messages import OF_RUN, consistency_from_proto, data_from_proto, schedule_from_proto

# In `Manifest.run`: name and key of the trackers' run, which jobs that go on from the checkpoint go on with.
TRACKED_AS = "tracked as"


def manifest_of(
    options: JobOptions,
    record: coordinator_pb2.JobRecord,
    model: types_pb2.ModelSpec,
    version: int,
    parts: Sequence[shard_pb2.CopyStatus],
    registered: coordinator_pb2.RegisteredFile | None = None,
) -> Manifest:
    """The manifest of a version of which all shards have written their parts. ``record``: the present one.

    ``registered``: the file with the state of registered objects.
    """
    here = versions()
    return Manifest(
        job=options.job,
        timeline=record.view.timeline,
        version=version,
        term=record.view.term,
        servers=len(parts),
        layout_digest=record.layout,
        model=json_format.MessageToDict(model, preserving_proto_field_name=True),
        weights=tuple(_info(part.weights) for part in parts),
        state=tuple(_info(part.optimizer) for part in parts),
        position=json_format.MessageToDict(_position(record, registered), preserving_proto_field_name=True),
        run={TRACKED_AS: f"{options.job} {record.view.beginning:x}", **(options.checkpoints.run or {})},
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        paramserver=here["paramserver"],
        torch=here["torch"],
        finite=all(part.finite for part in parts),
    )


def _position(
    record: coordinator_pb2.JobRecord, registered: coordinator_pb2.RegisteredFile | None
) -> coordinator_pb2.JobRecord:
    """Where training stands beside the weights: how the data is cut and dealt out, mode, seed."""
    view = types_pb2.View(
        timeline=record.view.timeline,
        consistency=record.view.consistency,
        sync_origin=record.view.sync_origin,
        slices_per_step=record.view.slices_per_step,
        schedule_mode=record.view.schedule_mode,
    )
    # If a load is under way, the weights are the loaded ones.
    loaded = next((field for field in ("loading", "loaded") if record.HasField(field)), None)
    return coordinator_pb2.JobRecord(
        view=view,
        settings=record.settings,
        expected_servers=record.expected_servers,
        expected_workers=record.expected_workers,
        data=record.data if record.HasField("data") else None,
        async_from=record.async_from,
        histories=record.histories[:1],
        poisoned=record.poisoned,
        agreed=[one for one in record.agreed if not one.name.startswith((SAMPLES, OF_RUN))],
        registered=registered,
        loaded=getattr(record, loaded) if loaded else None,
    )


def position_of(manifest: Manifest) -> coordinator_pb2.JobRecord:
    """Where training stood at a checkpoint. Raises CheckpointError if data, mode or schedule cannot be read from it."""
    try:
        record = json_format.ParseDict(manifest.position, coordinator_pb2.JobRecord(), ignore_unknown_fields=True)
        consistency_from_proto(record.view.consistency)
        data = data_from_proto(record.data) if record.HasField("data") else None
        schedule_from_proto(record.view, data)
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


def load_to_proto(load: Load | None) -> coordinator_pb2.LoadPlace | None:
    """The load as a message; None for none."""
    if load is None or not load.place.count:
        return None
    return coordinator_pb2.LoadPlace(epoch=load.place.epoch, count=load.place.count, digest=load.digest)


def load_from_proto(message: coordinator_pb2.LoadPlace) -> Load:
    """The load that a message describes."""
    return Load(Place(message.epoch, message.count), message.digest)


def _info(file: shard_pb2.SavedFile) -> FileInfo:
    return FileInfo(PurePath(file.name).name, file.bytes, file.sha256)
