"""Opens what the settings name for logged values, and refuses beforehand what cannot be opened."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from paramserver import errors
from paramserver.config import Run
from paramserver.records import file
from paramserver.records.trackers import TRACKERS, RunFacts, Tracker
from paramserver.records.writing import Writing

# Bytes that have to be free before a run begins: a disk without these is full.
_ROOM = 16_384


def check_records(run: Run) -> None:
    """Raises UserError if the file cannot be written or a tracker is not installed: before hours of training."""
    for name in run.trackers:
        missing = [module for module in TRACKERS[name][1] if not _installed(module)]
        if missing:
            package = missing[-1].partition(".")[0]
            raise errors.UserError(
                f"run.track names {name}, but the package {package} is not installed here, where the coordinator "
                f"runs: pip install {package}, or leave {name} out"
            )
    if not run.records:
        return
    path = Path(run.records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        file.check(path)
        if os.access(path.parent, os.W_OK):
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as trial:
                trial.write(bytes(_ROOM))
                trial.flush()
    except OSError as error:
        raise errors.UserError(f"run.records cannot be written to {path}: {error.strerror or error}") from error


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def open_records(
    run: Run,
    job: str,
    beginning: int,
    resumed: bool,
    facts: RunFacts,
    missed: Callable[[str], None],
) -> tuple[Writing, file.Earlier | None]:
    """Begin to write. Returns what is in the file; None: there is no file.

    ``beginning``: the same for all coordinators of the job. ``resumed``: it goes on from a checkpoint. ``facts``: about
    the trackers' run. ``missed``: is called, from any thread, with a sentence if the file does not get all values.
    """
    trackers: list[Tracker] = [TRACKERS[name][0](facts) for name in run.trackers]
    earlier, records = None, None
    if run.records:
        records = file.RecordsFile(Path(run.records), job, beginning, resumed)
        earlier = records.earlier()
    return Writing(trackers, records, missed), earlier
