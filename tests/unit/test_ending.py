"""What the end of a job remembers of workers that are gone, and what going back makes of that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from paramserver.coordinator.promises import Promises
from paramserver.coordinator.watching.ending import Ending, folded
from paramserver.core.job.life import Life
from paramserver.core.job.membership import Member, Role
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.work.slices import DataSpec
from paramserver.v1 import coordinator_pb2


def ending(data: DataSpec | None = None) -> tuple[Ending, Any]:
    """With a made-up job that has no workers and no model yet."""
    job = SimpleNamespace(
        promises=Promises(),
        timeline=1,
        life=Life(Consistency(Mode.SYNC)),
        recovery=SimpleNamespace(under_way=False),
        resizing=SimpleNamespace(under_way=False),
        members=SimpleNamespace(of=lambda role: [], generation=1),
        schedule=SimpleNamespace(slices_per_epoch=data.slices_per_epoch if data else 0),
        seats=SimpleNamespace(away=[]),
        registry=SimpleNamespace(ready=False),
        main=SimpleNamespace(undone=lambda: None),
    )
    made = Ending(cast(Any, job))
    made.finished = True
    return made, job


def leaves(made: Ending, version: int, handed_in: int = 3, incarnation: int = 5) -> None:
    member = Member(1, Role.WORKER, 0, "worker-0", 0.0, incarnation=incarnation)
    tally = coordinator_pb2.Tally(timeline=1, handed_in=handed_in, counted=handed_in)
    made.hear(member, coordinator_pb2.WorkerReport(version=version, tally=tally))
    made.worker_gone(member, lost=False)


def test_what_those_that_are_gone_had_handed_in_since_is_lost() -> None:
    made, job = ending()
    leaves(made, version=7)
    made.undone(5, 7)
    assert "went back from version 7 to 5 after worker-0 had left" in job.promises.broken["undone"]
    assert not made.finished, "somebody has to go on, or the job has not come to its end"


def test_nothing_is_lost_that_is_in_the_checkpoint() -> None:
    made, job = ending()
    leaves(made, version=5)
    made.undone(5, 7)
    made.undone(7, 7)
    assert job.promises.broken == {}


def test_slices_of_a_data_set_are_done_again() -> None:
    made, job = ending(DataSpec(100, 10))
    leaves(made, version=7)
    made.undone(5, 7)
    assert job.promises.broken == {}


def test_a_process_that_joins_twice_is_counted_once_and_another_one_of_its_name_too() -> None:
    made, _ = ending()
    leaves(made, 1, handed_in=3)
    leaves(made, 2, handed_in=4)
    leaves(made, 3, handed_in=2, incarnation=6)
    assert sorted(one.handed_in for one in made.tallies()) == [2, 4]


def test_many_that_have_left_are_kept_as_a_sum() -> None:
    tallies = [
        coordinator_pb2.Tally(timeline=t, handed_in=2, counted=1, incarnation=i, lost=i == 2)
        for i, t in enumerate([1, 2, 2, 2, 2], start=1)
    ]
    total, *rest = folded(tallies, 2)
    assert [one.incarnation for one in rest] == [4, 5]
    assert (total.timeline, total.handed_in, total.counted, total.lost) == (2, 4, 2, True)
