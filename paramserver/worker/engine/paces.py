"""The pace in force, which knows what slice comes next, and what it may ask of the rest of the worker."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from paramserver import errors
from paramserver.core.versions.events import Want
from paramserver.core.versions.names import AsyncName, Name, SyncName
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.worker.engine.sender import Sender
from paramserver.worker.engine.weights import Weights
from paramserver.worker.flat import PartialSum, PartialSumPool
from paramserver.worker.gradients.handed import HandedIn
from paramserver.worker.gradients.outgoing import Outgoing
from paramserver.worker.job.member import Member
from paramserver.worker.job.modes import Modes
from paramserver.worker.job.shards import Shards
from paramserver.worker.job.slices import Slices
from paramserver.worker.links import ShardLinks
from paramserver.worker.memory.places import Places
from paramserver.worker.pace import AsyncPace, SyncPace, make_pace
from paramserver.worker.weights.pulled import Pulled

log = structlog.get_logger("paramserver.worker")

T = TypeVar("T")


class Paces:
    """Makes a pace when it is wanted and there is none, or none of the mode in force."""

    def __init__(
        self, member: Member, modes: Modes, shards: Shards, slices: Slices, weights: Weights, host: PaceSide
    ) -> None:
        self._member, self._modes, self._shards = member, modes, shards
        self._slices, self._weights, self._host = slices, weights, host
        self._pace: SyncPace | AsyncPace | None = None

    @property
    def pace(self) -> SyncPace | AsyncPace | None:
        """The one there is; None before the first slice, and after the job has gone back."""
        return self._pace

    def present(self) -> SyncPace | AsyncPace:
        """The one of the mode in force. Raises RolledBackError if the job goes back."""
        self._slices.ensure()
        self._member.check_timeline()
        if self._pace is None or self._modes.changed():
            if self._pace is not None:
                self._pace.finish()
                log.info("mode", now=str(self._modes.present), version=self._weights.version)
            schedule = self._slices.schedule()
            if self._modes.together and schedule.base_version > self._weights.version:
                pull = self._shards.links.pulls.pull_version(schedule.base_version)
                self._weights.install(self._member.do(pull))
            mode = self._modes.present
            self._modes.paced(mode)
            self._host.outgoing.reset()
            self._pace = make_pace(self._host, mode, schedule)
        return self._pace

    @property
    def holding(self) -> Sequence[AsyncName]:
        """What is leased and not handed in."""
        return self._pace.holding if isinstance(self._pace, AsyncPace) else ()

    @property
    def clock(self) -> int | None:
        """Asynchronous mode: how many slices this worker has finished, counted from where it joined."""
        return self._pace.clock if isinstance(self._pace, AsyncPace) else None

    @property
    def unsent(self) -> int:
        """How many slices have been handed in here and are not sent."""
        return self._pace.unsent if self._pace is not None else 0

    def refresh(self) -> None:
        """What the present slice was computed with is of no version: have one."""
        if isinstance(self._pace, AsyncPace):
            self._pace.refresh()
        else:
            self._weights.pull_latest()

    def finish(self) -> None:
        """Wait until everything handed in has arrived."""
        if self._pace is not None:
            self._pace.finish()

    def drop(self) -> None:
        """The job goes back: nothing of what the pace knows is true any more."""
        self._pace = None

    def hand_back(self) -> None:
        """Nobody is held back by this worker, and all that it has handed in has arrived; there is no pace then."""
        if self._pace is None:
            return
        self._pace.finish()
        if isinstance(self._pace, AsyncPace):
            self._member.wait(self._slices.lease(0, False, 0, (), 0.0, ()))
            self._slices.idle()
        self._pace = None
        self._modes.paced(None)


class PaceSide:
    """What a pace may ask of the rest of the worker; see `pace.base.PaceHost`."""

    def __init__(
        self,
        member: Member,
        modes: Modes,
        shards: Shards,
        slices: Slices,
        places: Places,
        weights: Weights,
        sender: Sender,
    ) -> None:
        self._member, self._modes, self._shards, self._slices = member, modes, shards, slices
        self._places, self._weights, self._sender = places, weights, sender

    # ---- facts

    @property
    def version(self) -> int:
        """See `Weights.version`."""
        return self._weights.version

    @property
    def taken(self) -> frozenset[int]:
        """See `Weights.taken`."""
        return self._weights.taken

    @property
    def stalled_s(self) -> float:
        """See `Weights.stalled_s`."""
        return self._weights.stalled_s

    @property
    def generation(self) -> tuple[int, ...]:
        """See `Member.generation`."""
        return self._member.generation

    def place(self) -> tuple[int, int]:
        """See `Member.place`."""
        return self._member.place()

    @property
    def named_by_data(self) -> bool:
        """See `Slices.named_by_data`."""
        return self._slices.named_by_data

    def mode_changed(self) -> bool:
        """See `Modes.changed`."""
        return self._modes.changed()

    @property
    def links(self) -> ShardLinks:
        """The shards."""
        return self._shards.links

    @property
    def pool(self) -> PartialSumPool:
        """Memory for contributions."""
        return self._places.pool

    @property
    def outgoing(self) -> Outgoing:
        """What contributions look like on their way."""
        return self._sender.outgoing

    @property
    def handed(self) -> HandedIn:
        """What has become of contributions that only this worker can bring."""
        return self._sender.handed

    # ---- contributions

    def push(
        self, name: Name, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers], clock: int, flush: bool = False
    ) -> concurrent.futures.Future[frozenset[shard_pb2.Outcome]]:
        """See `Sender.push`."""
        return self._sender.push(name, partial, groups, clock, flush)

    def exchange(
        self, name: SyncName, partial: PartialSum, groups: Sequence[types_pb2.GroupHypers], patience_s: float
    ) -> bool | None:
        """See `Sender.exchange`."""
        return self._sender.exchange(name, partial, groups, patience_s)

    def wait_all(self, pushes: Sequence[concurrent.futures.Future[frozenset[shard_pb2.Outcome]]]) -> bool:
        """See `Sender.wait_all`."""
        return self._sender.wait_all(pushes)

    def discard(self, partial: PartialSum) -> None:
        """See `Sender.discard`."""
        self._sender.discard(partial)

    def keep_residuals(self, positions: range) -> None:
        """See `Sender.keep_residuals`."""
        self._sender.keep_residuals(positions)

    # ---- versions

    def begin_pull(self, version: int) -> concurrent.futures.Future[list[Pulled]]:
        """Ask every shard for ``version`` or a later one."""
        self._weights.before_pull()
        begun = self._sender.pull_begun(version)
        if begun is not None:
            return begun
        pull = self.links.pulls.pull_version(version, ahead=True, begin=self._weights.may_begin)
        return self._member.submit(pull)

    def advance(
        self,
        version: int,
        generation: tuple[int, ...],
        pulling: concurrent.futures.Future[list[Pulled]],
        waiting: Coroutine[Any, Any, list[Pulled] | int] | None = None,
    ) -> int | None:
        """Wait until every shard has published ``version`` and take it in; returns early on a new membership.

        ``pulling`` asks for it, see `begin_pull`. ``waiting``: gets what that brings, or a slice that is to be computed
        meanwhile, which is then returned.
        """

        def moved() -> bool:
            return self.generation != generation

        results: list[Pulled] | int | None
        if waiting is None or pulling.done():
            if waiting is not None:
                waiting.close()
            results = self._member.wait(pulling, moved)
        else:
            results = self._member.wait(self._member.submit(waiting), moved)
            if isinstance(results, int) or results is None:
                pulling.cancel()
        if isinstance(results, int):
            return results
        if not results and self._member.run(self.links.pulls.published(version)):
            # Whoever left had seen this step complete: nothing of it is to be computed again.
            results = self._member.do(self.links.pulls.pull_version(version))
        if results is not None:
            self._weights.install(results)
        return None

    def pull_now(self, want: Want) -> int | None:
        """Pull at a clock from every shard; returns the slowest clock, None if the job is synchronous by now."""
        self._weights.before_pull()
        try:
            results = self._member.do(self.links.pulls.pull(want, begin=self._weights.may_begin))
        except errors.FencedError:
            raise
        except errors.StaleViewError:
            self._modes.await_revision(self._member.wait_timeout_s)
            return None
        self._weights.install(results)
        return max(result.min_clock for result in results)

    # ---- slices

    def ask_for_work(self, server: int, question: shard_pb2.StealRequest) -> shard_pb2.StealResponse | None:
        """Ask a server which slice to compute now; None if there is no answer."""
        return self._member.do(self.links.questions.steal(server, question))

    def lease(
        self,
        epoch: int,
        last: bool,
        want: int,
        done: Sequence[AsyncName],
        wait_s: float,
        holding: Sequence[AsyncName],
    ) -> concurrent.futures.Future[coordinator_pb2.LeaseResponse]:
        """See `Slices.lease`."""
        return self._slices.lease(epoch, last, want, done, wait_s, holding)

    def idle(self) -> None:
        """See `Slices.idle`."""
        self._slices.idle()

    # ---- waiting

    def await_revision(self, timeout_s: float) -> bool:
        """See `Modes.await_revision`."""
        return self._modes.await_revision(timeout_s)

    def wait(self, future: concurrent.futures.Future[T]) -> T:
        """See `Member.wait`."""
        return self._member.wait(future)

    def waits_for(self, whom: str) -> None:
        """See `Member.waits_for`."""
        self._member.waits_for(whom)
