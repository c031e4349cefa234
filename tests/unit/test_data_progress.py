"""A schedule's position is progress through the data, whatever the modes on the way, and also after going back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.versions.ranges import RangeSet
from paramserver.core.work.data_progress import DataProgress, data_progress, schedule_position, updates_per_epoch
from paramserver.core.work.slices import SyncSchedule


@dataclass
class Imagined:
    """A job that only counts: which slices are done, version by version, and what its coordinator says of that."""

    per_epoch: int
    per_step: int
    mode: Mode
    version: int = 0
    async_from: int = 0
    done: dict[int, set[int]] = field(default_factory=dict)
    origin: SyncSchedule = field(init=False)

    def __post_init__(self) -> None:
        self.origin = SyncSchedule(self.per_epoch, self.per_step)

    @property
    def epoch(self) -> int:
        """The oldest one with slices to do."""
        epoch = 0
        while len(self.done.get(epoch, ())) == self.per_epoch:
            epoch += 1
        return epoch

    @property
    def slices(self) -> int:
        """The truth."""
        return sum(map(len, self.done.values()))

    @property
    def progress(self) -> DataProgress:
        return DataProgress(self.origin, self.async_from if self.mode is Mode.ASYNC else None)

    def update(self, rng: random.Random) -> None:
        """The next version."""
        if self.mode is Mode.SYNC:
            step = self.origin.step(self.version)
            assert not self.done.setdefault(step.epoch, set()) & set(step.slices)
            self.done[step.epoch] |= set(step.slices)
        else:  # leased slices come in any order; some may be of the next epoch already
            epoch = self.epoch + (rng.random() < 0.2)
            if len(self.done.get(epoch, ())) == self.per_epoch:
                epoch = self.epoch
            left = set(range(self.per_epoch)) - self.done.setdefault(epoch, set())
            self.done[epoch].add(rng.choice(sorted(left)))
        self.version += 1

    def drain(self) -> None:
        """Epochs before the newest one are finished before the job is synchronous."""
        while max(self.done, default=0) > self.epoch and self.done[max(self.done)]:
            left = set(range(self.per_epoch)) - self.done.setdefault(self.epoch, set())
            self.done[self.epoch].add(min(left))
            self.version += 1

    def change_mode(self) -> None:
        """As the coordinator does it."""
        if self.mode is Mode.SYNC:
            self.mode, self.async_from = Mode.ASYNC, self.version
            return
        self.drain()
        epoch = self.epoch
        remaining = RangeSet.from_ranges((i, i + 1) for i in self.done.get(epoch, ())).missing(self.per_epoch)
        self.origin = SyncSchedule(self.per_epoch, self.per_step, self.version, epoch, remaining)
        self.mode = Mode.SYNC

    def copy(self) -> Imagined:
        """A checkpoint."""
        made = replace(self, done={epoch: set(done) for epoch, done in self.done.items()})
        made.origin = self.origin
        return made


def drawn(seed: int) -> tuple[random.Random, Imagined]:
    rng = random.Random(seed)
    return rng, Imagined(rng.randint(1, 12), rng.randint(1, 5), rng.choice(list(Mode)))


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_truth_across_any_changes_and_after_going_back(seed: int) -> None:
    rng, job = drawn(seed)
    units = updates_per_epoch(job.per_epoch, job.per_step, job.mode)
    saved, last = job.copy(), 0
    for _ in range(80):
        chance = rng.random()
        if chance < 0.1:
            before = job.progress, job.version
            job.change_mode()
            assert job.progress.slices(before[1]) == before[0].slices(before[1]), "a change alone moves nothing"
        elif chance < 0.15:
            saved = job.copy()
        elif chance < 0.2:
            job, last = saved.copy(), 0
        else:
            job.update(rng)
        assert job.progress.slices(job.version) == job.slices
        position = schedule_position(job.slices, job.per_epoch, units)
        assert position >= last, "it never falls within a timeline"
        last = position
        whole, rest = divmod(job.slices, job.per_epoch)
        assert whole * units <= position < (whole + 1) * units
        assert rest or position == whole * units, "the end of an epoch is the end of its units"


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_number_of_updates_while_the_mode_stays(seed: int) -> None:
    rng, job = drawn(seed)
    units = updates_per_epoch(job.per_epoch, job.per_step, job.mode)
    for version in range(4 * units):
        assert schedule_position(job.progress.slices(version), job.per_epoch, units) == version == job.version
        job.update(rng)


def test_a_worker_that_is_behind_the_boundary_knows_where_it_is() -> None:
    """It has weights of version 7 and hears that steps go on from version 9, with 4 of 10 slices of epoch 1 left."""
    now = DataProgress(SyncSchedule(10, 4, 9, 1, ((6, 10),)))
    assert [now.slices(version) for version in (7, 8, 9, 10, 11)] == [14, 15, 16, 20, 24]


SYNC, LATER = Consistency(Mode.SYNC, revision=4), Consistency(Mode.SYNC, revision=6, from_version=9)
ASYNC, BOUND = Consistency(Mode.ASYNC, 2, 5, 7), Consistency(Mode.ASYNC, 3, 6, 0)
ORIGIN = SyncSchedule(10, 4)


@pytest.mark.parametrize(
    ("announced", "newest", "wanted"),
    [
        (SYNC, SYNC, DataProgress(ORIGIN)),
        (ASYNC, ASYNC, DataProgress(ORIGIN, 7)),
        (BOUND, ASYNC, DataProgress(ORIGIN, 7)),
        (SYNC, ASYNC, DataProgress(ORIGIN, 7)),  # the servers are asynchronous, the coordinator has not said so yet
        (ASYNC, LATER, DataProgress(ORIGIN, 7)),  # nobody goes on before it is announced
        (SYNC, BOUND, None),
        (SYNC, LATER, None),
    ],
)
def test_a_setting_may_be_heard_of_before_it_is_announced(
    announced: Consistency, newest: Consistency, wanted: DataProgress | None
) -> None:
    assert data_progress(ORIGIN, announced, 7, newest) == wanted
