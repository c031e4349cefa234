"""The status of a job and of its processes for people: one of eight states, and a reason.

Pure functions of facts that the coordinator knows. `JobState`, the state in messages between members, is different.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paramserver.core.blame.facts import SILENT_S
from paramserver.core.job.life import Phase


class State(enum.StrEnum):
    """All states that people are shown."""

    # Training has not begun: a process or version 0 is missing.
    WAITING = "waiting"
    TRAINING = "training"
    # Nothing to compute, and nothing is wrong.
    IDLE = "idle"
    # Something is wrong. It is being mended, or training goes on in spite of it.
    DEGRADED = "degraded"
    # No worker makes progress, and that will not change by itself.
    STUCK = "stuck"
    FAILED = "failed"
    # Ended early by an operator.
    STOPPED = "stopped"
    DONE = "done"


# States in which nothing is wrong, for `status --check` and monitors.
WELL = frozenset({State.TRAINING, State.DONE})


@dataclass(frozen=True, slots=True)
class Status:
    """A state, and a reason for people. The reason may be empty if the state says enough."""

    state: State
    reason: str = ""


def again(command: str) -> str:
    """A clause about a lost process, with the command that starts it again; empty if the command is not known."""
    return f" (if nothing starts it again, type: {command})" if command else ""


def more_of(role: str, number: int, commands: Iterable[str], otherwise: str) -> str:
    """What to do to have ``number`` processes of ``role`` where no launcher starts them, for people.

    ``commands`` start those that are there again, and show who has started them. ``otherwise``: by hand.
    """
    if any(command.startswith("docker start ") for command in commands):
        return f"in containers of Compose, run: docker-compose up -d --no-recreate --scale {role}={number}"
    return otherwise


def took_over(takeovers: int, repairs: int) -> str:
    """In words, how often backups took over from a lost server, and how often all shards had backups again after it."""
    again_ = f", and all shards had their backups again {_times(repairs)}" if repairs else ""
    return f"backups took over from a lost server {_times(takeovers)}{again_}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def result_of(lines: Sequence[str]) -> str:
    """The sentence in the last lines of a run that a person needs first: a broken promise, else the first line.

    The first word of a line says how the run has ended, which the state says as well.
    """
    first = next((line for line in lines if line.startswith("promise broken: ")), lines[0] if lines else "")
    return re.sub(r"^(done|ended|stopped|promise broken): ", "", first)


_ENDS = {Phase.FAILED: State.FAILED, Phase.STOPPED: State.STOPPED, Phase.DONE: State.DONE}


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Facts about the job that a coordinator knows. All texts are parts of sentences for people."""

    phase: Phase
    # The members that the start waits for, the checkpoint that the job goes back to, or why it has ended.
    reason: str = ""
    # How many workers are members now; and whether some worker has been through all epochs.
    workers: int = 0
    finished: bool = False
    # Servers that are gone and not replaced: a clause for each.
    away: Sequence[str] = ()
    # Shards that lack a backup, and servers that are gone and whose shards others hold: a clause for each.
    unprotected: Sequence[str] = ()
    # Workers that were lost or whose scripts failed, and that no other worker has replaced.
    missed: Sequence[str] = ()
    # Names of stalled workers.
    stalled: Sequence[str] = ()
    # Troubles that may pass, and broken promises, which stay.
    troubles: Sequence[str] = ()
    broken: Sequence[str] = ()
    # Why some workers have nothing to compute.
    idle: str = ""
    # Why the job is stuck.
    stuck: str = ""
    # No worker joins: ranks of a process group use the servers.
    ranks: bool = False


def job_status(facts: JobFacts) -> Status:
    """The status of the job."""
    if facts.phase in _ENDS:
        if facts.phase is Phase.DONE and facts.broken:
            return Status(State.FAILED, "; ".join(facts.broken))
        return Status(_ENDS[facts.phase], facts.reason)
    if facts.stuck:
        return Status(State.STUCK, facts.stuck)
    wrong = [*facts.away]
    if facts.phase is Phase.RECOVERING:
        wrong.append(facts.reason)
    if facts.phase in (Phase.RUNNING, Phase.RECOVERING) and not facts.finished:
        wrong += [*facts.unprotected, *facts.missed]
        if facts.stalled:
            wrong.append(f"{', '.join(facts.stalled)} hands in nothing; its slices go to others")
    wrong += [*facts.broken, *facts.troubles]
    if wrong:
        return Status(State.DEGRADED, "; ".join(part for part in wrong if part))
    if facts.phase is not Phase.RUNNING:
        begun = facts.phase is not Phase.WAITING
        if facts.ranks and not begun and not facts.reason:
            return Status(State.TRAINING, "the servers work for the ranks of a DDP script")
        missing = "version 0 is on its way to the servers" if begun else "no script has registered a model"
        return Status(State.WAITING, facts.reason or missing)
    if facts.workers:
        return Status(State.TRAINING, facts.idle)
    if facts.finished:
        return Status(State.TRAINING, "the workers are through; the result is gathered")
    return Status(State.IDLE, "there are no workers; the servers keep the model")


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """Facts about a server or worker that is a member."""

    job: JobFacts
    # Its session is broken; it may come back until its lease ends.
    silent: bool = False
    # For so many seconds it was not heard of.
    silent_s: float = 0.0
    # A server that has its shard, a worker that has its first weights.
    ready: bool = True
    # The reason for which it waits, in its own words.
    waiting_for: str = ""
    # A worker whose script has its turn.
    at_work: bool = False
    stalled: bool = False
    draining: bool = False
    # Why it has nothing to compute.
    idle: str = ""


def member_status(facts: MemberFacts) -> Status:
    """The status of a server or worker that is a member."""
    job = facts.job
    if job.phase in _ENDS:
        return Status(_ENDS[job.phase])
    if facts.silent:
        return Status(State.DEGRADED, "not heard of just now")
    if facts.silent_s >= SILENT_S:
        return Status(State.DEGRADED, f"not heard of for {facts.silent_s:.0f} s")
    if facts.stalled:
        return Status(State.STUCK, "it lives, but its script hands in nothing; its slices go to others")
    if not facts.ready:
        return Status(State.WAITING, facts.waiting_for)
    stands_still = job.phase is not Phase.RUNNING or bool(job.away)
    if stands_still and not facts.at_work:
        why = facts.waiting_for or "; ".join(job.away) or job.reason
        return Status(State.WAITING, why)
    if facts.draining:
        return Status(State.TRAINING, "it was asked to leave")
    if not job.workers:
        return Status(State.IDLE)
    if facts.idle:
        return Status(State.IDLE, facts.idle)
    return Status(State.TRAINING, f"waits for {facts.waiting_for}" if facts.waiting_for else "")


@dataclass(frozen=True, slots=True)
class Departure:
    """How a process ceased to be a member."""

    # Why it is believed to have ended without a goodbye.
    lost: str = ""
    # Why its script failed.
    failure: str = ""
    # Whether its script has been through all epochs, and their number (0: unknown).
    finished: bool = False
    epochs_planned: int = 0
    # Why it was told to leave.
    told: str = ""


def departed_status(how: Departure) -> Status:
    """The status of a process that is no longer a member."""
    if how.failure:
        return Status(State.FAILED, f"its script failed: {how.failure}")
    if how.lost:
        return Status(State.FAILED, how.lost)
    if how.finished:
        return Status(State.DONE)
    if how.told:
        return Status(State.STOPPED, how.told)
    if how.epochs_planned:
        return Status(State.STOPPED, "it left before its last epoch")
    return Status(State.DONE)
