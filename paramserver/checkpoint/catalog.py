"""The checkpoints of a place: which are complete, which is the newest good one, and which may go."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import structlog

from paramserver.checkpoint.manifest import MAX_BYTES, Manifest, NewerFormatError, decode, encode
from paramserver.checkpoint.names import INDEX, MANIFEST, is_marker, is_temporary, marker_name, parse_name
from paramserver.checkpoint.place import Inside, Place, explained
from paramserver.checkpoint.tensorfile import TensorFile
from paramserver.errors import CheckpointError
from paramserver.failpoints import reach

log = structlog.get_logger("paramserver.checkpoint")

# Whether a checkpoint is of a history (see `owner`).
Ours = Callable[[str], bool]

# A reader that has not renewed its mark for so long is gone.
STALE_S = 3600.0
_MARKER_BYTES = 4096
# While we look, others may complete a checkpoint and remove the one that we had seen.
_LOOKS = 10


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint of a place. ``problem``: why it cannot be used; empty for a complete one.

    ``manifest``: None if there is none, or none that can be read. ``incomplete``: it was never finished, or is being
    written or removed. ``foreign``: a later paramserver wrote it.
    """

    name: str
    manifest: Manifest | None
    problem: str = ""
    incomplete: bool = False
    foreign: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """Larger is newer: timeline, then version."""
        return order(self.name)


def write_manifest(place: Place, manifest: Manifest) -> None:
    """Complete a checkpoint whose files are all written: from now on, readers find it.

    The index that loaders of Hugging Face look for is written before the manifest. Raises CheckpointError if a file is
    missing, or if a coordinator of a higher term has completed the same checkpoint.
    """
    inside = place.inside(manifest.name)
    text = encode(manifest)
    _check_present(inside, manifest)
    before = _look(place, manifest.name).manifest
    if before is not None and before.term > manifest.term:
        raise CheckpointError(
            f"{inside.where(MANIFEST)}: the coordinator of term {before.term} has saved this version, "
            f"and this is the one of term {manifest.term}"
        )
    inside.write_atomically(INDEX, _index(place, manifest))
    with explained("write", inside.where(MANIFEST)):
        reach("ckpt.manifest", manifest.version)
    inside.write_atomically(MANIFEST, text)


def load_manifest(place: Place, checkpoint: str) -> Manifest:
    """The checked manifest of one checkpoint; the files that it names are not read. Raises CheckpointError."""
    inside = place.inside(checkpoint)
    if not inside.exists(MANIFEST):
        raise CheckpointError(f"{inside.where(MANIFEST)} is missing: this checkpoint was never completed")
    try:
        manifest = decode(inside.read(MANIFEST, MAX_BYTES))
        if manifest.name != checkpoint:
            raise CheckpointError(f"the manifest is that of {manifest.name}")
    except CheckpointError as error:
        raise type(error)(f"{inside.where(MANIFEST)}: {error}") from error
    return manifest


def survey(place: Place) -> list[Found]:
    """Every checkpoint of a place, newest first, and what is wrong with it. Sizes are compared, contents are not."""
    found = [_look(place, name) for name in place.names()]
    return sorted(found, key=lambda each: each.order, reverse=True)


def complete(place: Place, ours: Ours = lambda history: True) -> list[Manifest]:
    """The complete checkpoints of the histories that ``ours`` selects, newest first: by timeline, then by version."""
    whole = [found.manifest for found in survey(place) if found.manifest is not None and not found.problem]
    return [manifest for manifest in whole if ours(manifest.history)]


def exists(place: Place, checkpoint: str) -> bool:
    """Whether a checkpoint has a manifest. Raises CheckpointError."""
    return place.inside(checkpoint).exists(MANIFEST)


def job_of(place: Place, checkpoint: str) -> str:
    """The job that made a checkpoint; "" if its manifest cannot be read."""
    try:
        return load_manifest(place, checkpoint).job
    except CheckpointError:
        return ""


def verify(place: Place, manifest: Manifest) -> None:
    """Read all files of a checkpoint, and compare sizes, headers and SHA-256. Raises CheckpointError."""
    for info in manifest.files:
        with TensorFile(place, manifest.name, info) as file:
            file.verify()


