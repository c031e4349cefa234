"""Checkpoints in the settings: where new ones go, and the settings that a job takes over from an old one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paramserver import errors
from paramserver.checkpoint import catalog, owner
from paramserver.checkpoint.contents import Contents
from paramserver.checkpoint.manifest import Manifest, parse_name
from paramserver.checkpoint.owner import Holding, Wish
from paramserver.checkpoint.place import Place
from paramserver.config import FEEDBACK, FIELDS, Settings
from paramserver.coordinator.history.manifests import TRACKED_AS, model_of, position_of
from paramserver.coordinator.options import CheckpointOptions
from paramserver.core.versions.consistency import Mode
from paramserver.processes.environment import told_origins
from paramserver.v1 import coordinator_pb2
from paramserver.wire.messages import consistency_from_proto, data_from_proto, layout_of, schedule_from_proto

# A job takes all settings over from its checkpoint, unless flags, environment or file give them, except those of one
# process or machine: addresses, devices, the store, certificates and tokens.
_OWN = frozenset(
    (
        *(f"cluster.{name}" for name in ("coordinator", "listen", "advertise_host", "servers_per_host", "job")),
        *(f"cluster.{name}" for name in ("beside_worker", "store", "state_dir", "store_password_file")),
        *("cluster.meeting_dir", "cluster.bulk_port", "training.device", "checkpoint.dir", "checkpoint.resume"),
        *("web.dashboard", "web.metrics"),
        *(key for key in FIELDS if key.startswith("security.")),
    )
)
# These are in each manifest, and the others where they are not the default.
_ALWAYS = (
    *("run.script", "run.args", "cluster.servers", "cluster.workers"),
    *("checkpoint.every", "checkpoint.every_s", "checkpoint.keep"),
)

# Seconds between checkpoints that nobody has asked for, in the own directory of `run`.
_OWN_EVERY_S = 5.0


def checkpoint_options(
    settings: Settings, holding: Holding | None = None, tracked: str = "", launched: bool = True
) -> CheckpointOptions:
    """The coordinator's options about checkpoints. ``holding``: of the place where checkpoints go.

    ``tracked``: the run of the trackers, of an earlier job; see `tracked_as`. ``launched``: see `Settings.replicas`.
    """
    wanted = settings.checkpoint
    values = settings.values()
    told = [key for key in FIELDS if key not in _OWN and (key in _ALWAYS or values[key] != FIELDS[key].default)]
    run = {key: list(values[key]) if isinstance(values[key], tuple) else values[key] for key in told}
    run |= {TRACKED_AS: tracked} if tracked else {}
    multiple = settings.flush_every if settings.training.push_compression in FEEDBACK else 1
    origins = settings.origins() | told_origins()
    private = holding is not None and holding.private
    default = origins["checkpoint.every_s"] == "default"
    rising = default and not private and not settings.replicas(launched)
    best = wanted.best_metric, wanted.best_mode, wanted.best_keep
    pace = private and default, rising
    return CheckpointOptions(
        wanted.place, wanted.every, wanted.keep, run, holding, wanted.every_s, multiple, *best, *pace
    )


def own_pace(settings: Settings) -> dict[str, object]:
    """How often `run` saves in its own directory, and how many checkpoints it keeps there, unless the user says so.

    Backups lose nothing. Without them, a killed server would cost all steps since the start.
    """
    origins = settings.origins()
    if origins["checkpoint.every_s"] != "default":
        return {}
    changes: dict[str, object] = {"every_s": 0.0 if settings.replicas(launched=True) else _OWN_EVERY_S}
    if origins["checkpoint.keep"] == "default" and not settings.checkpoint.every:
        changes["keep"] = 1  # the directory may be in memory
    return changes


def cost_of_a_loss(settings: Settings, private: bool) -> str:
    """What a killed server costs a run; empty if nothing. ``private``: checkpoints lie in the run's own directory."""
    if settings.run.ddp or settings.replicas(launched=True):
        return ""
    wanted, steps = settings.checkpoint, "steps" if settings.consistency.mode == "sync" else "slices"
    since = "the start are done again"
    if wanted.every:
        since = f"the last checkpoint are done again; there is one every {wanted.every} {steps}"
    elif wanted.every_s:
        pace = ""
        if settings.origins()["checkpoint.every_s"] == "default":
            pace = ", more seldom if that takes long" if private else ", sooner in the first 50 minutes"
        since = f"the last checkpoint are done again; there is one every {wanted.every_s:g} s{pace}"
    none = " (with --replicas 1 none are)" if settings.cluster.servers > 1 else ""
    return f"if a server is killed, the {steps} since {since}{none}"


