"""Judges what workers have seen of a job, by its own rules: it uses nothing of the product.

Each worker of `scripts/small.py` writes a line for every version that it computes with. The lines of all workers have
to be those of one history: each version of a shard has one content, no process goes back, a process that begins later
sees no older version than others have seen by then, and nothing was seen that does not count in the end.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

# Where a sentence about each broken rule would be too much.
_MOST_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class Seen:
    """Weights that a worker computed with. ``versions``, ``digests``, ``sums``: by shard; ``most``: the largest number.

    ``began``: when the process had begun; ``at``: when it saw these weights; wall clock.
    """

    who: str
    began: float
    at: float
    timeline: int
    versions: tuple[int, ...]
    digests: tuple[str, ...]
    sums: tuple[float, ...]
    most: float


def read(folder: Path) -> list[Seen]:
    """All that the workers of a run have seen, in the order of time. The last line of a killed process may be half."""
    seen = []
    for path in folder.glob("*.jsonl"):
        began, *lines = path.read_text().splitlines() or ["0"]
        for line in lines:
            try:
                at, timeline, versions, digests, sums, most = json.loads(line)
            except ValueError:
                continue
            columns = tuple(versions), tuple(digests), tuple(sums)
            seen.append(Seen(path.stem, float(began), at, timeline, *columns, most))
    return sorted(seen, key=lambda one: one.at)


def problems(seen: Sequence[Seen], twin: Sequence[Seen] = (), most: float | None = None) -> list[str]:
    """The rules that the history breaks, a sentence each.

    ``twin``: what workers saw of the same synchronous job without faults. ``most``: of an asynchronous ledger, how
    often each sample counts in the end.
    """
    if not seen:
        return ["no worker has written down what it saw"]
    found = [*_one_line(seen, twin, most is None), *_back(seen), *_late(seen)]
    if most is not None:
        found += _uncounted(seen, most)
    return found[:_MOST_PROBLEMS]


def next_version(seen: Sequence[Seen], moment: float) -> float | None:
    """When a worker has a version, of all shards, that no worker had at a moment. None: never."""
    before = [(one.timeline, max(one.versions)) for one in seen if one.at <= moment]
    newest = max(before, default=(-1, -1))
    after = (one for one in seen if one.at > moment and (one.timeline, min(one.versions)) > newest)
    return next((one.at for one in after), None)


def _one_line(seen: Sequence[Seen], twin: Sequence[Seen], synchronous: bool) -> Iterable[str]:
    """Each version of a shard has one content: on any timeline, and without faults, if the job is synchronous."""
    known: dict[tuple[int, int, int], tuple[str, str]] = {}
    for one, who in [*((one, f"{one.who} without faults") for one in twin), *((one, one.who) for one in seen)]:
        for shard, (version, digest) in enumerate(zip(one.versions, one.digests, strict=True)):
            key = (0 if synchronous else one.timeline, shard, version)
            first, by = known.setdefault(key, (digest, who))
            if first != digest:
                yield f"version {version} of shard {shard} is {first} at {by} and {digest} at {who}"


def _back(seen: Sequence[Seen]) -> Iterable[str]:
    """No process goes back, but with the job to another timeline."""
    for who in dict.fromkeys(one.who for one in seen):
        for former, one in pairwise(other for other in seen if other.who == who):
            if one.timeline < former.timeline:
                yield f"{who} went from timeline {former.timeline} to {one.timeline}"
            elif one.timeline == former.timeline and any(
                n < m for m, n in zip(former.versions, one.versions, strict=True)
            ):
                yield f"{who} went back from versions {former.versions} to {one.versions}"


def _late(seen: Sequence[Seen]) -> Iterable[str]:
    """A process that begins later sees no older version than others have seen by then."""
    times = [one.at for one in seen]
    for who in dict.fromkeys(one.who for one in seen):
        first = next(one for one in seen if one.who == who)
        for other in seen[: bisect_right(times, first.began)]:
            if other.timeline > first.timeline or (other.timeline == first.timeline and _older(first, other)):
                yield f"{who} began with {first.versions}, after {other.who} had seen {other.versions}"
                break


def _older(one: Seen, other: Seen) -> bool:
    """Whether a shard has an older version in ``one`` than in ``other``."""
    return any(mine < theirs for mine, theirs in zip(one.versions, other.versions, strict=True))


def _uncounted(seen: Sequence[Seen], most: float) -> Iterable[str]:
    """A later version of a ledger holds all that an earlier one holds, and none more than the last one."""
    for one in seen:
        if one.most > most:
            yield f"{one.who} saw a sample {one.most:g} times in {one.versions}, and it counts {most:g} times"
            break
    shards = len(seen[0].versions)
    for shard in range(shards):
        held = sorted({(one.timeline, one.versions[shard], one.sums[shard]) for one in seen})
        for (line, early, less), (same, late, more) in pairwise(held):
            if line == same and more < less:
                yield f"version {late} of shard {shard} holds {more:g} samples, and version {early} holds {less:g}"
                break
