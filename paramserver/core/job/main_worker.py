"""The main worker: the one on which ``ctx.is_main`` is true. It prints, evaluates and saves for all workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.core.work.slices import main_place


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live worker."""

    member: int
    rank: int


class MainWorker:
    """Chooses the main worker of one job. It stays the main worker as long as it is a member.

    If it is lost, fails or is asked to leave, another worker becomes the main one. If its script comes to its end, no
    other worker does: what the main worker does after training is done once.
    """

    def __init__(self) -> None:
        # The member number, 0: nobody yet. Kept when the script has come to its end.
        self.member = 0
        # Whether the script of the main worker has come to its end.
        self.through = False

    def restore(self, member: int, workers: Sequence[int]) -> None:
        """Go on from the record of an earlier coordinator. ``workers``: the members in that record."""
        self.member, self.through = member, member != 0 and member not in workers

    def look(self, workers: Sequence[Candidate], slices: int, begins: bool) -> None:
        """Members may have changed. ``workers``: in the order of their places; ``slices``: of a step.

        ``begins``: some of the workers with which the job begins are still missing. Until all are there, only the
        worker of rank 0 is taken, so that no other worker is the main one before it.
        """
        if self.through or any(worker.member == self.member for worker in workers):
            return
        if begins:
            self.member = next((worker.member for worker in workers if worker.rank == 0), 0)
        else:
            self.member = workers[main_place(slices, len(workers))].member if workers else 0

    def leaves(self, member: int, was_told: bool) -> None:
        """A worker whose script has come to its end leaves.

        ``was_told``: with the last weights its script was told that another worker is the main one, and has left to
        that worker what is done once. So another worker has to become the main one.
        """
        if member == self.member and not was_told:
            self.through = True

    def undone(self) -> None:
        """Steps that the main worker had trained before it left are trained again."""
        if self.through:
            self.member, self.through = 0, False


def uploader(able: Sequence[int], main: int, scripts: bool) -> int:
    """The member that uploads version 0, of those that are ``able`` to, in the order in which they came; 0: none yet.

    ``scripts``: able members run a script, and version 0 is that of the main worker, whichever of them comes first.

    >>> uploader([8, 7], main=7, scripts=True), uploader([8], main=7, scripts=True), uploader([8], 7, scripts=False)
    (7, 0, 8)
    """
    if main in able:
        return main
    return able[0] if able and not scripts else 0


def at_work(order: Sequence[int], main: int, slices: int) -> list[int]:
    """The order of places, in which the main worker has slices even if a step has fewer slices than workers.

    >>> at_work([7, 8, 9, 10], main=7, slices=2)
    [8, 7, 9, 10]
    """
    places, place = list(order), main_place(slices, len(order))
    if main in places and slices < len(places):
        places.remove(main)
        places.insert(place, main)
    return places
