"""Warnings about promised checkpoints that are late, and about a last checkpoint that was never completed."""

from __future__ import annotations

import time

import structlog

from paramserver.coordinator.promises import Promises

log = structlog.get_logger("paramserver.coordinator")

# A checkpoint that has been written for longer is overdue.
LATE_S = 30.0
# Versions that are being written at a time.
_BEGUN = 1000
KEY = "checkpoint"


class Overdue:
    """The trouble with the checkpoints of a job, if there is any. It hears of each version begun, saved or given up.

    ``private``: the place goes with the job, so that no checkpoint was promised to last.
    """

    def __init__(self, promises: Promises, place: str, private: bool) -> None:
        # Why the newest version that was given up could not be saved.
        self.reason = ""
        self._promises, self._place, self._private = promises, place, private
        # The first version that should have been saved after the newest checkpoint; -1: none is missing.
        self._since = -1
        # The newest version that was given up on this timeline.
        self._failed = -1
        # By version, when writing it began (monotonic seconds).
        self._begun: dict[int, float] = {}

    def begun(self, version: int) -> None:
        """Some server writes this version."""
        if len(self._begun) < _BEGUN:
            self._begun.setdefault(version, time.monotonic())

    def took(self, version: int) -> float:
        """For how many seconds this version has been written."""
        return time.monotonic() - self._begun.get(version, time.monotonic())

    def saved(self, version: int) -> None:
        """This version is a checkpoint: earlier versions are no longer overdue."""
        self._end(version)
        if version < self._failed:  # it was late: a newer version has failed since
            return
        if self._since >= 0:
            log.info(f"checkpoints are made again; the newest is that of version {version}")
        self._since, self.reason = -1, ""
        self._promises.troubles.pop(KEY, None)
        self._promises.broken.pop(KEY, None)

    def failed(self, version: int, reason: str) -> None:
        """This version will not be a checkpoint, since the storage does not take it."""
        self._end(version)
        self.reason, self._failed = reason, max(self._failed, version)
        self._tell(version, reason)

    def not_shared(self, address: str, reason: str) -> None:
        """The server at this address has joined, and does not see the place, or cannot write there."""
        self._promises.troubles[KEY] = (
            f"the server at {address} has joined without the place of the checkpoints, {self._place}: {reason}; "
            "make room there, or mend it"
        )

    def look(self) -> None:
        """Warn of a checkpoint that takes too long: storage that hangs raises no error."""
        now = time.monotonic()
        late = [(version, now - begun) for version, begun in self._begun.items() if now - begun > LATE_S]
        for version, seconds in late[:1]:
            self._tell(version, f"it has been written for {seconds:.0f} s, the storage is slow or does not answer")

    def last_missing(self, version: int, newest: str) -> None:
        """The last version could not be saved, and no worker will make another one."""
        if not self._private:
            self._promises.broken[KEY] = (
                f"version {version}, the last one, is not saved in {self._place} ({self.reason or 'not written'}): "
                f"the newest checkpoint there is {newest or 'none'}"
            )

    def forget(self) -> None:
        """The job has gone back: versions that were being written are not heard of any more."""
        self._begun.clear()
        self._failed = -1

    def _end(self, version: int) -> None:
        for other in [other for other in self._begun if other <= version]:
            del self._begun[other]

    def _tell(self, version: int, reason: str) -> None:
        if self._since < 0:
            self._since = version
        way = "a server that dies now ends the job" if self._private else "make room there, or mend it"
        self._promises.troubles[KEY] = (
            f"checkpoints in {self._place} are overdue since version {self._since}: {reason}; {way}"
        )
