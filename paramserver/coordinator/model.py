"""The model of the job: its layout, the servers that hold its chunks, and the worker that uploads version 0."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Protocol

import structlog

from paramserver import errors
from paramserver.coordinator import ports
from paramserver.coordinator.history.checkpoints import Checkpoints
from paramserver.coordinator.leadership.journal import Journal
from paramserver.coordinator.leadership.keeping import Keeping
from paramserver.coordinator.leadership.members import for_servers
from paramserver.coordinator.watching.main import Main
from paramserver.core.job.main_worker import uploader
from paramserver.core.job.membership import Member, Role
from paramserver.core.layout.placement import Seat, choose
from paramserver.core.layout.plan import Kind, Layout, link_chunk_bytes, moving_bytes
from paramserver.core.work.loading import Load
from paramserver.tensors.hypers import groups_from_proto, optimizers_of
from paramserver.transport.addresses import host_of, loopback
from paramserver.v1 import coordinator_pb2, shard_pb2, types_pb2
from paramserver.wire.messages import consistency_to_proto, first_difference, layout_of

log = structlog.get_logger("paramserver.coordinator")

# If a server does not publish version 0, it is told again after so long.
_AGAIN_S = 0.5


class _Loads(Protocol):
    """See `coordinator.history.loads`."""

    under_way: Load | None
    version: int

    def callers(self) -> frozenset[int]: ...

    def complete(self) -> None: ...


class _Job(ports.Stage, ports.Commands, ports.Holding, ports.Ends, Protocol):
    checkpoints: Checkpoints
    journal: Journal
    keeping: Keeping
    main: Main

    @property
    def recovery(self) -> ports.GoingBack: ...

    @property
    def loads(self) -> _Loads: ...

    @property
    def replication(self) -> ports.Replicating: ...

    def missing(self) -> str: ...

    def worker_infos(self) -> list[types_pb2.WorkerInfo]: ...


class ModelRegistry:
    """The first model registered is the job's. One worker at a time holds the *grant* to upload version 0."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self.model: types_pb2.ModelSpec | None = None
        self.digest = ""
        self.initialiser = 0
        self.grant = 0
        self.ready = False
        # Whether all servers know their part of the model.
        self.configured = False
        # Whether servers are told to publish version 0 at the moment.
        self._publishing = False
        # Whether it is decided how much of the model each server takes.
        self._placed = False
        self.registered: list[int] = []
        # Whether scripts have registered it, and not clients.
        self._scripts = False
        # Digest of the optimizer state that the first worker brings for version 0; None: no worker has registered.
        self._state_digest: str | None = None
        self._lock = asyncio.Lock()
        # The timeline whose version 0 is being saved as the first checkpoint.
        self._saving_on = -1

    async def register(self, request: coordinator_pb2.RegisterModelRequest) -> coordinator_pb2.RegisterModelResponse:
        """Take the first model, and compare later ones with it. Raises ModelError that names the first difference."""
        async with self._lock:
            if self.model is None:
                await self._first(request.model)
            assert self.model is not None
            difference = first_difference(self.model, request.model)
            if difference:
                raise errors.ModelError(f"this worker's model differs: {difference}")
            self._compare_state(request.state_digest)
            await self.place()
            if request.member not in self.registered:
                self.registered.append(request.member)
            self._scripts = self._scripts or request.script
            if not self.initialiser and not self.ready and not self._job.recovery.under_way:
                self._give_grant()
        await self._job.refresh()
        # A worker that has this answer does not register again: another coordinator must know that it has.
        await self._job.keeping.settled()
        return coordinator_pb2.RegisterModelResponse(
            model=self.model, shards=len(self._job.holders), layout_digest=self.digest
        )

    def _compare_state(self, digest: str) -> None:
        """Workers that may upload version 0 must bring the same optimizer state. Later the state is not compared."""
        if self.ready or self._job.recovery.resuming:
            return
        if self._state_digest is None:
            self._state_digest = digest
        elif self._state_digest != digest:
            ours, theirs = ("with" if each else "without" for each in (digest, self._state_digest))
            how = f"{ours} loaded state, the first worker's comes {theirs}" if ours != theirs else "with another state"
            raise errors.ModelError(
                f"this worker's optimizer comes {how}: load the same optimizer state in every worker before ctx.prepare"
            )

    async def _first(self, model: types_pb2.ModelSpec) -> None:
        # In a thread, since a hundred thousand tensors take a while.
        layout = await asyncio.to_thread(layout_of, model, self._job.options.max_model_bytes)
        if not any(tensor.kind is Kind.PARAMETER for tensor in layout.tensors):
            raise errors.ModelError("the model has no parameters to train: give the optimizer at least one")
        groups = groups_from_proto(model.optimizer.groups)
        optimizers = optimizers_of(model.optimizer)
        optimizers.validate(groups)
        if any(t.kind is Kind.PARAMETER and t.group >= len(groups) for t in layout.tensors):
            raise errors.ModelError("a parameter names a parameter group that the optimizer does not have")
        optimizers.validate_shapes(layout.tensors)
        if not model.chunk_bytes and (chunk_bytes := await self._chunk_bytes(layout)):
            finer = types_pb2.ModelSpec(chunk_bytes=chunk_bytes)
            finer.MergeFrom(model)
            model, layout = finer, layout_of(finer)
        self.adopt(model, layout.digest)
        try:
            await self.place()
            servers = await self._all_servers()
            await self._job.shards.ask("Shard.Configure", self.configuration, shard_pb2.ConfigureResponse)
        except BaseException:
            self.model, self.digest = None, ""
            raise
        self.configured = True
        log.debug("model", tensors=len(layout.tensors), chunks=len(layout.chunks), servers=len(servers))

    async def _chunk_bytes(self, layout: Layout) -> int:
        """The size of chunks that suits the links between hosts; 0 if all servers are on this one."""
        hosts = [host_of(server.address) for server in await self._all_servers()]
        if not any(host and not loopback(host) for host in hosts):
            return 0
        return link_chunk_bytes(moving_bytes(layout.chunks), self._job.options.link_mbps)

    def configuration(self, shard: int) -> shard_pb2.ConfigureRequest:
        """The model, and which part of it this shard is."""
        job = self._job
        return shard_pb2.ConfigureRequest(
            job=job.options.job,
            generation=job.members.generation,
            timeline=job.timeline,
            shard=shard,
            shards=len(job.holders),
            model=self.model,
            layout_digest=self.digest,
            consistency=consistency_to_proto(job.consistency),
            workers=job.worker_infos(),
            peers=job.shards.infos(),
            term=job.term,
            checkpoints=job.checkpoints.options.place,
            checkpoint_every=job.checkpoints.options.every,
            record=for_servers(job.journal.record_now),
        )

    def adopt(self, model: types_pb2.ModelSpec, digest: str) -> None:
        """Take over a model, such as that of a checkpoint; workers must bring the same. :meth:`place` comes later."""
        self.model, self.digest, self._placed = types_pb2.ModelSpec(), digest, False
        self.model.CopyFrom(model)
        self.model.ClearField("shares")

    async def place(self) -> None:
        """Decide how much of the model each server takes, once all are there. The decision holds for the whole job.

        Raises ConfigError if the servers do not allow what is configured, DeadlineError if some are missing.
        """
        if self._placed:
            return
        servers = await self._all_servers()
        if self._placed or self.model is None:  # another call has placed it meanwhile
            return
        options = self._job.options
        seats = [Seat(host_of(server.address) or server.address, server.beside_worker) for server in servers]
        holders = self._job.holders
        try:
            by_server = choose(options.placement, partial(layout_of, self.model), seats, options.workers)
            shares = [by_server[primary] for primary in holders.primaries] if by_server else []
        except ValueError as error:
            raise errors.ConfigError(f"cluster.placement is {options.placement}, but {error}") from error
        placed = types_pb2.ModelSpec(shares=shares)
        placed.MergeFrom(self.model)
        self.model, self._placed = placed, True
        if shares:
            log.info("servers beside workers take a part of the model", shares=shares)

    def restored(self, published: bool) -> None:
        """All servers are set up on another timeline. Without a published version, version 0 is uploaded again."""
        self.configured = True
        if published:
            self.ready = True
        else:
            self.upload_again()

    def upload_again(self) -> None:
        """Have a worker upload version 0 again, since the upload was lost before it was published."""
        self.ready = False
        self._give_grant()

    def withdraw(self) -> None:
        """No upload under an earlier grant counts any more."""
        self.grant += 1

    def load_undone(self) -> None:
        """The job goes back in the middle of a load: the version before the load was published."""
        self.ready = True

    def begin_load(self) -> None:
        """Scripts load other weights: another version is uploaded. See `coordinator.history.loads`."""
        self.ready, self.initialiser = False, 0
        self.grant += 1

    async def _all_servers(self) -> list[Member]:
        deadline = time.monotonic() + self._job.options.call_timeout_s
        while len(servers := self._job.members.of(Role.SERVER)) < self._job.options.servers:
            if not await self._job.changes.wait(deadline):
                raise errors.DeadlineError(f"waited for the servers: {self._job.missing()}")
        return servers

    def restore(
        self, model: types_pb2.ModelSpec, record: coordinator_pb2.JobRecord, workers: list[int], ready: bool
    ) -> None:
        """Go on from the record of an earlier coordinator. ``ready``: some server has published version 0."""
        self.model, self.digest, self.ready, self._placed = model, record.layout, ready, True
        self.grant = record.view.grant
        self.registered = workers
        self.configured = True
        if not self.ready:
            self._give_grant()

    def _give_grant(self) -> None:
        loads = self._job.loads
        first = loads.under_way is None
        able = self.registered if first else sorted(loads.callers())
        alive = [ident for ident in able if ident in self._job.members]
        self.initialiser = uploader(alive, self._job.main.member, self._scripts and first)
        self.grant += 1 if self.initialiser else 0

    def look(self) -> None:
        """There may be another main worker: let it upload version 0 if nobody does."""
        if self._nobody_uploads:
            self._give_grant()

    @property
    def _nobody_uploads(self) -> bool:
        """Whether version 0 is wanted, and nobody has the grant to upload it."""
        job = self._job
        begins = not (self.ready or job.recovery.under_way or job.loads.under_way is not None)
        return begins and bool(self.registered) and not self.initialiser

    def waiting(self) -> str:
        """The main worker, if version 0 waits for its weights, in words; else empty."""
        main = self._job.members.get(self._job.main.member)
        if main is None or not self._nobody_uploads:
            return ""
        return f"the weights of {main.name}, the main worker, which has not come to ctx.prepare of its model"

    def worker_gone(self, ident: int) -> None:
        """If this worker was uploading version 0, let another one upload it from the start."""
        self.registered = [one for one in self.registered if one != ident]
        if ident == self.initialiser and not self.ready and not self._publishing:
            self.initialiser = 0
            if not self._job.recovery.under_way:
                self._give_grant()

    async def initialized(self, request: coordinator_pb2.InitializeDoneRequest) -> None:
        """The holder of the grant has uploaded version 0 to every server: publish it on all of them.

        Goes on if the caller dies meanwhile, since no other upload is taken by a server that has published this one.
        """
        await asyncio.shield(self._job.tasks.begin(self._uploaded(request), awaited=True))

    async def _uploaded(self, request: coordinator_pb2.InitializeDoneRequest) -> None:
        async with self._lock:
            if self.ready:
                return
            if request.grant != self.grant or request.member != self.initialiser:
                raise errors.FencedError("another worker uploads version 0 now")
            self._publishing = True
            try:
                await self._publish_upload()
            finally:
                self._publishing = False
        # Members may have come or gone while the servers were being told.
        await self._job.keeping.tell()
        self._job.replication.begin()
        if self._job.checkpoints.place is None and not self._job.options.replicas:
            self._published()
        elif self._saving_on != self._job.timeline:
            self._saving_on = self._job.timeline
            self._job.tasks.begin(self._ready_when_safe())
        await self._job.refresh()

    async def _publish_upload(self) -> None:
        """Publish the upload on all servers: try until that is done, or until the job goes back.

        Raises FencedError once the job goes back, which withdraws the grant, and what servers refuse.
        """
        grant = self.grant
        while True:
            # A new coordinator that finds version 0 on some servers publishes only an upload with this grant.
            await self._job.keeping.settled()
            if grant != self.grant:
                raise errors.FencedError("the job goes back: version 0 is uploaded again")
            try:
                await self.publish()
                return
            except (errors.UnavailableError, errors.DeadlineError):
                pass  # a server that does not come back makes the job go back
            except errors.ParamServerError:
                if self.initialiser in self._job.members:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def _ready_when_safe(self) -> None:
        """Workers compute on version 0 only when it is saved as the first checkpoint, and all backups have it."""
        await self._job.replication.all_whole()
        checkpoints, loads = self._job.checkpoints, self._job.loads
        version = loads.version if loads.under_way is not None else 0
        try:
            kept = checkpoints.place is None or await checkpoints.wait_settled(version)
            if not kept and not checkpoints.options.private:
                await checkpoints.sweep(version)
                await self._job.fail(checkpoints.first_missing())
                return
        except errors.RolledBackError:
            return
        except errors.UnavailableError:
            log.info("the checkpoint of version 0 was settled by the coordinator before this one")
        self._published()
        await self._job.refresh()

    def _published(self) -> None:
        self.ready = True
        self._job.loads.complete()

    async def publish(self) -> None:
        """Publish on all servers the version 0 that was uploaded under the present grant."""
        activate = shard_pb2.ActivateRequest(
            job=self._job.options.job,
            generation=self._job.members.generation,
            timeline=self._job.timeline,
            grant=self.grant,
            term=self._job.term,
        )
        await self._job.shards.ask("Shard.Activate", activate, shard_pb2.ActivateResponse)