def place_of(settings: Settings, fresh: bool) -> Place | None:
    """The place of new checkpoints, ready to be written to; None: there is none. Raises ConfigError.

    ``fresh``: the job is to begin anew there.
    """
    wanted = settings.checkpoint
    if wanted.best_metric and settings.origins()["checkpoint.dir"] == "default":
        raise errors.ConfigError(
            f'checkpoint.best_metric is "{wanted.best_metric}", and there is no directory in which checkpoints could '
            "stay: set checkpoint.dir (--checkpoint-dir)"
        )
    if not wanted.place:
        return None
    place = Place(wanted.place)
    if fresh and goes_on_there(settings):
        raise errors.ConfigError(
            f"--fresh sets aside what is in {place}, from where this job is to go on: leave --fresh out, or choose "
            "another directory for the new checkpoints"
        )
    place.prepare()
    return place


def goes_on_there(settings: Settings) -> bool:
    """Whether the job goes on from a checkpoint in the directory of its own checkpoints."""
    wanted = settings.checkpoint
    return bool(wanted.resume and wanted.place) and Place(split(wanted.resume)[0]).same(Place(wanted.place))


def begins(settings: Settings, fresh: bool, again: bool = False) -> Wish:
    """The wish of a job that is not taken over. ``again``: it may be a restart of the job of this name."""
    if goes_on_there(settings):
        return Wish.RESUME
    return Wish.FRESH if fresh else Wish.AGAIN if again else Wish.BEGIN


def choices(command: str, place: Place) -> str:
    """The ways out for a user whose job may not have the place. ``command``: "run", or "start coordinator"."""
    resume = "--resume" if command == "run" else "--from-checkpoint"
    return (
        f"go on from them with {resume} {place}, begin anew with --fresh, which keeps them in another directory, or "
        "choose another directory with --checkpoint-dir"
    )


def split(where: str) -> tuple[str, str]:
    """Directory of checkpoints, and name of a checkpoint in it or "", of a path or URL that a user gives."""
    parent, _, name = where.rstrip("/").rpartition("/")
    return (parent or ".", name) if parse_name(name) is not None else (where, "")


def find_checkpoint(where: str) -> Manifest:
    """The checkpoint at ``where``, or the newest good one in it. Raises ConfigError if there is none."""
    directory, name = split(where)
    place = Place(directory)
    try:
        if name:
            return catalog.load_manifest(place, name)
        found = catalog.newest(place, verify=False, ours=owner.histories_in(place))
    except (errors.CheckpointError, OSError) as error:
        raise errors.ConfigError(f"there is nothing to go on from in {where}: {error}") from error
    if found is None:
        raise errors.ConfigError(f"there is no complete checkpoint in {where}: see `paramserver checkpoint list`")
    return found


def verify(place: Place, manifest: Manifest) -> None:
    """Read all of a checkpoint. Raises CheckpointError with the reason why no job can go on from it."""
    position_of(manifest)
    model = model_of(manifest)
    try:
        layout = layout_of(model)
    except (errors.ModelError, errors.ProtocolError) as error:
        raise errors.CheckpointError(f"the manifest of {manifest.name} describes no model: {error}") from error
    with Contents(place, manifest) as contents:
        contents.check(layout, model.optimizer)


