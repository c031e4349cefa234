"""Kills servers of a run at random moments, but only when all shards have backups."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from paramserver.testing.faults import chance
from paramserver.testing.fired import FiredLog
from paramserver.testing.processes import ProcessBook
from tests.support.faults.cases import SERVERS, Case

# A primary notes each shard that it has brought to a new backup. Then the coordinator hears of it.
BROUGHT = "catch_up.after_chunks"
_HEARD_S, _SPREAD_S, _LOOK_S = 0.5, 1.0, 0.05


class Strikes:
    """Context in which the servers that the plan of a case names are killed, one after the other."""

    def __init__(self, case: Case, plan: Path) -> None:
        """``plan``: the file of the plan."""
        self._case = case
        self._fired, self._book = FiredLog.beside(plan), ProcessBook.beside(plan)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._strike, name="strikes", daemon=True)

    def __enter__(self) -> Strikes:
        if self._case.stays:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._case.stays:
            self._thread.join(10.0)

    def _strike(self) -> None:
        for number, fault in enumerate(self._case.plan.faults):
            while not self._whole():
                if self._over.wait(_LOOK_S):
                    return
            if self._over.wait(_HEARD_S + _SPREAD_S * chance(self._case.name, number)):
                return
            pid = self._book.alive(fault.who)
            if pid is not None and self._fired.take(number, 1, fault.who, "", fault.do, -1, pid):
                os.kill(pid, signal.SIGKILL)

    def _whole(self) -> bool:
        """Whether all shards, one for each server, have been brought to a backup since the kill before this one."""
        brought = 0
        for entry in self._fired.read():
            if entry.do == "kill":
                brought = 0
            brought += entry.what == BROUGHT
        return brought >= SERVERS