def newest(
    place: Place, good_only: bool = True, verify: bool = True, ours: Ours = lambda history: True
) -> Manifest | None:
    """The newest checkpoint that can be loaded; None if there is none.

    ``good_only``: pass over checkpoints with NaN or infinite weights. ``verify``: read all files first. ``ours``: pass
    over checkpoints of other histories. A checkpoint is passed over with a warning that gives the reason.
    """
    for _ in range(_LOOKS):
        names = place.names()
        chosen = _newest(place, good_only, verify, ours)
        if chosen is not None or place.names() == names:
            return chosen
    return None  # others save and remove faster than we look


def _newest(place: Place, good_only: bool, verify: bool, ours: Ours) -> Manifest | None:
    for found in survey(place):
        manifest, reason = found.manifest, found.problem
        if manifest is not None and not reason:
            if not ours(manifest.history):
                reason = "it is of another history"
            elif good_only and not manifest.finite:
                reason = "it has NaN or infinite weights"
            else:
                try:
                    if verify:
                        with in_use(place, found.name):
                            _verify(place, manifest)
                    return manifest
                except CheckpointError as error:
                    reason = str(error)
        tell = log.info if found.incomplete else log.warning
        tell("a checkpoint is passed over", checkpoint=found.name, reason=reason)
    return None


_verify = verify


# ---- marks of readers, which the clean-up respects


@dataclass
class Use:
    """The mark of a reader on a checkpoint. Who reads for more than an hour calls :meth:`renew` now and then."""

    inside: Inside
    marker: str

    def renew(self) -> None:
        """Write the mark again, with the present time."""
        # A directory that cannot be written to is not cleaned up by us either.
        with contextlib.suppress(CheckpointError):
            self.inside.write_atomically(self.marker, json.dumps({"since": time.time()}).encode())

    def end(self) -> None:
        """Remove the mark."""
        with contextlib.suppress(CheckpointError):
            self.inside.remove(self.marker)


@contextlib.contextmanager
def in_use(place: Place, checkpoint: str) -> Iterator[Use]:
    """Keep :func:`prune`, here or elsewhere, from removing a checkpoint while it is read.

    Raises CheckpointError if the checkpoint is gone, or not complete, at the start. A reader that is killed keeps the
    checkpoint for an hour.
    """
    inside = place.inside(checkpoint)
    if not inside.exists(MANIFEST):
        raise CheckpointError(f"{inside.where(MANIFEST)} is missing: this checkpoint is gone, or was never completed")
    use = Use(inside, marker_name())
    try:
        use.renew()
        # Prune removes the manifest, looks for marks once more, and only then removes the rest.
        if not inside.exists(MANIFEST):
            raise CheckpointError(f"{inside.where(MANIFEST)}: this checkpoint is being removed")
        yield use
    finally:
        use.end()


