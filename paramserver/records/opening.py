"""Opens what the settings name for logged values, and refuses beforehand what cannot be opened."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from paramserver import errors
from paramserver.config import Run
from paramserver.core.records.steps import StepValues
from paramserver.records import file
from paramserver.records.trackers import TRACKERS, RunFacts, Tracker
from paramserver.records.writing import Writing


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
    except OSError as error:
        raise errors.UserError(f"run.records cannot be written to {path}: {error.strerror or error}") from error


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def open_records(
    run: Run, job: str, beginning: int, resumed: bool, settings: Mapping[str, str]
) -> tuple[Writing, list[StepValues], bool]:
    """Begin to write. Returns the steps that are in the file, and whether this very job has written them.

    ``beginning``: the same for all coordinators of the job. ``resumed``: it goes on from a checkpoint.
    """
    facts = RunFacts(job, f"{beginning:x}", settings)
    trackers: list[Tracker] = [TRACKERS[name][0](facts) for name in run.trackers]
    earlier: list[StepValues] = []
    ours = False
    if run.records:
        records = file.RecordsFile(Path(run.records), job, beginning, resumed)
        earlier, ours = records.earlier()
        trackers.append(records)
    return Writing(trackers), earlier, ours
