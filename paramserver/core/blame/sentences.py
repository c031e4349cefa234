"""Blame in words."""

from __future__ import annotations

from paramserver.core.blame.causes import Cause, Finding
from paramserver.core.blame.facts import SILENT_S, Blamed, Open

_DOING = {
    "data": "its data loader has kept it for",
    "compute": "it has computed for",
    "other": "its script has been between two steps for",
    "send": "its contribution has been on its way for",
    "wait": "it has waited for an answer for",
    "receive": "it has received weights for",
}


def slices(lo: int, hi: int) -> str:
    """Such as "5", or "4 to 7"; empty if there are none."""
    if hi <= lo:
        return ""
    return str(lo) if hi == lo + 1 else f"{lo} to {hi - 1}"


def _missing(lo: int, hi: int) -> str:
    numbers = slices(lo, hi)
    return f"slice{'s' if hi > lo + 1 else ''} {numbers} on " if numbers else ""


def _because(cause: Cause, seconds: float, waited: float) -> str:
    if cause is Cause.UNKNOWN:
        return "; the data does not say why"
    if cause is Cause.JOINED:
        return ", which had just joined"
    if cause is Cause.PAUSED:
        return f", which did not run for {seconds:.1f} s of them" if seconds < waited else ", which did not run"
    share = f"{seconds:.1f} s of them" if seconds < waited else "all of them"
    text = {
        Cause.STARVED: "without a core to run on",
        Cause.GC: "collecting garbage",
        Cause.LINK: "on its link",
        Cause.SERVER: "summing, updating and publishing",
    }.get(cause, f"in {cause}")
    return f", {share} {text}"


def of_step(blamed: Blamed) -> str:
    """As in "step 812 waited 3.4 s for slice 5 on worker-3, 3.1 s of them in its data loader"."""
    if not blamed.member:
        return f"step {blamed.step} waited {blamed.waited:.1f} s; the data does not say for whom"
    whom = _missing(blamed.lo, blamed.hi) + blamed.member
    because = _because(blamed.cause, blamed.seconds, blamed.waited)
    if blamed.asynchronous:
        return f"workers were held at the bound for {blamed.waited:.1f} s by {whom} at clock {blamed.step}{because}"
    return f"step {blamed.step} waited {blamed.waited:.1f} s for {whom}{because}"


def of_now(now: Open) -> str:
    """As in "step 812 has waited 3.4 s for slice 5 on worker-3: its data loader has kept it for 3.1 s"."""
    sentence = f"step {now.step} has waited {now.waited:.1f} s for {_missing(now.lo, now.hi)}{now.worker}"
    if now.silent >= SILENT_S:
        return f"{sentence}: nothing was heard of it for {now.silent:.1f} s"
    if now.doing in _DOING:
        return f"{sentence}: {_DOING[now.doing]} {now.doing_s:.1f} s"
    return sentence


def of_many(member: str, finding: Finding, steps: int, of: int, share: float) -> str:
    """As in "worker-3 held up 28 of the last 32 steps, 61 % of their time, for its data loader"."""
    return f"{member} held up {steps} of the last {of} steps, {share:.0%} of their time, {_why(finding)}"


def of_held(member: str, finding: Finding, share: float, seconds: float) -> str:
    """As in "worker-3 held workers at the bound for 61% of the last 30 s, for its data loader"."""
    return f"{member} held workers at the bound for {share:.0%} of the last {seconds:.0f} s, {_why(finding)}"


def _why(finding: Finding) -> str:
    return {
        Cause.PAUSED: "since it did not run",
        Cause.STARVED: "for want of a core to run on",
        Cause.SERVER: "summing, updating and publishing",
    }.get(finding.cause, f"for {finding.cause}")
