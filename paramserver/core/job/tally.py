"""The rule at the end of a job: each contribution that was handed in has counted, or did not count for a named reason.

Numbers are contributions of one slice each, on the job's present timeline. Contributions on earlier timelines were
undone when the job went back, and workers heard of it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tally:
    """The contributions of one worker, as it has reported them.

    ``counted``: all servers said so. ``late``: refused, since the mode had changed. ``duplicate``: another worker's
    contribution of the same name counts. ``lost``: the worker vanished, so the numbers are from its last report.
    """

    name: str
    handed_in: int
    counted: int
    late: int = 0
    duplicate: int = 0
    lost: bool = False
    # Handed in by the script, but not sent when the worker left: other workers compute them.
    unsent: int = 0

    @property
    def open(self) -> int:
        """Contributions that were never answered."""
        return self.handed_in - self.counted - self.late - self.duplicate


@dataclass(frozen=True, slots=True)
class Shard:
    """The report of one server: contributions in published versions, and contributions in the open step."""

    name: str
    counted: int
    open: int = 0


def not_counted(workers: Sequence[Tally]) -> dict[str, int]:
    """By reason, how many contributions did not count; reasons that did not occur are left out."""
    found = {
        "duplicate": sum(worker.duplicate for worker in workers),
        "late": sum(worker.late for worker in workers),
        "unanswered": sum(worker.open for worker in workers),
        "unsent": sum(worker.unsent for worker in workers),
    }
    return {reason: number for reason, number in found.items() if number}


def imbalances(workers: Sequence[Tally], shards: Sequence[Shard]) -> list[str]:
    """Sentences about differences between workers and servers; empty if each contribution is accounted for.

    Workers that were lost may have handed in more than they reported.
    """
    found: list[str] = []
    if len({shard.counted for shard in shards}) > 1:
        each = ", ".join(f"{shard.name} {shard.counted}" for shard in shards)
        found.append(f"the servers have not counted the same number of contributions ({each}).")
    counted = min((shard.counted for shard in shards), default=0)
    left = max((shard.open for shard in shards), default=0)
    if left:
        found.append(
            f"{left} contributions are not counted: they are of a step that was never completed, since a worker was "
            "lost that had a part of it."
        )
    acknowledged = sum(worker.counted for worker in workers)
    lost = [worker for worker in workers if worker.lost]
    missing = acknowledged - counted - left
    if missing > 0:
        found.append(f"{missing} contributions were acknowledged to workers, but are in no version.")
    elif missing < 0 and not lost:
        found.append(f"{-missing} contributions were counted that no worker knows of.")
    unanswered = [worker for worker in workers if worker.open and not worker.lost]
    found += [f"{worker.open} contributions of {worker.name} were never answered." for worker in unanswered]
    return found
