"""What a training script has of the cluster: weights in, contributions out. Blocking; the network is elsewhere."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar, cast

import structlog

from paramserver import errors
from paramserver.compress.casts import Cast
from paramserver.core.consistency import Consistency, Mode
from paramserver.core.events import (
    Latest,
    Want,
)
from paramserver.core.names import AsyncName, Name, SyncName
from paramserver.core.plan import Plan, moving_bytes
from paramserver.core.slices import DataSpec
from paramserver.failpoints import reach
from paramserver.transport.base import Channel
from paramserver.transport.messages import data_to_proto, plan_of, schedule_from_proto
from paramserver.transport.session import JoinOptions, Session
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.worker import early, startup
from paramserver.worker import exchange as exchanges
from paramserver.worker.background import Background
from paramserver.worker.device import Mover, Ticket, mover_for
from paramserver.worker.flat import FlatSpace, Node, NodePool, no_space
from paramserver.worker.inplace import InPlace
from paramserver.worker.links import PushFacts, ShardLinks
from paramserver.worker.outgoing import ANY, Encoded, Outgoing
from paramserver.worker.pace import AsyncPace, Item, SyncPace, make_pace
from paramserver.worker.pulled import Pulled, merge
from paramserver.worker.spare import Spare
from paramserver.worker.staging import Staging

log = structlog.get_logger("paramserver.worker")

T = TypeVar("T")
Connect = Callable[[str], Channel]

# How long a pull that others have seen answered may take here before a new membership interrupts it.
_NEARLY_S = 0.1
# How long a worker that leaves waits for the push that is under way.
_LAST_PUSH_S = 5.0
_LEAVE_S = 2.0
# So many of the last slices tell how long one usually takes.
_SLICES = 7


class Engine:
    """One worker of a job.

    ``connect`` opens a channel to a server's address, ``coordinator`` is the one to the coordinator; ``background`` is
    the loop in which the network runs.
    Use: :meth:`join`, :meth:`register`, then :meth:`next_item` and :meth:`contribute` in turn, :meth:`close`.
    """

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
        self.metrics: dict[str, float] = {}
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
        self._pool: NodePool | None = None
        self._on_weights: Callable[[FlatSpace], None] = lambda weights: None
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
        # The job went back while the script was in its present epoch.
        self._moved = self._look_back = False
        # How long the last slices took the script, and when the present one was handed to it (monotonic seconds).
        self._slice_times: deque[float] = deque(maxlen=_SLICES)
        self._begun_at = 0.0
        # Calls of the script that wait just now.
        self._waiting = 0
        self._early = early.EarlyPushes(background)
        self._pushing: set[concurrent.futures.Future[frozenset[shard_pb2.Outcome]]] = set()

    # ---- facts

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
    def pool(self) -> NodePool:
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

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run in the background and wait: whatever it is, it is not the script that takes this time."""
        self._waiting += 1
        try:
            return self.background.run(work, timeout_s)
        finally:
            self._waiting -= 1

    # ---- getting there

    def join(self) -> None:
        """Become a member of the job; raises what the coordinator refuses with."""

        async def go() -> None:
            self._session = Session(self._coordinator, self.options, self._report)
            await self._session.join()

        self._run(go())

    def promote(self) -> None:
        """An observer becomes a worker: from now on it is given slices, and others wait for it."""
        if self.options.role != types_pb2.ROLE_OBSERVER:
            return

        async def go() -> None:
            former = self.session
            self.options = replace(self.options, role=types_pb2.ROLE_WORKER)
            self._session = Session(former.channel, self.options, self._report)
            await self._session.join()
            await former.leave()

        self._run(go())

    def attach(self, space: Callable[[Plan], FlatSpace]) -> types_pb2.ModelSpec:
        """Take over the model that the job trains, whatever it is, with its present weights; returns its description.

        Raises UserError if the job has none yet.
        """

        model, servers = self._run(startup.present_model(self.session))
        self._start(plan_of(model, servers), space, lambda weights: None, may_upload=False)
        return model

    def register(
        self, model: types_pb2.ModelSpec, space: Callable[[Plan], FlatSpace], on_weights: Callable[[FlatSpace], None]
    ) -> Plan:
        """Register the model, bring or fetch version 0, wait until everybody is there.

        ``space`` makes the flat space of the plan and fills in this worker's initial values; ``on_weights`` is called
        with a space, that one or another, whenever there is another version in it. Raises ModelError if another worker
        registered another model.
        """
        self.state = "registering"
        plan = self._run(startup.register_model(self.session, model))
        self._start(plan, space, on_weights, may_upload=True)
        self.state = "training"
        return plan

    def _start(
        self,
        plan: Plan,
        space: Callable[[Plan], FlatSpace],
        on_weights: Callable[[FlatSpace], None],
        may_upload: bool,
    ) -> None:
        """Connect to the shards, see to it that there is a version 0, and take the present version in."""
        self._weights = space(plan)
        self._plan, self._may_upload, self._on_weights = plan, may_upload, on_weights
        self._enter()

    def _enter(self) -> None:
        """Connect to the shards as they are now, and take the present version in."""
        assert self._plan is not None
        assert self._weights is not None
        plan, initial = self._plan, self._weights.on_cpu()
        # Who only looks needs no memory of its own.
        transport = self.transport if self.options.role == types_pb2.ROLE_WORKER else "grpc"

        async def go() -> list[Pulled]:
            while True:
                if self._links is not None:
                    await self._links.close()
                self._links = await startup.open_links(
                    self.session, plan, self._connect, lambda: self.session.member, self._wait_timeout_s
                )
                self._links.rounding = self.rounding
                try:
                    await startup.share_memory(self.session, self._links, plan, transport)
                    return await startup.first_version(
                        self.session, self._links, initial.read if self._may_upload else None
                    )
                except errors.RolledBackError as error:
                    log.info("the job went back meanwhile", reason=str(error))

        first = self._run(go())
        device, shared = self._weights.device, self.links.shared
        inbox = shared.inbox.space if shared is not None else no_space
        self._arrived()
        if self._mover is not None:
            self._mover.release()
        self._mover = self._mover or mover_for(device)
        self._staging = Staging(plan.layout, self._mover, inbox) if self._mover is not None else None
        near = shared if self._mover is None else None
        self._pool = NodePool(plan.layout, device, inbox if self._mover is None else no_space)
        exact = self.rounding is None
        self.in_place = InPlace(near) if near is not None and exact and InPlace.possible(near) else None
        if self.in_place is None and self._weights.lent:
            self._weights = FlatSpace(plan.layout, device)
        self._install(first)

    # ---- going back

    def rolled_back(self) -> bool:
        """Whether the job has gone back to a checkpoint, and this worker has not followed yet."""
        if self._links is None or self._session is None:
            return False
        view = self._session.view
        return view.timeline > self._links.timeline or view.state == types_pb2.JOB_STATE_RECOVERING

    def follow(self) -> None:
        """The job went back to a checkpoint: wait until it goes on, and go on from there with it."""
        former, self._pace = self.links.timeline, None
        self._early.drop()
        self._moved = self._look_back = True
        for push in list(self._pushing):
            push.cancel()
        self._paced = self._consistency = None
        self.waiting_for = "the job, which goes back to a checkpoint"
        log.info("the job goes back to a checkpoint; waiting for it", version=self.version)

        def ready(view: types_pb2.View) -> bool:
            return view.timeline > former and view.state != types_pb2.JOB_STATE_RECOVERING

        try:
            self._run(self.session.wait_until(ready, lambda view: view.reason or "the servers", self._wait_timeout_s))
            self._enter()
        finally:
            self.waiting_for = ""
        log.info("going on", version=self.version, timeline=self.links.timeline)

    def next_epoch(self, epoch: int) -> int:
        """The epoch after ``epoch``, or an earlier one if the job went back meanwhile."""
        if self.rolled_back():
            self.follow()
        if not self._moved:
            return epoch + 1
        self._moved = False
        return self.open_epoch()

    def finish(self) -> bool:
        """The script has been through all epochs: True when the result is safe, False if there is more to do."""

        def request() -> coordinator_pb2.FinishRequest:
            return coordinator_pb2.FinishRequest(
                member=self.session.member, timeline=self.links.timeline, version=self.version
            )

        if not (self.rolled_back() or self.session.view.checkpoints):
            return True
        self.state = "finishing"
        try:
            if self._pace is not None:
                self._pace.finish()
            reply = self._run(self.session.ask("Coordinator.Finish", request, self._wait_timeout_s))
        except errors.RolledBackError:
            reply = coordinator_pb2.FinishResponse(rolled_back=True)
        finally:
            self.state = "training"
        if not cast(coordinator_pb2.FinishResponse, reply).rolled_back:
            return True
        self.follow()
        self._moved = False
        return False

    def register_data(self, data: DataSpec) -> None:
        """Say how the data is cut; raises DataError if another worker's data differs."""

        def request() -> coordinator_pb2.RegisterDataRequest:
            return coordinator_pb2.RegisterDataRequest(member=self.session.member, data=data_to_proto(data))

        self._run(self.session.ask("Coordinator.RegisterData", request, 60.0))
        self._data = data

    def ensure_data(self) -> None:
        """Without a data set slices are only names. Raises DataError if the job has one."""
        if self._data is None:
            self.register_data(DataSpec(0, 0))

    # ---- the loop

    def next_item(self, epoch: int, last: bool) -> Item | None:
        """The slice to compute now; None if there is none left up to ``epoch``. Waits as long as the mode demands."""
        while True:
            if self._look_back:  # an earlier epoch is the script's to begin, with that epoch's learning rate
                self._look_back = False
                if self.open_epoch() < epoch:
                    return None
            try:
                item = self._present_pace().next(epoch, last)
                self._begun_at = time.monotonic()
            except errors.RolledBackError:
                self.follow()
                continue
            if item is not None or not self.mode_changed():
                return item

    def ahead(self, epoch: int) -> Iterator[Item]:
        """The slices that are likely to come, beginning with the one that :meth:`next_item` has given."""
        assert self._pace is not None, "an item comes before those ahead of it"
        return self._ahead(self._pace, epoch)

    def _ahead(self, pace: SyncPace | AsyncPace, epoch: int) -> Iterator[Item]:
        """Ends with the pace: one of before the job went back must not lease, nor say what it has done."""
        items = pace.ahead(epoch)
        while self._pace is pace and (item := next(items, None)) is not None:
            yield item

    def contribute(self, item: Item, node: Node, groups: Sequence[types_pb2.GroupHypers]) -> bool:
        """Hand in what a slice yielded; returns with the next version, or with more work on this one.

        Without a data set the name of a slice does not say what it yields: False then means that another worker's
        contribution of this name counts instead of this one.
        """
        reach("worker.after_grad", self.version)
        node.settle()
        self._slice_times.append(time.monotonic() - self._begun_at)
        self.slices += 1
        self.samples += node.samples
        assert self._pace is not None, "an item comes before its contribution"
        try:
            return self._pace.contribute(item, node, groups)
        except errors.RolledBackError:
            self.follow()
            if self.named_by_data:  # somebody computes it again
                return True
            raise errors.RolledBackError(
                f"a server was lost, and the job went back to version {self.version}: "
                "push again what was pushed since then"
            ) from None

    def _present_pace(self) -> SyncPace | AsyncPace:
        self.ensure_data()
        assert self._data is not None
        if self.rolled_back():
            raise errors.RolledBackError("the job goes back to a checkpoint")
        if self._pace is None or self.mode_changed():
            if self._pace is not None:
                self._pace.finish()
                log.info("mode", now=str(self.consistency), version=self.version)
            schedule = schedule_from_proto(self.session.view, self._data.slices_per_epoch)
            if self.consistency.mode is Mode.SYNC and schedule.base_version > self.version:
                self._install(self._watch(self.background.submit(self.links.pull_version(schedule.base_version))))
            self._paced = self.consistency
            self.outgoing.reset()
            self._pace = make_pace(self, self._paced, schedule)
        return self._pace

    _paced: Consistency | None = None

    def mode_changed(self) -> bool:
        """True if the mode in force is no longer the one of the pace; a mere change of staleness is taken in here."""
        now = self.consistency
        if self._paced is None or now.revision == self._paced.revision:
            return False
        if now.mode is self._paced.mode is Mode.ASYNC and now.revision == self._paced.revision + 1:
            self._paced = now
            return False
        return now.mode is Mode.ASYNC or self.session.consistency().revision >= now.revision

    # ---- for the pace

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
            results = self._watch(pulling, moved)
        else:
            results = self._watch(self.background.submit(waiting), moved)
            if isinstance(results, int) or results is None:
                pulling.cancel()
        if isinstance(results, int):
            return results
        if not results and self._run(self.links.published(version)):
            # Whoever left had seen this step complete: nothing of it is to be computed again.
            results = self._watch(self.background.submit(self.links.pull_version(version)))
        if results is not None:
            self._install(results)
        return None

    def begin_pull(self, version: int) -> concurrent.futures.Future[list[Pulled]]:
        """Ask every shard for ``version`` or a later one."""
        self._arrived()
        return self._early.pull(version) or self.background.submit(self.links.pull_version(version, ahead=True))

    def spare(self) -> Spare:
        """What fills the time in which a worker waits for others."""
        return Spare(self.links)

    def ask_for_work(self, spare: Spare, question: shard_pb2.ClaimRequest) -> shard_pb2.ClaimResponse | None:
        """Ask a server which slice to compute now; None if there is no answer."""
        return self._watch(self.background.submit(spare.ask(question)))

    def pull_now(self, want: Want) -> int | None:
        """Pull at a clock from every shard; returns the slowest clock, None if the job is synchronous by now."""
        self._arrived()
        try:
            results = self._watch(self.background.submit(self.links.pull(want)))
        except errors.FencedError:
            raise
        except errors.StaleViewError:
            self.await_revision(self._wait_timeout_s)
            return None
        self._install(results)
        return max(result.min_clock for result in results)

    def pull_latest(self) -> None:
        """Take in the newest weights that all shards can give."""
        try:
            self._pull_latest()
        except errors.RolledBackError:
            self.follow()

    def _pull_latest(self) -> None:
        self._arrived()
        if self.consistency.mode is Mode.SYNC:
            self._install(self._watch(self.background.submit(self.links.pull_version(self.version))))
        else:
            self._install(self._watch(self.background.submit(self.links.pull(Latest()))))

    def push(
        self, name: Name, node: Node, groups: Sequence[types_pb2.GroupHypers], clock: int, flush: bool = False
    ) -> concurrent.futures.Future[frozenset[shard_pb2.Outcome]]:
        """Begin to bring a contribution to all shards; its memory is reused afterwards.

        ``flush``: nothing of it is left for later ones. Raises what `Outgoing.encode` raises.
        """
        self._arrived()
        ticket, pool = None, self.pool
        if self._staging is not None:
            of_device, pool = node, self._staging.pool
            node, ticket = self._staging.fetch(node)
            if self.outgoing.lossy:
                ticket.wait()
        space = node.space
        position = name.lo if isinstance(name, SyncName) else ANY
        encoded = self.outgoing.encode(position, node, space, flush) if self.outgoing.lossy else {}
        facts = self._facts(name, node, groups, clock, encoded)
        begun = self._early.complete(node, facts)
        future = begun or self.background.submit(_when(ticket, self.links.push(facts, space.read)))
        self._pushing.add(future)
        future.add_done_callback(self._pushing.discard)
        if begun is not None:  # gives the memory back itself
            return future
        if self._staging is not None:
            gpu = self.pool
            future.add_done_callback(lambda _: gpu.give(of_device))
        if space.number is None:
            future.add_done_callback(lambda _: pool.give(node))
        elif isinstance(name, SyncName):  # servers read it when they have all of the step
            pool.lend(node, name.step, future.done)
        else:  # answered when it is in a version; after an error a server may still be about to read it
            future.add_done_callback(lambda done: pool.give(node) if _succeeded(done) else None)
        return future

    def exchange(
        self, name: SyncName, node: Node, groups: Sequence[types_pb2.GroupHypers], patience_s: float
    ) -> bool | None:
        """Push a contribution, and wait so long for the version that it is the last one of; both without the loop.

        True: the version is installed. False: the contribution is counted. None: it has to be pushed, as ever.
        """
        if self._staging is not None or self.outgoing.lossy or self.rolled_back() or not self.session.goes_on:
            return None
        wait_s = min(patience_s, exchanges.MOST_S)
        self._waiting += 1
        try:
            found = exchanges.exchange(self.links, self._facts(name, node, groups, 0, {}), name.step + 1, wait_s)
        finally:
            self._waiting -= 1
        if found is False:
            return None
        self.pool.lend(node, name.step, lambda: True)
        if found is True:
            return False
        self._install(found)
        return True

    def keep_residuals(self, positions: range) -> None:
        """These slice positions belong to this worker; what was left out of contributions to others is lost."""
        if self.outgoing.keep(positions) and not self.rolled_back():
            log.warning(
                "the workers have changed: what compression had left out of some contributions is lost, so the result "
                "will have other bits than that of an undisturbed run (see docs/compression.md)"
            )

    def _facts(
        self,
        name: Name,
        node: Node,
        groups: Sequence[types_pb2.GroupHypers],
        clock: int,
        encoded: Mapping[int, Encoded],
        used: frozenset[int] | None = None,
    ) -> PushFacts:
        """What is said of a contribution. ``used``: what it is going to have, if it is not complete yet."""
        present = frozenset() if node.overflow else frozenset(node.used)
        return PushFacts(
            name=name,
            samples=node.samples,
            overflow=node.overflow,
            used=present if used is None else used,
            groups=groups,
            base_versions=list(self._versions),
            clock=clock,
            schedule=self.schedule,
            clip_norm=self.clip_norm if isinstance(name, SyncName) else 0.0,
            nonce=secrets.randbits(63) | 1,
            node=node.space.number,
            encoded=encoded,
        )

    def begin_early(
        self, item: Item, samples: int, used: frozenset[int], groups: Callable[[], Sequence[types_pb2.GroupHypers]]
    ) -> tuple[Node, early.EarlyChunks] | None:
        """Begin to push what ``item`` is going to yield, while it is computed; None where that is not possible.

        ``used``: the tensors of which it is expected to have gradients or changes. Returns the node to fill, which
        :meth:`contribute` must get, and who is to be told of each tensor in it.
        """
        possible = (
            isinstance(self._pace, SyncPace)
            and self._pace.alone(item)
            and self.named_by_data
            and self.links.shared is None
            and not self.outgoing.lossy
            and self.pool.device.type == "cpu"
            and bool(used)
            and not self.rolled_back()
            and moving_bytes(self.links.plan.layout.chunks) >= early.LEAST_BYTES
        )
        if not possible:
            return None
        node = self.pool.take()
        node.samples = samples
        facts = self._facts(item.name, node, groups(), 0, {}, used)
        return node, self._early.begin(self.links, node, facts, self.pool)

    def discard(self, node: Node) -> None:
        """A node that is not contributed."""
        if self._early.has(node):
            self._early.drop()
        else:
            self.pool.give(node)

    def lease(
        self,
        epoch: int,
        last: bool,
        want: int,
        done: Sequence[AsyncName],
        wait_s: float,
        holding: Sequence[AsyncName] | None = None,
    ) -> concurrent.futures.Future[coordinator_pb2.LeaseResponse]:
        """Report finished slices and those ``holding`` (None: what the pace holds), and ask for more."""
        if holding is None:
            holding = self._pace.holding if isinstance(self._pace, AsyncPace) else ()
        # That of `done`: this may be sent again after the job went back, and then nothing of it is done.
        timeline = self.links.timeline

        async def go() -> coordinator_pb2.LeaseResponse:
            deadline = time.monotonic() + self._wait_timeout_s
            while True:
                request = coordinator_pb2.LeaseRequest(
                    member=self.session.member,
                    max_epoch=epoch,
                    want=want,
                    done=[shard_pb2.AsyncName(epoch=name.epoch, index=name.index) for name in done],
                    holding=[shard_pb2.AsyncName(epoch=name.epoch, index=name.index) for name in holding],
                    last_epoch=last,
                    wait_s=wait_s,
                    revision=self._paced.revision if self._paced else 0,
                    timeline=timeline,
                )
                try:
                    reply = await self.session.channel.call("Coordinator.Lease", request, timeout=wait_s + 30.0)
                    return cast(coordinator_pb2.LeaseResponse, reply)
                except errors.RolledBackError:
                    raise
                except (errors.RetryableError, errors.FencedError) as error:
                    self.session.check()
                    if time.monotonic() > deadline:
                        raise errors.DeadlineError(
                            f"no slices could be leased for {self._wait_timeout_s:g} s: {error}"
                        ) from error
                    await asyncio.sleep(0.2)

        return self.background.submit(go())

    def open_epoch(self) -> int:
        """The epoch in which the job stands."""
        while self.consistency.mode is Mode.ASYNC:
            try:
                return self.wait(self.lease(0, False, 0, (), 0.0)).open_epoch
            except errors.RolledBackError:
                self.follow()
        if self._data is None or self._data.slices_per_epoch == 0:
            return 0
        if self.rolled_back():
            self.follow()
        return schedule_from_proto(self.session.view, self._data.slices_per_epoch).step(self.version).epoch

    def idle(self) -> None:
        """Hold nobody back."""
        self.wait(self.background.submit(self.links.idle()))

    def await_revision(self, timeout_s: float) -> bool:
        """Wait for the setting that comes after the pace's; False if it was not announced in time."""
        revision = self._paced.revision if self._paced else 0
        self.waiting_for = "the change of mode"
        try:
            self._run(
                self.session.wait_until(
                    lambda view: view.consistency.revision > revision, lambda view: "the change of mode", timeout_s
                )
            )
        except errors.DeadlineError:
            return False
        finally:
            self.waiting_for = ""
        return True

    def wait(self, future: concurrent.futures.Future[T]) -> T:
        """Wait for one piece of background work, watching the job."""
        return self._watch(future)

    def wait_all(self, pushes: Sequence[concurrent.futures.Future[frozenset[shard_pb2.Outcome]]]) -> bool:
        """Wait for several pushes; raises the first error. False if, without a data set, one was not counted."""
        return all([self._counted(push) for push in pushes])

    def _counted(self, push: concurrent.futures.Future[frozenset[shard_pb2.Outcome]]) -> bool:
        try:
            outcomes = self._watch(push, last_s=_LAST_PUSH_S)
        except errors.StaleViewError as error:
            if type(error) is not errors.StaleViewError:
                raise
            # The mode has changed before this one arrived; with a data set, what it brought has been done by others.
            log.info("a contribution came too late", reason=str(error))
            return self.named_by_data
        if self.named_by_data or outcomes == {shard_pb2.OUTCOME_ACCEPTED}:
            return True
        if outcomes == {shard_pb2.OUTCOME_DUPLICATE}:
            return False
        raise errors.ParamServerError(
            "somebody joined or left at this moment, and only some of the servers have counted this push: "
            "pull to see what is there, and push what is missing"
        )

    @property
    def named_by_data(self) -> bool:
        """True if equal names of slices mean equal contributions; False if slices are only numbered."""
        return self._data is not None and self._data.slice_size > 0

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

    def _install(self, results: list[Pulled]) -> None:
        assert self._weights is not None
        if self.in_place is not None:
            self._weights = self.in_place.install(results)
        else:
            self._bring(results)
        self._versions = [result.version for result in results]
        self.pool.installed(self.version)
        if self._staging is not None:
            self._staging.pool.installed(self.version)
        self.skipped = max(result.skipped for result in results)
        self.taken = results[0].taken
        self.heard_schedule = max(result.schedule for result in results)
        newest = max((result.consistency for result in results), key=lambda c: c.revision)
        if self._consistency is None or newest.revision > self._consistency.revision:
            self._consistency = newest
        self._on_weights(self._weights)
        reach("worker.after_pull", self.version)

    def _bring(self, results: list[Pulled]) -> None:
        """Copy what was pulled to where the model is; that may go on when this returns."""
        assert self._weights is not None
        if self._mover is None:
            self._weights.write(merge(results), self.rounding)
            return
        self._arrived()
        for result in results:
            if result.slot is not None:
                for _, source in self._weights.places(result.chunks, self.rounding):
                    self._mover.lock(source, writable=False)
        places = list(self._weights.places(merge(results), self.rounding))
        self._bringing = self._mover.bring([source for _, source in places], [target for target, _ in places])

    def _arrived(self) -> None:
        """Wait until weights are no longer read where they came from; before that nobody asks for another version."""
        if self._bringing is not None:
            self._bringing.wait()
            self._bringing = None

    # ---- leaving

    def _report(self) -> coordinator_pb2.SessionRequest:
        links = self._links
        report = coordinator_pb2.WorkerReport(
            version=min(self._versions, default=0),
            clock=self._pace.clock if isinstance(self._pace, AsyncPace) else min(self._versions, default=0),
            epoch=self.epoch,
            samples=self.samples,
            slices=self.slices,
            state=self.state,
            waiting_for=self.waiting_for or (links.waiting_for if links else ""),
            metrics=dict(self.metrics),
            transport=links.kind if links else "",
            epochs_planned=self.epochs_planned,
            at_work=self.state == "training" and not self.through and not self._waiting,
            slice_s=median(times) if (times := list(self._slice_times)) else 0.0,
        )
        return coordinator_pb2.SessionRequest(worker=report)

    def close(self) -> None:
        """Hand in what is left and leave. Does not stop the background loop.

        The coordinator must hear that the script has done all its epochs: waits for one for ``join_timeout_s``.
        """
        if self._session is None:
            return
        finished = self.through and self._session.failure is None
        self._early.drop()
        try:
            if self._pace is not None and self._session.failure is None:
                self._pace.finish()
        except errors.RolledBackError as error:
            log.info("leaving, while the job goes back to a checkpoint", reason=str(error))
        finally:
            self.state = "done"
            self._take_home()
            timeout_s = self.options.join_timeout_s if finished else _LEAVE_S
            self._run(self._leave(timeout_s, finished=finished))

    def _take_home(self) -> None:
        """Whoever has left is read from no more: the script keeps a copy of the last weights."""
        if self.in_place is not None and self._weights is not None:
            lent, self._weights = self._weights, FlatSpace(self._weights.layout, self._weights.device)
            self._weights.copy_of(lent)
            self.in_place = None
            self._on_weights(self._weights)

    def abandon(self, reason: str) -> None:
        """Leave at once; what is not handed in goes to others. ``reason``: of a script that failed, else empty."""
        self._early.drop()
        if self._session is not None:
            self._run(self._leave(_LEAVE_S, failure=reason), _LEAVE_S + 1.0)

    async def _leave(self, timeout_s: float, *, finished: bool = False, failure: str = "") -> None:
        assert self._session is not None
        if under_way := [asyncio.wrap_future(push) for push in list(self._pushing) if not push.done()]:
            # So that no shard has a slice that another one lacks, where that can be helped.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(timeout_s, _LAST_PUSH_S)):
                    await asyncio.gather(*under_way, return_exceptions=True)
        await self._session.leave(timeout_s, finished=finished, failure=failure)
        if self._links is not None:
            await self._links.close()
        if self._mover is not None:
            self._mover.release()
        await self._session.channel.close()


async def _when(ticket: Ticket | None, push: Coroutine[Any, Any, T]) -> T:
    """Push what has been copied by then."""
    try:
        if ticket is not None:
            await asyncio.get_running_loop().run_in_executor(None, ticket.wait)
    except BaseException:
        push.close()
        raise
    return await push


def _succeeded(future: concurrent.futures.Future[Any]) -> bool:
    return not future.cancelled() and future.exception() is None
