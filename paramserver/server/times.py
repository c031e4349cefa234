"""When the contributions to each version came, and how long it took to make the version: a few looks at the clock."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from paramserver.core.versions.names import SyncName
from paramserver.membership.pulse import Pulse
from paramserver.server.versions.shard import Contribution
from paramserver.v1 import shard_pb2

# Between two reports. Of more versions, the former ones are not told.
_KEPT = 4096
# A report tells of so many versions and holds, those that took longest. A report is sent twice a second.
MOST = 8
# Contributions on weights that lack so many updates, or more, are counted together.
_STALEST = 32
# Workers at the bound at a time.
_WAITING = 4096
# A shorter wait at the bound is none.
_HELD_S = 0.001


class Times:
    """Of one shard on one timeline. Lives in its event loop. ``timeline``: of the shard."""

    def __init__(self, timeline: int) -> None:
        self._timeline = timeline
        # When the newest version was published.
        self._opened_at = time.monotonic()
        # When contributions came that are in no version yet, by buffer (see `RunningShard.buffers`).
        self._came: dict[int, float] = {}
        # Of the version in the making (None: as a backup): since when, and when its sum was applied.
        self._now: shard_pb2.VersionTimes | None = shard_pb2.VersionTimes()
        self._from = self._applied_at = 0.0
        # Versions with three moments: the former version was published, this one began, and it was published.
        self._done: deque[tuple[float, float, float, shard_pb2.VersionTimes]] = deque(maxlen=_KEPT)
        self._holds: deque[shard_pb2.Hold] = deque(maxlen=_KEPT)
        self._stale: Counter[int] = Counter()
        # The workers at the slowest clock when that clock last moved or a worker began to wait for it, and the clock.
        self._slowest: tuple[tuple[int, ...], int] = (), 0
        # Workers at the bound: their clock, and since when they wait.
        self._bound: dict[int, tuple[int, float]] = {}

    # ---- contributions and versions

    def came(self, buffer: int) -> None:
        """A contribution is there, in this buffer."""
        self._came[buffer] = time.monotonic()

    def dropped(self, buffer: int) -> None:
        """The contribution in this buffer does not count."""
        self._came.pop(buffer, None)

    def decided(self, step: int, made_of: Mapping[int, Contribution]) -> None:
        """The next version is made of these contributions, by buffer.

        The primary has told of a version that a backup followed. The backup does not, also after it is promoted.
        """
        if any(part.combined for part in made_of.values()):
            self._now = None
            return
        arrivals = [
            (self._came.pop(buffer, self._opened_at), part.worker, part.name) for buffer, part in made_of.items()
        ]
        at, worker, name = max(arrivals, key=lambda arrival: arrival[0])
        times = shard_pb2.VersionTimes(step=step, timeline=self._timeline, last=worker)
        self._from = self._opened_at
        if isinstance(name, SyncName):
            times.lo, times.hi, times.of = name.lo, name.hi, name.of
            self._waits(times, [(came, who) for came, who, _ in arrivals])
        else:
            times.asynchronous = True
            self._from = at
            times.last_s = time.monotonic() - at  # in the queue, behind others
            for part in made_of.values():
                self._stale[min(_STALEST, step - part.base_version)] += part.name.slices
        self._now = times

    def _waits(self, times: shard_pb2.VersionTimes, arrivals: Sequence[tuple[float, int]]) -> None:
        """Fill in who came first and last, and when all but the last one were there. Times as in `_opened_at`."""
        first, times.first = min(arrivals)
        last, times.last = max(arrivals)
        times.first_s, times.last_s = first - self._opened_at, last - self._opened_at
        others = [arrival for arrival in arrivals if arrival[1] != times.last]
        if others:
            at, times.others = max(others)
            times.others_s = at - self._opened_at

    def applied(self) -> None:
        """The next version is computed."""
        self._applied_at = time.monotonic()

    def published(self) -> None:
        """The next version is there."""
        now, times = time.monotonic(), self._now
        if times is None:
            self._came.clear()
            self._opened_at = now
            return
        times.published_s = now - self._from
        times.update_s = self._applied_at - self._from - times.last_s
        times.forward_s = now - self._applied_at
        self._done.append((self._opened_at, self._from, now, times))
        self._opened_at = now
        if times.asynchronous:
            return
        self._came.clear()

    # ---- the staleness bound

    def slowest(self, workers: tuple[int, ...], clock: int) -> None:
        """Workers wait for these workers, which have the slowest clock."""
        self._slowest = workers, clock

    def waits(self, worker: int, clock: int) -> None:
        """A worker at this clock waits at the bound; it asks again if no answer comes for a while."""
        if self._bound.get(worker, (clock + 1, 0.0))[0] != clock:
            if worker not in self._bound and len(self._bound) >= _WAITING:
                del self._bound[next(iter(self._bound))]
            self._bound[worker] = clock, time.monotonic()

    def goes_on(self, worker: int) -> None:
        """The workers that were the slowest went on, and so does a worker that waited for them."""
        _, since = self._bound.pop(worker, (0, time.monotonic()))
        seconds = time.monotonic() - since
        workers, clock = self._slowest
        by = next((one for one in workers if one != worker), None)
        if by is not None and seconds >= _HELD_S:
            self._holds.append(shard_pb2.Hold(worker=worker, by=by, clock=clock, seconds=seconds))

    # ---- the report

    def write(self, report: shard_pb2.StatsResponse, open_: Mapping[int, Contribution], pulse: Pulse) -> None:
        """Tell of the versions since the last report, and of the open step, which has the contributions ``open_``."""
        done = [self._done.popleft() for _ in range(len(self._done))]
        longest = sorted(range(len(done)), key=lambda index: done[index][0] - done[index][2])[:MOST]
        for index in sorted(longest):
            former, begin, end, times = done[index]
            times.starved_s, _ = pulse.within(begin, end)
            # While a server stands still, contributions lie in its sockets, and it reads them afterwards.
            _, times.paused_s = pulse.within(former, end)
            report.times.append(times)
        holds = [self._holds.popleft() for _ in range(len(self._holds))]
        report.held.extend(sorted(holds, key=lambda hold: -hold.seconds)[:MOST])
        if self._stale:
            report.staleness.extend(self._stale[lag] for lag in range(_STALEST + 1))
            self._stale.clear()
        present = [(self._came[buffer], part.worker) for buffer, part in open_.items() if buffer in self._came]
        if present:
            report.open.step, report.open.timeline = report.version, self._timeline
            first, report.open.first = min(present)
            others, report.open.others = max(present)
            report.open.first_s, report.open.others_s = first - self._opened_at, others - self._opened_at
            report.open.last_s = time.monotonic() - self._opened_at
