"""Asynchronous mode: which worker holds which slice, and which slices are done.

A slice is leased to one worker at a time. It is done when every shard has it. The slices of a worker that dies go back
to the queue. If two workers have computed a slice, the shards count it once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from paramserver.core.versions.counted import Runs
from paramserver.core.versions.names import AsyncName
from paramserver.core.versions.ranges import RangeSet

# A request takes at most half of a worker's share of the remaining slices, so that the slowest worker never has many.
_SHARE = 2
# A worker asks for so many slices at once, and asks again when it has so few left.
LEASE_AHEAD, LEASE_LOW = 16, 4
# So many slices one worker holds at most.
MOST_HELD = 1 << 14


class SliceLeases:
    """The slices of all epochs of one job.

    ``slices_per_epoch`` 0: no data set; slices are only names, without end, in epoch 0.
    """

    def __init__(self, slices_per_epoch: int, epoch: int = 0, done: Iterable[tuple[int, int]] = ()) -> None:
        if slices_per_epoch < 0:
            raise ValueError(f"slices_per_epoch must be 0 or more, not {slices_per_epoch}")
        self.slices_per_epoch = slices_per_epoch
        self.paused = False
        self._first_epoch = epoch
        self._done: defaultdict[int, RangeSet] = defaultdict(RangeSet, {epoch: RangeSet.from_ranges(done)})
        self._fresh: dict[int, int] = {}
        self._returned: dict[int, RangeSet] = {}
        # The worker of each slice, the slices of each worker, and how many slices of each epoch are held.
        self._holder: dict[AsyncName, int] = {}
        self._held_by: dict[int, set[AsyncName]] = defaultdict(set)
        self._held_of: dict[int, int] = defaultdict(int)

    @classmethod
    def restored(cls, slices_per_epoch: int, epoch: int, done: Runs) -> SliceLeases:
        """The table of a coordinator that takes over: the finished slices from ``epoch`` on, and no leases.

        A worker that holds slices names them in its next request (see :meth:`reconcile`).
        """
        for run in done:  # finished epochs, however many there are
            full = slices_per_epoch and run.ranges == ((0, slices_per_epoch),)
            if full and run.first <= epoch < run.first + run.epochs:
                epoch = run.first + run.epochs
        table = cls(slices_per_epoch, epoch)
        for run in done:
            for number in range(max(epoch, run.first), run.first + run.epochs):
                table._done[number] = RangeSet.from_ranges(run.ranges)
        last = max(table._done)
        if not slices_per_epoch:
            # Without a data set no other worker can compute a slice that was handed out: only new names are leased.
            table._fresh[epoch] = max((hi for _, hi in table._done[epoch].ranges()), default=0)
            return table
        for number in range(epoch, last + 1):
            table._fresh[number] = slices_per_epoch
            table._returned[number] = RangeSet.from_ranges(table._done[number].missing(slices_per_epoch))
        return table

    # ---- handing out

    def lease(self, worker: int, max_epoch: int, want: int, workers: int) -> list[AsyncName]:
        """Up to ``want`` slices of epochs up to ``max_epoch``, the oldest first; fewer towards the end of an epoch.

        While paused, only slices of epochs before the newest one are given out, so that in the end a single epoch is
        begun but not finished; and slices of a worker that died, since shards may have counted them.
        """
        want = min(want, MOST_HELD - len(self._held_by.get(worker, ())))
        if want < 1:
            return []
        if self.slices_per_epoch == 0:
            max_epoch = self._first_epoch
        newest = self._newest()
        granted: list[AsyncName] = []
        # An epoch that no worker has begun has slices, so later epochs are not looked at.
        for epoch in range(self._oldest_open(), min(max_epoch, newest + 1) + 1):
            held_back = self.paused and epoch >= newest
            left = len(self._returned.get(epoch, ())) if held_back else self._left(epoch)
            if left == 0:
                continue
            take = want if left < 0 else max(1, min(want, left // (_SHARE * max(1, workers))))
            for index in self._take(epoch, take, not held_back):
                name = AsyncName(epoch, index)
                self._hold(name, worker)
                granted.append(name)
            break
        return granted

    def _take(self, epoch: int, count: int, fresh_too: bool) -> list[int]:
        taken: list[int] = []
        returned = self._returned.get(epoch)
        while returned is not None and len(returned) and len(taken) < count:
            lo, hi = returned.ranges()[0]
            some = range(lo, min(hi, lo + count - len(taken)))
            taken.extend(some)
            self._returned[epoch] = returned = RangeSet.from_ranges(
                [(max(a, some.stop), b) for a, b in returned.ranges() if b > some.stop]
            )
        done = self._done[epoch]
        fresh = self._fresh.get(epoch, 0)
        while fresh_too and len(taken) < count and (not self.slices_per_epoch or fresh < self.slices_per_epoch):
            if fresh not in done:
                taken.append(fresh)
            fresh += 1
        self._fresh[epoch] = fresh
        return taken

    # ---- coming back

    def complete(self, names: Iterable[AsyncName]) -> None:
        """Every shard has these slices. Names that were never handed out, or are done already, change nothing."""
        for name in names:
            self._let_go(name)
            if name.epoch < self._first_epoch or name.index >= self._fresh.get(name.epoch, 0):
                continue
            self._done[name.epoch].add(name.index)
            returned = self._returned.get(name.epoch)
            if returned is not None and name.index in returned:
                self._returned[name.epoch] = _without(returned, name.index)

    def reconcile(self, worker: int, holding: Iterable[AsyncName]) -> bool:
        """The worker says that it holds these slices and no others. True if slices came back to the queue.

        Other slices that were leased to it got lost on the way. It keeps slices that another coordinator leased to it.
        """
        said = set(holding)
        lost = [name for name in self._held_by[worker] if name not in said]
        for name in lost:
            self._let_go(name)
            self._returned.setdefault(name.epoch, RangeSet()).add(name.index)
        for name in said:
            if len(self._held_by[worker]) >= MOST_HELD:
                break
            if name.index in self._returned.get(name.epoch, ()):
                self._hold(name, worker)
                self._returned[name.epoch] = _without(self._returned[name.epoch], name.index)
        return bool(lost)

    def give_back(self, worker: int) -> list[AsyncName]:
        """The worker has left: its unfinished slices return to the queue."""
        names = sorted(self._held_by[worker])
        for name in names:
            self._let_go(name)
            self._returned.setdefault(name.epoch, RangeSet()).add(name.index)
        del self._held_by[worker]
        return names

    def _hold(self, name: AsyncName, worker: int) -> None:
        self._let_go(name)
        self._holder[name] = worker
        self._held_by[worker].add(name)
        self._held_of[name.epoch] += 1

    def _let_go(self, name: AsyncName) -> None:
        """End the lease of this slice, if a worker holds it."""
        worker = self._holder.pop(name, None)
        if worker is None:
            return
        self._held_by[worker].discard(name)
        self._held_of[name.epoch] -= 1
        if not self._held_of[name.epoch]:
            del self._held_of[name.epoch]

    # ---- facts

    def holders(self, max_epoch: int) -> dict[int, int]:
        """How many unfinished slices of epochs up to ``max_epoch`` each worker holds."""
        held: dict[int, int] = defaultdict(int)
        for name, worker in self._holder.items():
            if name.epoch <= max_epoch:
                held[worker] += 1
        return dict(held)

    def is_done(self, name: AsyncName) -> bool:
        """True if every shard has the slice."""
        return name.epoch < self._oldest_open() or name.index in self._done.get(name.epoch, ())

    def nothing_left(self, max_epoch: int) -> bool:
        """No slice of epochs up to ``max_epoch`` waits for a worker (some may still be in work)."""
        if self.slices_per_epoch == 0:
            return False
        return all(self._left(epoch) == 0 for epoch in range(self._oldest_open(), max_epoch + 1))

    def finished(self, max_epoch: int) -> bool:
        """Every slice of epochs up to ``max_epoch`` is done."""
        return self.slices_per_epoch > 0 and self._oldest_open() > max_epoch

    def drained(self) -> bool:
        """Paused, all that was handed out is done, and at most one epoch is begun but not finished."""
        newest = self._newest()
        if not self.paused or self._holder:
            return False
        if self.slices_per_epoch == 0:  # no other worker can push the slices of a client
            return True
        came_back = any(map(len, self._returned.values()))
        return not came_back and all(self._left(epoch) == 0 for epoch in range(self._oldest_open(), newest))

    def position(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """(epoch, its ranges of slices that are not done) of the oldest epoch that is not finished."""
        epoch = self._oldest_open()
        return epoch, self._done[epoch].missing(self.slices_per_epoch)

    def _oldest_open(self) -> int:
        epoch = self._first_epoch
        while self.slices_per_epoch and len(self._done[epoch]) >= self.slices_per_epoch:
            epoch += 1
        for finished in range(self._first_epoch, epoch):
            self._done.pop(finished, None)
            self._fresh.pop(finished, None)
            self._returned.pop(finished, None)
        self._first_epoch = epoch
        return epoch

    def _newest(self) -> int:
        begun = [e for e, done in self._done.items() if len(done)]
        return max([*self._held_of, *begun, *self._fresh, self._first_epoch])

    def _left(self, epoch: int) -> int:
        """Slices of the epoch that wait for a worker; -1: without end."""
        if self.slices_per_epoch == 0:
            return -1
        return self.slices_per_epoch - len(self._done[epoch]) - self._held_of.get(epoch, 0)


def _without(ranges: RangeSet, index: int) -> RangeSet:
    return RangeSet.from_ranges(
        part
        for lo, hi in ranges.ranges()
        for part in ((lo, min(hi, index)), (max(lo, index + 1), hi))
        if part[0] < part[1]
    )