def ledger_of(where: str, request: coordinator_pb2.AccountsRequest) -> coordinator_pb2.AccountsResponse:
    """The accounts of the ledger in a checkpoint. Raises ConfigError, CheckpointError."""
    from paramserver.coordinator.work.accounts import page
    from paramserver.core.versions.ledger import Accounts, ShardLedger

    saved = find_checkpoint(where)
    position = position_of(saved)
    response = coordinator_pb2.AccountsResponse(version=saved.version, timeline=saved.timeline)
    if not position.HasField("data"):
        return response
    data = data_from_proto(position.data)
    with Contents(Place(split(where)[0]), saved) as contents:
        facts = contents.facts()
    origin = schedule_from_proto(position.view, data)
    ledger = ShardLedger(facts.rows, facts.folded_steps, facts.counted)
    made = Accounts([ledger], data, origin, [(ref.epoch, ref.index) for ref in position.poisoned])
    return page(made, response, facts.names, request)


def _check_newest(where: str, saved: Manifest) -> None:
    """Raises ConfigError if ``where`` names a checkpoint that is not the newest of its directory."""
    directory, name = split(where)
    place = Place(directory)
    newest = catalog.newest(place, verify=False, ours=owner.histories_in(place)) if name else None
    if newest is not None and (newest.version, newest.timeline) > (saved.version, saved.timeline):
        raise errors.ConfigError(
            f"{directory} has a newer checkpoint than {saved.name}, which is {newest.name}: "
            "to go on from the older one, copy it to a directory of its own and resume from there"
        )


def resumed(settings: Settings) -> Mapping[str, Any]:
    """The settings that a job takes over from the checkpoint in ``checkpoint.resume``.

    Raises ConfigError for a setting that was given and does not fit the checkpoint.
    """
    saved = find_checkpoint(settings.checkpoint.resume)
    _check_newest(settings.checkpoint.resume, saved)
    where = position_of(saved)
    consistency = consistency_from_proto(where.view.consistency)
    fixed = (
        *("training.seed", "training.chunk_bytes", "training.threads_per_worker"),
        *("training.lr_scaling", "training.lr_base_slices", "training.lr_warmup_steps", "training.sync_batchnorm"),
    )
    must: dict[str, Any] = {key: where.settings[key] for key in fixed if key in where.settings}
    must["consistency.mode"] = consistency.mode.value
    must["training.slices_per_step"] = where.view.slices_per_step
    if consistency.mode is Mode.ASYNC:
        must["consistency.staleness"] = "unbounded" if consistency.staleness is None else consistency.staleness
    values, origins = settings.values(), settings.origins()
    rates = ("training.lr_scaling", "training.lr_base_slices") if settings.training.lr_scaling == "auto" else ()
    for key, value in must.items():
        if origins[key] != "default" and key not in rates and str(values[key]) != str(value):
            hint = "resume, then use `paramserver set`" if key.startswith("consistency") else "leave it out"
            raise errors.ConfigError(
                f"{key} is {values[key]} here ({origins[key]}), but {saved.name} was made with {value}: {hint}"
            )
    taken = {
        key: value for key, value in saved.run.items() if key in FIELDS.keys() - _OWN and origins[key] == "default"
    }
    if origins["checkpoint.dir"] == "default":
        taken["checkpoint.dir"] = _absolute(split(settings.checkpoint.resume)[0])
    return {**taken, **must, "checkpoint.resume": _absolute(settings.checkpoint.resume)}


def tracked_as(settings: Settings) -> str:
    """Name and key of the trackers' run with which a resumed job goes on; "": the job begins a run."""
    if not settings.checkpoint.resume:
        return ""
    try:
        return str(find_checkpoint(settings.checkpoint.resume).run.get(TRACKED_AS, ""))
    except errors.ConfigError:  # a coordinator that takes a job over needs no checkpoint
        return ""


def _absolute(where: str) -> str:
    return where if "://" in where else str(Path(where).absolute())
