"""What all parts of a worker's engine share: who is asked, what is known, and how to wait in the script's thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from paramserver import errors
from paramserver.compress.casts import Cast
from paramserver.core.layout.plan import Plan
from paramserver.core.versions.consistency import Consistency, Mode
from paramserver.core.work.slices import DataSpec
from paramserver.membership.session import JoinOptions, Session
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2, types_pb2
from paramserver.worker.background import Background
from paramserver.worker.device import Mover, Ticket
from paramserver.worker.flat import FlatSpace, PartialSumPool
from paramserver.worker.gradients import early
from paramserver.worker.gradients.outgoing import Outgoing
from paramserver.worker.gradients.staging import Staging
from paramserver.worker.links import ShardLinks
from paramserver.worker.memory.inplace import InPlace
from paramserver.worker.pace import AsyncPace, SyncPace
from paramserver.worker.script.handed import HandedIn
from paramserver.worker.script.state import NOTHING
from paramserver.worker.startup import Offer
from paramserver.worker.weights.incoming import IncomingWeights
from paramserver.worker.weights.pulled import Pulled
from paramserver.worker.weights.reads import Reads

T = TypeVar("T")
Connect = Callable[[str], Channel]

# How long a pull that others have seen answered may take here before a new membership interrupts it.
_NEARLY_S = 0.1
# So many of the last slices tell how long one usually takes.
_SLICES = 7


class Host:
    """A worker but for what it does; the other parts of an engine build on it."""

    def __init__(
        self,
        background: Background,
        connect: Connect,
        coordinator: Channel,
        options: JoinOptions,
        wait_timeout_s: float = 600.0,
        transport: str = "grpc",
    ) -> None:
        self.background = background
        self.options = options
        # "shm": share memory with all servers, "auto": with those on this host, "grpc": with none.
        self.transport = transport
        self.state = "joining"
        self.waiting_for = ""
        self.samples = 0
        self.slices = 0
        self.epoch = 0
        self.epochs_planned = 0
        # The script has been through all its epochs.
        self.through = False
        # The last version that it has trained is a checkpoint.
        self.safe = False
        self.metrics: dict[str, float] = {}
        # The slice that the script has.
        self.computing: types_pb2.SliceRef | None = None
        self.skipped = 0
        # Slices of the last step that were given to others than their owners.
        self.taken: frozenset[int] = frozenset()
        # How this script advances its schedule, as far as it has shown; and what the shards have heard of others.
        self.schedule: shard_pb2.Schedule = shard_pb2.SCHEDULE_OTHER
        self.heard_schedule: shard_pb2.Schedule = shard_pb2.SCHEDULE_UNSPECIFIED
        # How contributions leave, and what weights are rounded to on their way here; set before there is a model.
        self.outgoing = Outgoing()
        self.rounding: Cast | None = None
        # Above 0: the global norm to which the gradient of the present step is clipped.
        self.clip_norm = 0.0
        self._connect = connect
        self._coordinator = coordinator
        self._wait_timeout_s = wait_timeout_s
        self._session: Session | None = None
        self._links: ShardLinks | None = None
        self._weights: FlatSpace | None = None
        self._pool: PartialSumPool | None = None
        self._on_weights: Callable[[FlatSpace], None] = lambda weights: None
        # Called between two slices, while all weights are there: what the script has written to them would be lost.
        self.before_next: Callable[[], None] = lambda: None
        # Called before this worker leaves, while all weights are there.
        self.before_leaving: Callable[[], None] = lambda: None
        # What the present weights were made of, where servers need not have it any more.
        self._received: list[Pulled] = []
        # Of a model on a device: what copies between it and main memory, contributions on their way, weights on theirs.
        self._mover: Mover | None = None
        self._staging: Staging | None = None
        self._bringing: Ticket | None = None
        # Set where the weights are used where servers have them.
        self.in_place: InPlace | None = None
        self._versions: list[int] = []
        self._consistency: Consistency | None = None
        self._data: DataSpec | None = None
        self._pace: SyncPace | AsyncPace | None = None
        self._plan: Plan | None = None
        self._may_upload = False
        # The optimizer state that goes with version 0, until there is one.
        self._brought = NOTHING
        # What the script wants to go on from, while it is in ``ctx.load``.
        self._loads: Offer | None = None
        # The job went back while the script was in its present epoch.
        self._moved = self._look_back = False
        # How long the last slices took the script, and when the present one was handed to it (monotonic seconds).
        self._slice_times: deque[float] = deque(maxlen=_SLICES)
        self._begun_at = 0.0
        # Calls of the script that wait just now.
        self._waiting = 0
        self._early = early.EarlyPushes(background)
        self.handed = HandedIn()
        self._pushing: set[concurrent.futures.Future[frozenset[shard_pb2.Outcome]]] = set()
        # What tells of reads of the parameters, where the script may begin before all weights are there; what it
        # begins with just now; how long it has waited for weights in the present slice.
        self.reads: Reads | None = None
        self._incoming: IncomingWeights | None = None
        self.stalled_s = 0.0
        # The setting that the pace was made for.
        self._paced: Consistency | None = None

    @property
    def session(self) -> Session:
        """The tie to the coordinator; exists after :meth:`join`."""
        assert self._session is not None, "join first"
        return self._session

    @property
    def links(self) -> ShardLinks:
        """The shards; exist after :meth:`register`."""
        assert self._links is not None, "register a model first"
        return self._links

    @property
    def pool(self) -> PartialSumPool:
        """Memory for contributions."""
        assert self._pool is not None, "register a model first"
        return self._pool

    @property
    def version(self) -> int:
        """The version of the weights at hand; asynchronous: the oldest over the shards."""
        return min(self._versions)

    @property
    def generation(self) -> tuple[int, ...]:
        """Which membership the view at hand has: the term of its coordinator, the generation, who is stalled."""
        view = self.session.view
        return view.term, view.generation, *(() if self.outgoing.keeps else view.stalled)

    @property
    def consistency(self) -> Consistency:
        """The newest setting that this worker has heard of, from the shards or from the coordinator."""
        announced = self.session.consistency()
        if self._consistency is None or announced.revision > self._consistency.revision:
            return announced
        return self._consistency

    def place(self) -> tuple[int, int]:
        """(position among the workers that get on, how many there are); position -1: this worker is none of them.

        Where slices cannot be moved, those that get nowhere have their share, too.
        """
        view = self.session.view
        stalled = () if self.outgoing.keeps else view.stalled
        members = [worker.member for worker in view.workers if worker.member not in stalled]
        mine = self.session.member
        return (members.index(mine) if mine in members else -1), len(members)

    @property
    def named_by_data(self) -> bool:
        """True if equal names of slices mean equal contributions; False if slices are only numbered."""
        return self._data is not None and self._data.slice_size > 0

    def rolled_back(self) -> bool:
        """Whether the job has gone back to a checkpoint, and this worker has not followed yet."""
        if self._links is None or self._session is None:
            return False
        view = self._session.view
        return view.timeline > self._links.timeline or view.state == types_pb2.JOB_STATE_RECOVERING

    def mode_changed(self) -> bool:
        """True if the mode in force is no longer the one of the pace; a mere change of staleness is taken in here."""
        now = self.consistency
        if self._paced is None or now.revision == self._paced.revision:
            return False
        if now.mode is self._paced.mode is Mode.ASYNC and now.revision == self._paced.revision + 1:
            self._paced = now
            return False
        return now.mode is Mode.ASYNC or self.session.consistency().revision >= now.revision

    def wait(self, future: concurrent.futures.Future[T]) -> T:
        """Wait for one piece of background work, watching the job."""
        return self._watch(future)

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run in the background and wait: whatever it is, it is not the script that takes this time."""
        self._waiting += 1
        try:
            return self.background.run(work, timeout_s)
        finally:
            self._waiting -= 1

    def _watch(
        self, future: concurrent.futures.Future[T], until: Callable[[], bool] | None = None, last_s: float = 0.0
    ) -> T:
        """The future's result; gives it up (returning None) when ``until`` holds, and raises if the job fails.

        A worker that is asked to leave still waits ``last_s`` for it.
        """

        async def watch() -> bool:
            inner: asyncio.Future[Any] = asyncio.wrap_future(future)
            changed: asyncio.Task[int] | None = None
            try:
                while True:
                    seen = self.session.editions
                    try:
                        self.session.check()
                    except errors.EndedError:
                        await asyncio.wait([inner], timeout=last_s)
                        raise
                    if self.rolled_back():
                        raise errors.RolledBackError("the job goes back to a checkpoint")
                    if until is not None and until():
                        # Often somebody left because the version is out already: then there is nothing to take over.
                        await asyncio.wait([inner], timeout=_NEARLY_S)
                        return inner.done()
                    changed = asyncio.ensure_future(self.session.changed(seen))
                    await asyncio.wait([inner, changed], return_when=asyncio.FIRST_COMPLETED)
                    if inner.done():
                        return True
            finally:
                if changed is not None:
                    changed.cancel()
                if not inner.done():
                    inner.cancel()
                elif not inner.cancelled():
                    inner.exception()  # it is raised from the future; asyncio would say that nobody has looked

        if future.cancelled():
            self.session.check()  # says why
            if self.rolled_back():
                raise errors.RolledBackError("the job goes back to a checkpoint")
        if future.done():
            return future.result()
        if self._run(watch()):
            return future.result()
        future.cancel()
        return cast(T, None)
