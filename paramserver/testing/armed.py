"""A process that suffers the faults of a plan, at its places in the code and in its calls, and strikes other processes.

A fault of a process ("process = ...") is carried out by the process of the run that first comes to its step.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from typing import Any

from paramserver import errors
from paramserver.testing.faults import CallFaults, Fault, FaultyChannel, Hit, chance
from paramserver.testing.fired import FiredLog
from paramserver.testing.plan import Plan, Planned
from paramserver.testing.processes import ProcessBook

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
# Lets a stopped process go on after so many tenths of a second, and ends when that process has ended.
_WAKER = 'n=$1; while [ "$n" -gt 0 ] && kill -0 "$2"; do sleep 0.1; n=$((n - 1)); done; kill -CONT "$2"'
_LOOK_S = 0.05
# What an operation on storage fails with; "gone" also fails when it reads.
_ERRNO = {"full": errno.ENOSPC, "read_only": errno.EROFS, "gone": errno.ENOENT}
# The most seconds that a write to slow storage takes.
_SLOW_S = 30.0


class Armed:
    """See `paramserver.failpoints.Plan`. Places may be reached in any thread."""

    def __init__(self, plan: Plan, name: str, fired: FiredLog, processes: ProcessBook) -> None:
        self.name = name
        # The latest step that a place has named.
        self.step = -1
        self._plan = plan
        self._fired = fired
        self._processes = processes
        self._lock = threading.Lock()
        # How often this process reached the place of each fault, or made its call.
        self._seen: Counter[int] = Counter()
        # Faults of processes that are not carried out yet, as far as this process knows.
        self._open = {number: fault for number, fault in enumerate(plan.faults) if fault.kind in ("process", "storage")}
        self._timed = False
        # Kept so that they are reaped.
        self._wakers: list[subprocess.Popen[bytes]] = []
        processes.note(name, os.getpid())

    def named(self, name: str) -> None:
        """See `failpoints.Plan`."""
        if name != self.name:
            self.name = name
            self._processes.note(name, os.getpid())

    def plans(self, name: str) -> bool:
        """See `failpoints.Plan`."""
        return any(fault.strikes("at", name, self.name) for fault in self._plan.faults)

    def reached(self, name: str, step: int) -> None:
        """See `failpoints.Plan`."""
        if step >= 0:
            self.step = step
            self._strike_others(step)
        for number, fault in enumerate(self._plan.faults):
            meant = fault.strikes("at", name, self.name) and fault.step in (None, step)
            if meant and self._turn(number, fault) and self._take(number, fault, name, step):
                self._strike(fault, name)

    def touched(self, writes: bool) -> None:
        """See `failpoints.Plan`. A fault of the storage strikes all processes from its step on, for its seconds."""
        faults = {n: fault for n, fault in enumerate(self._plan.faults) if fault.kind == "storage"}
        for entry in self._fired.read() if faults else ():
            fault = faults.get(entry.fault)
            left_s = entry.at + fault.seconds - time.time() if fault is not None else 0.0
            if fault is None or left_s <= 0 or not (writes or fault.do == "gone"):
                continue
            if fault.do == "slow":
                time.sleep(min(left_s, _SLOW_S))
            else:
                number = _ERRNO[fault.do]
                raise OSError(number, f"{os.strerror(number)}, as planned")

    def through(self, channel: Any) -> Any:
        """See `failpoints.Plan`. The calls of one channel belong to one event loop."""
        calls = [fault for fault in self._plan.faults if fault.kind == "call"]
        return FaultyChannel(channel, PlannedCalls(self)) if calls else channel

    def next_call(self, method: str) -> Hit | None:
        """The fault of a call that begins now; None: the call goes well."""
        for number, fault in enumerate(self._plan.faults):
            if not fault.strikes("call", method, self.name) or (fault.step is not None and self.step < fault.step):
                continue
            if self._turn(number, fault) and self._take(number, fault, method, self.step):
                return Hit(Fault(fault.do), fault.seconds)
        return None

    def _turn(self, number: int, fault: Planned) -> bool:
        """Count this visit. Returns whether the fault strikes now."""
        with self._lock:
            self._seen[number] += 1
            seen = self._seen[number]
        return seen >= fault.nth and chance(self._plan.seed, number, self.name, seen) < fault.share

    def _take(self, number: int, fault: Planned, what: str, step: int) -> bool:
        return self._fired.take(number, fault.times, self.name, what, fault.do, step)

    # ---- this process

    def _strike(self, fault: Planned, name: str) -> None:
        match fault.do:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                self._stop(os.getpid(), fault.seconds)
            case "delay":
                time.sleep(fault.seconds)
            case "error" if name.startswith("ckpt."):
                raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}, as planned at {name}")
            case "error":
                raise errors.UnavailableError(f"{name}: an error, as planned")

    def _stop(self, pid: int, seconds: float) -> None:
        """Stop all threads of a process for a while."""
        self._wakers = [waker for waker in self._wakers if waker.poll() is None]
        self._wakers.append(
            subprocess.Popen(
                ["sh", "-c", _WAKER, "waker", str(max(1, round(seconds * 10))), str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # it must not end with this process
            )
        )
        os.kill(pid, signal.SIGSTOP)

    # ---- other processes

    def _strike_others(self, step: int) -> None:
        for number, fault in list(self._open.items()):
            if fault.step is not None and step >= fault.step:
                self._strike_other(number, fault)
        timed = [fault for fault in self._open.values() if fault.after_s is not None]
        if timed and not self._timed:
            self._timed = True
            threading.Thread(target=self._keep_time, name="faults", daemon=True).start()

    def _strike_other(self, number: int, fault: Planned) -> None:
        """Strike the planned process. A process that is not there is struck when it is back."""
        if fault.kind == "storage":
            self._open.pop(number, None)
            self._fired.take(number, fault.times, "storage", fault.what, fault.do, self.step)
            return
        pid = self._processes.alive(fault.who)
        if pid is None:
            return
        self._open.pop(number, None)
        if not self._fired.take(number, fault.times, fault.who, "", fault.do, self.step, pid):
            return
        if fault.do == "stop":
            self._stop(pid, fault.seconds)
        else:
            os.kill(pid, _SIGNALS[fault.do])

    def _keep_time(self) -> None:
        begun = time.monotonic()
        while timed := {n: fault for n, fault in self._open.items() if fault.after_s is not None}:
            for number, fault in timed.items():
                assert fault.after_s is not None
                if time.monotonic() - begun >= fault.after_s:
                    self._strike_other(number, fault)
            time.sleep(_LOOK_S)


class PlannedCalls(CallFaults):
    """The calls of one channel of an armed process."""

    def __init__(self, armed: Armed) -> None:
        super().__init__()
        self._armed = armed

    def next(self, method: str) -> Hit | None:
        """See `CallFaults`."""
        return self._armed.next_call(method)
