"""A process that suffers what a plan says, at its places in the code and in its calls."""

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
from paramserver.testing.faults import Fault, FaultPlan, FaultyChannel, Rule, chance
from paramserver.testing.fired import FiredLog
from paramserver.testing.plan import Plan, Planned

_CALLS = {
    "drop": Fault.DROP_REQUEST,
    "lose_reply": Fault.LOSE_REPLY,
    "delay": Fault.DELAY,
    "duplicate": Fault.DUPLICATE,
    "reorder": Fault.REORDER,
    "cut": Fault.CUT_UPLOAD,
}


class Armed:
    """See `paramserver.failpoints.Plan`. Places may be reached in any thread."""

    def __init__(self, plan: Plan, name: str, fired: FiredLog) -> None:
        self.name = name
        # The latest step that a place has told of.
        self.step = -1
        self._plan = plan
        self._fired = fired
        self._lock = threading.Lock()
        # How often each fault's place was reached here, or its call made.
        self._seen: Counter[int] = Counter()
        # Those that go on after SIGCONT; kept so that they are reaped.
        self._wakers: list[subprocess.Popen[bytes]] = []

    def named(self, name: str) -> None:
        """See `failpoints.Plan`."""
        self.name = name

    def plans(self, name: str) -> bool:
        """See `failpoints.Plan`."""
        return any(fault.strikes("at", name, self.name) for fault in self._plan.faults)

    def reached(self, name: str, step: int) -> None:
        """See `failpoints.Plan`."""
        self.step = step if step >= 0 else self.step
        for number, fault in enumerate(self._plan.faults):
            meant = fault.strikes("at", name, self.name) and fault.step in (None, step)
            if meant and self._turn(number, fault) and self._claim(number, fault, name, step):
                self._strike(fault, name)

    def through(self, channel: Any) -> Any:
        """See `failpoints.Plan`. The calls of one channel belong to one event loop."""
        calls = [fault for fault in self._plan.faults if fault.kind == "call"]
        return FaultyChannel(channel, PlannedCalls(self)) if calls else channel

    def next_call(self, method: str) -> Rule | None:
        """The fault of a call that begins now, if there is one."""
        for number, fault in enumerate(self._plan.faults):
            if not fault.strikes("call", method, self.name) or (fault.step is not None and self.step < fault.step):
                continue
            if self._turn(number, fault) and self._claim(number, fault, method, self.step):
                return Rule(method, _CALLS[fault.do], delay_s=fault.seconds)
        return None

    def _turn(self, number: int, fault: Planned) -> bool:
        """Count this time, and say whether it is one to strike."""
        with self._lock:
            self._seen[number] += 1
            seen = self._seen[number]
        return seen >= fault.nth and chance(self._plan.seed, number, self.name, seen) < fault.share

    def _claim(self, number: int, fault: Planned, what: str, step: int) -> bool:
        return self._fired.claim(number, fault.times, self.name, what, fault.do, step)

    def _strike(self, fault: Planned, name: str) -> None:
        match fault.do:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                self._stop(fault.seconds)
            case "delay":
                time.sleep(fault.seconds)
            case "error" if name.startswith("ckpt."):
                raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}, as planned at {name}")
            case "error":
                raise errors.UnavailableError(f"{name}: an error, as planned")

    def _stop(self, seconds: float) -> None:
        """Stop all threads. Somebody of the same process group, which ends with it, lets them go on."""
        self._wakers = [waker for waker in self._wakers if waker.poll() is None]
        wake = ["sh", "-c", 'sleep "$1"; kill -CONT "$2"', "waker", str(seconds), str(os.getpid())]
        self._wakers.append(
            subprocess.Popen(wake, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        os.kill(os.getpid(), signal.SIGSTOP)


class PlannedCalls(FaultPlan):
    """The calls of one channel of an armed process."""

    def __init__(self, armed: Armed) -> None:
        super().__init__()
        self._armed = armed

    def next(self, method: str) -> Rule | None:
        """See `FaultPlan`."""
        return self._armed.next_call(method)

    def delay_s(self, rule: Rule, where: str) -> float:
        """As long as the plan says."""
        return rule.delay_s
