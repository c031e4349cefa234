"""What the training loop needs of a mode: the next slice, and somebody who takes in what it yields."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from paramserver.core.versions.events import Want
from paramserver.core.versions.names import AsyncName, Name, SyncName
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.worker.flat import PartialSum, PartialSumPool
from paramserver.worker.gradients.handed import HandedIn
from paramserver.worker.gradients.outgoing import Outgoing
from paramserver.worker.links import ShardLinks
from paramserver.worker.weights.pulled import Pulled

T = TypeVar("T")
Push = concurrent.futures.Future[frozenset[shard_pb2.Outcome]]


@dataclass(frozen=True, slots=True)
class Item:
    """One slice to compute: its name, and where it lies in the data.

    ``unplanned``: the slice was stolen, or is not the next one of the worker's own range.
    """

    name: Name
    epoch: int
    index: int
    unplanned: bool = False


class Pace(Protocol):
    """Hands out this worker's slices and takes in what they yield."""

    def next(self, epoch: int, last: bool) -> Item | None:
        """The slice to compute now; None when there is none up to ``epoch``. ``last``: no later epoch will be asked."""

    def ahead(self, epoch: int) -> Iterator[Item]:
        """The slices that are likely to come, beginning with the present one: for loading data ahead of time."""

    def expects(self, item: Item) -> bool:
        """Whether what the slice yields can be handed in now; another worker may have done it meanwhile."""

    def alone(self, item: Item) -> bool:
        """Whether what the slice yields is pushed as it is, with nothing added up to it."""

    def contribute(self, item: Item, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers]) -> bool:
        """Hand in what the slice yielded; returns when this worker may begin the next slice.

        False: without a data set, another worker's contribution of this name counts instead.
        """

    @property
    def unsent(self) -> int:
        """How many slices have been handed in here and are not sent."""

    def finish(self) -> None:
        """Wait until everything handed in has arrived, and say so to whom it concerns."""


class PaceHost(Protocol):
    """What a pace needs of the rest of the worker."""

    # ---- facts

    @property
    def version(self) -> int:
        """The version of the weights at hand; asynchronous: the oldest over the shards."""

    @property
    def taken(self) -> frozenset[int]:
        """Slices of the last step that were given to others than their owners."""

    @property
    def stalled_s(self) -> float:
        """How long the script has waited for weights in the present slice."""

    @property
    def generation(self) -> tuple[int, ...]:
        """Which membership the view at hand has."""

    def place(self) -> tuple[int, int]:
        """(position among the workers that get on, how many there are); position -1: this worker is none of them."""

    @property
    def named_by_data(self) -> bool:
        """True if equal names of slices mean equal contributions; False if slices are only numbered."""

    def mode_changed(self) -> bool:
        """True if the mode in force is no longer the one of the pace."""

    @property
    def links(self) -> ShardLinks:
        """The shards."""

    @property
    def pool(self) -> PartialSumPool:
        """Memory for contributions."""

    @property
    def outgoing(self) -> Outgoing:
        """What contributions look like on their way."""

    @property
    def handed(self) -> HandedIn:
        """What has become of contributions that only this worker can bring."""

    # ---- contributions

    def push(
        self, name: Name, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers], clock: int, flush: bool = False
    ) -> Push:
        """Begin to bring a contribution to all shards; ``flush``: nothing of it is left for later ones."""

    def exchange(
        self, name: SyncName, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers], patience_s: float
    ) -> bool | None:
        """Push a contribution, and wait so long for the version that it is the last one of.

        True: the version is installed. False: the contribution is counted. None: it has to be pushed.
        """

    def wait_all(self, pushes: Sequence[Push]) -> bool:
        """Wait for several pushes; raises the first error. False if, without a data set, one was not counted."""

    def discard(self, partial: PartialSum) -> None:
        """A partial that is not contributed."""

    def keep_residuals(self, positions: range) -> None:
        """These slice positions belong to this worker; what was left out of contributions to others is lost."""

    # ---- versions

    def begin_pull(self, version: int) -> concurrent.futures.Future[list[Pulled]]:
        """Ask every shard for ``version`` or a later one."""

    def advance(
        self,
        version: int,
        generation: tuple[int, ...],
        pulling: concurrent.futures.Future[list[Pulled]],
        waiting: Coroutine[Any, Any, list[Pulled] | int] | None = None,
    ) -> int | None:
        """Wait until every shard has published ``version`` and take it in; returns early on a new membership.

        ``pulling`` asks for it. ``waiting``: gets what that brings, or a slice to compute meanwhile, which is returned.
        """

    def pull_now(self, want: Want) -> int | None:
        """Pull at a clock from every shard; returns the slowest clock, None if the job is synchronous by now."""

    # ---- slices

    def ask_for_work(self, server: int, question: shard_pb2.StealRequest) -> shard_pb2.StealResponse | None:
        """Ask a server which slice to compute now; None if there is no answer."""

    def lease(
        self,
        epoch: int,
        last: bool,
        want: int,
        done: Sequence[AsyncName],
        wait_s: float,
        holding: Sequence[AsyncName],
    ) -> concurrent.futures.Future[coordinator_pb2.LeaseResponse]:
        """Report finished slices and those that the pace is ``holding``, and ask for more."""

    def idle(self) -> None:
        """Hold nobody back."""

    # ---- waiting

    def await_revision(self, timeout_s: float) -> bool:
        """Wait for the setting that comes after the pace's; False if it was not announced in time."""

    def wait(self, future: concurrent.futures.Future[T]) -> T:
        """The result of background work. Raises what it failed with, what ended the job, RolledBackError."""

    def waits_for(self, whom: str) -> None:
        """The script waits for somebody, or (if that is empty) for nobody any more."""