def prune(place: Place, keep: int, protect: Collection[str] = (), ours: Ours = lambda history: True) -> list[str]:
    """Remove checkpoints that are no longer needed; returns their names.

    Checkpoints of other histories than ``ours`` stay, and do not count. The newest ``keep`` complete checkpoints stay,
    and so do the newest ``keep`` good ones. Unfinished and damaged checkpoints go if they are older than the newest
    complete one; so do temporary files. Checkpoints in ``protect``, checkpoints that are read, and those of a later
    paramserver stay. The manifest goes first: a checkpoint that is removed in part is incomplete, never wrong. Raises
    CheckpointError if a file cannot be removed.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint stays")
    found = [each for each in survey(place) if each.manifest is None or ours(each.manifest.history)]
    whole = [each for each in found if each.manifest is not None and not each.problem]
    good = [each for each in whole if each.manifest is not None and each.manifest.finite]
    kept = {each.name for each in (*whole[:keep], *good[:keep])}
    removed = []
    for each in reversed(found):
        if not whole or each.order > whole[0].order or each.foreign:
            continue
        inside = place.inside(each.name)
        if each.name in kept or each.name in protect:
            if not each.problem:
                _tidy(place, each)
        elif _remove(inside, each.name):
            removed.append(each.name)
    return removed


def discard(place: Place, checkpoint: str) -> None:
    """Remove the files of a checkpoint that will not be completed. Raises CheckpointError."""
    inside = place.inside(checkpoint)
    if not inside.exists(MANIFEST):
        _remove_files(inside)


def _remove_files(inside: Inside) -> None:
    for file in inside.files():
        inside.remove(file)
    inside.remove_folder()


def _remove(inside: Inside, name: str) -> bool:
    """Remove a checkpoint unless it is in use; whether it went."""
    if _is_read(inside):
        return False
    if inside.exists(MANIFEST):
        text = inside.read(MANIFEST, MAX_BYTES)
        inside.remove(MANIFEST)
        if _is_read(inside):  # somebody has come between the two looks
            inside.write_atomically(MANIFEST, text)
            return False
    with explained("remove", name):
        reach("ckpt.gc", order(name)[1])
    _remove_files(inside)
    return True


def _tidy(place: Place, found: Found) -> None:
    """Remove files that a crash, or a second attempt, has left in a complete checkpoint."""
    assert found.manifest is not None
    inside = place.inside(found.name)
    files = inside.files()
    belongs = {info.name for info in found.manifest.files}
    strangers = [file for file in files if file.endswith(".safetensors") and file not in belongs]
    temporary = [file for file in files if is_temporary(file)]
    stale = [file for file in files if is_marker(file) and not _is_fresh(inside, file)]
    if strangers:  # the index may be that of the attempt that was not completed
        inside.write_atomically(INDEX, _index(place, found.manifest))
    for file in (*strangers, *temporary, *stale):
        inside.remove(file)


def _is_read(inside: Inside) -> bool:
    return any(is_marker(file) and _is_fresh(inside, file) for file in inside.files())


def _is_fresh(inside: Inside, marker: str) -> bool:
    """Whether the reader that left this mark may still read. A mark from the far future is as stale as an old one."""
    try:
        since = json.loads(inside.read(marker, _MARKER_BYTES))["since"]
        return abs(time.time() - float(since)) < STALE_S
    except (CheckpointError, ValueError, KeyError, TypeError, RecursionError):
        return False  # gone meanwhile, or not written by us


# ---- looking at one


def _look(place: Place, name: str) -> Found:
    try:
        inside = place.inside(name)
        if not inside.exists(MANIFEST):
            return Found(name, None, f"{inside.where(MANIFEST)} is missing: it was never completed", incomplete=True)
        manifest = load_manifest(place, name)
    except NewerFormatError as error:
        return Found(name, None, str(error), foreign=True)
    except CheckpointError as error:
        return Found(name, None, str(error))
    try:
        _check_present(inside, manifest)
    except CheckpointError as error:
        return Found(name, manifest, str(error))
    return Found(name, manifest)


def _check_present(inside: Inside, manifest: Manifest) -> None:
    for info in manifest.files:
        size = inside.size(info.name)
        if size is None:
            raise CheckpointError(f"{inside.where(info.name)} is missing")
        if size != info.bytes:
            raise CheckpointError(f"{inside.where(info.name)} has {size} bytes, and should have {info.bytes}")


def order(name: str) -> tuple[int, int]:
    """Which checkpoint is newer: by timeline, then by version."""
    parsed = parse_name(name)
    assert parsed is not None, name
    version, timeline = parsed
    return timeline, version


def _index(place: Place, manifest: Manifest) -> bytes:
    """The index file: which tensor is in which file. Buffers that a state_dict leaves out are left out."""
    hidden = {
        tensor.get("name")
        for tensor in manifest.model.get("tensors", ())
        if isinstance(tensor, dict) and not tensor.get("persistent", False)
    }
    where: dict[str, str] = {}
    total = 0
    for info in manifest.weights:
        with TensorFile(place, manifest.name, info) as file:
            for entry in file.entries.values():
                if entry.name in where:
                    raise CheckpointError(f"tensor {entry.name!r} is in {where[entry.name]} and in {info.name}")
                if entry.name not in hidden:
                    where[entry.name] = info.name
                    total += entry.nbytes
    table = {"metadata": {"total_size": total}, "weight_map": where}
    return json.dumps(table, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"
