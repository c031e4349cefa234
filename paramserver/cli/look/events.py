"""Events of a job, derived from two statuses that were seen one after the other (see `describe` of facts.py)."""

from __future__ import annotations

from typing import Any

from paramserver.core.job.status import WELL, State

Facts = dict[str, Any]
# States of a process that are events, and whose end is one.
_BAD = frozenset({State.DEGRADED, State.STUCK, State.FAILED})


def changes(before: Facts, after: Facts) -> list[str]:
    """Sentences for people, in the order of importance. Empty if nothing has happened but training."""
    return [*_of_job(before, after), *_of_members(before, after), *_of_progress(before, after)]


def _of_job(before: Facts, after: Facts) -> list[str]:
    found = []
    if after["term"] != before["term"]:
        found.append(f"another coordinator leads the job (term {after['term']}, before: {before['term']})")
    if after["state"] != before["state"]:
        reason = f": {after['reason']}" if after["reason"] and after["state"] not in WELL else ""
        found.append(f"the job is {after['state']}{reason}")
    if (after["mode"], after["staleness"]) != (before["mode"], before["staleness"]):
        bound = "" if after["staleness"] is None else f", staleness {after['staleness']}"
        found.append(f"the mode is {after['mode']}{bound}")
    if after["timeline"] > before["timeline"]:
        found.append(f"the job went back to an earlier state (timeline {after['timeline']})")
    for kind, name in (("broken promise", "broken_promises"), ("wrong now", "troubles")):
        found += [f"{kind}: {text}" for key, text in after[name].items() if key not in before[name]]
    found += [f"over: {text}" for key, text in before["troubles"].items() if key not in after["troubles"]]
    return found


def _of_members(before: Facts, after: Facts) -> list[str]:
    found = [f"{name} was lost" for name in after["lost"] if name not in before["lost"]]
    known = {process["name"]: process for process in before["processes"] if not process["gone"]}
    there = {process["name"]: process for process in after["processes"] if not process["gone"]}
    if after["term"] == before["term"]:  # a new coordinator does not know all members yet
        left = [name for name in known if name not in there and name not in after["lost"]]
        found += [f"{name} has left" for name in left if name != "coordinator"]
    for name, process in there.items():
        if name not in known:
            found.append(f"{name} has joined")
            continue
        old = known[name]
        if process["pid"] != old["pid"] and name != "coordinator":
            found.append(f"{name} is another process now (pid {process['pid']}, before: {old['pid']})")
        if name != "coordinator" and process["state"] != old["state"] and {process["state"], old["state"]} & _BAD:
            reason = f": {process['reason']}" if process["reason"] else ""
            found.append(f"{name} is {process['state']}{reason}")
    return found


def _of_progress(before: Facts, after: Facts) -> list[str]:
    found = []
    if after.get("takeovers", 0) > before.get("takeovers", 0):
        found.append("backups took over from a lost server")
    if after.get("repairs", 0) > before.get("repairs", 0):
        found.append("all shards have their backups again")
    if after["checkpoint"] and after["checkpoint"] != before["checkpoint"]:
        found.append(f"checkpoint {after['checkpoint']}")
    new = [name for name in after["poisoned_slices"] if name not in before["poisoned_slices"]]
    return found + [f"skipped, since it kills the workers that compute it: {name}" for name in new]
