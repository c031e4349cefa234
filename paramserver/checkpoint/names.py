"""The names of checkpoints and of their files. Names come from files, so every name is checked."""

from __future__ import annotations

import re
import secrets

from paramserver.errors import CheckpointError

MANIFEST = "MANIFEST.json"
# The index that loaders of Hugging Face look for.
INDEX = "model.safetensors.index.json"
# Names the owner of the place; see `owner`.
OWNER = "OWNER.json"
# Names the best checkpoints by a logged value; see `best`.
BEST = "BEST.json"

_TEMPORARY = ".tmp-"
_MARKER = ".in-use-"
_CHECKPOINT = re.compile(r"step-([0-9]{8,18})-t([0-9]{1,18})", re.ASCII)
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)
_OWN = re.compile(r"\.(?:tmp|in-use)-[A-Za-z0-9._-]{1,160}", re.ASCII)


def checkpoint_name(version: int, timeline: int) -> str:
    """ "step-00000050-t1" is version 50 of timeline 1."""
    name = f"step-{version:08d}-t{timeline}"
    assert parse_name(name) == (version, timeline), name
    return name


def parse_name(name: str) -> tuple[int, int] | None:
    """Version and timeline of a checkpoint's name; None for a name that :func:`checkpoint_name` does not give."""
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        return None
    version, timeline = int(match.group(1)), int(match.group(2))
    return (version, timeline) if name == f"step-{version:08d}-t{timeline}" else None


def check_checkpoint_name(name: str) -> None:
    """Raises CheckpointError if ``name`` is no name of a checkpoint: ``../x``, an absolute path, NUL."""
    if parse_name(name) is None:
        raise CheckpointError(f"{name[:80]!r} is no name of a checkpoint; they look like step-00000050-t1")


def is_file_name(name: str) -> bool:
    """Whether a manifest may name this file: letters, digits, ".", "_", "-"; no directory, none of our own marks."""
    return _FILE.fullmatch(name) is not None


def check_file_name(name: str) -> None:
    """Raises CheckpointError for a file name that could lead out of the checkpoint."""
    if not is_file_name(name) and _OWN.fullmatch(name) is None:
        raise CheckpointError(f"{name[:80]!r} is no name of a file in a checkpoint")


def temporary_name(name: str) -> str:
    """A new name for ``name`` while it is being written."""
    return f"{_TEMPORARY}{secrets.token_hex(6)}-{name}"


def is_temporary(name: str) -> bool:
    """Whether the name is that of an unfinished file."""
    return name.startswith(_TEMPORARY)


def marker_name() -> str:
    """A new name for the mark of a reader."""
    return f"{_MARKER}{secrets.token_hex(8)}"


def is_marker(name: str) -> bool:
    """Whether a file is the mark of a reader."""
    return name.startswith(_MARKER)


def another_name(name: str, sha256: str) -> str:
    """A second name for a file whose first name is taken: "a.safetensors" becomes "a-0123456789ab.safetensors"."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{sha256[:12]}{dot}{suffix}" if dot else f"{name}-{sha256[:12]}"
