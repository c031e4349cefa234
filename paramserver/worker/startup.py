"""A worker's way from the registration of its model to its first weights. Runs in the background loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import structlog

from paramserver import errors
from paramserver.core.layout.plan import Chunk, Plan, moving_bytes
from paramserver.core.versions.events import AtLeast, Latest
from paramserver.membership.session import Session
from paramserver.v1 import coordinator_pb2, types_pb2
from paramserver.wire.messages import plan_of
from paramserver.worker.gradients import early
from paramserver.worker.links import ShardLinks
from paramserver.worker.links.pulls import Pull
from paramserver.worker.links.pushes import Part
from paramserver.worker.memory.shared import SharedMemory
from paramserver.worker.weights.pulled import Pulled

log = structlog.get_logger("paramserver.worker")

T = TypeVar("T")
_CALL_S = 60.0


async def register_model(
    session: Session, model: types_pb2.ModelSpec, state_digest: str = "", script: bool = False
) -> Plan:
    """Register the model; returns the plan. Waits for the servers. ``state_digest``: of the optimizer state it brings.
    ``script``: version 0 is that of the main worker, not of the worker that comes first.

    Raises ModelError if another worker registered another model, DeadlineError if servers are missing.
    """
    timeout_s = session.options.join_timeout_s
    await session.wait_until(lambda view: len(view.shards) > 0, lambda view: view.reason or "servers", timeout_s)
    # The coordinator waits for the servers as long, and says so; its answer should come first.
    reply = await session.ask(
        "Coordinator.RegisterModel",
        lambda: coordinator_pb2.RegisterModelRequest(
            member=session.member, model=model, state_digest=state_digest, script=script
        ),
        timeout_s + 10.0,
    )
    registered = cast(coordinator_pb2.RegisterModelResponse, reply)
    plan = plan_of(registered.model, registered.shards)
    if plan.layout.digest != registered.layout_digest:
        raise errors.VersionMismatchError(
            "the coordinator lays the model out differently: install the same version of paramserver everywhere"
        )
    return plan


async def present_model(session: Session) -> tuple[types_pb2.ModelSpec, int]:
    """The model that the job trains, and the number of shards. Raises UserError if the job has none yet."""
    reply = await session.ask("Coordinator.Status", lambda: coordinator_pb2.StatusRequest(model=True), _CALL_S)
    status = cast(coordinator_pb2.StatusResponse, reply)
    if not status.HasField("model"):
        raise errors.UserError("the job has no model yet: call init first, or wait until its script has prepared one")
    return status.model, status.shards


async def share_memory(session: Session, links: ShardLinks, plan: Plan, transport: str) -> None:
    """Share memory with the servers on this host. ``transport``: "auto", "shm" (with all), or another (with none).

    Where only some of the servers are on this host, sharing memory with these saves less time than to send gradients to
    all of them while they are computed, if the model is large enough for that.

    Raises UnavailableError if it must be all and is not, RolledBackError once the job goes on with other servers.
    """
    if transport not in ("auto", "shm"):
        links.near.withhold(f'cluster.transport is "{transport}"')
        return
    try:
        shared = SharedMemory(plan)
    except OSError as error:
        refusals = dict.fromkeys(range(plan.shards), str(error))
        links.near.withhold(str(error))
    else:
        refusals = await _on_this_timeline(session, links, links.near.attach(shared))
    for shard, reason in refusals.items():
        if transport == "shm":
            raise errors.UnavailableError(
                f"cluster.transport = shm, but no memory can be shared with {links.names[shard]}: {reason}; "
                'let both run on one host and meet there, or set cluster.transport to "auto"'
            )
    apart = 0 < len(refusals) < plan.shards
    if apart and moving_bytes(plan.layout.chunks) >= early.LEAST_BYTES:
        await links.near.detach(
            f"not all servers are on its host, and a large model goes over the network; {links.near.reason}"
        )
        log.info("weights and gradients go over the network: not all servers are on this host")
    elif refusals:
        which = ", ".join(links.names[shard] for shard in refusals)
        log.info(f"weights and gradients go over the network to {which}", reason=next(iter(refusals.values())))


@dataclass(frozen=True, slots=True)
class Offer:
    """The content that a worker can upload: weights by chunk, and the optimizer state that goes with chunks.

    ``loads``: for a ``ctx.load``, which may lack weights or state. Otherwise the content is version 0.
    """

    read: Callable[[int], memoryview] | None
    state: Callable[[Sequence[Chunk]], list[Part]] | None
    loads: bool = False


async def first_version(session: Session, links: ShardLinks, offer: Offer | None) -> list[Pulled]:
    """Upload version 0 if that falls to this worker, wait for the start of the job, and pull the present version.

    ``offer``: the content that this worker can upload; None: this process only reads.
    """
    uploaded = 0

    def settled(view: types_pb2.View) -> bool:
        can = offer is not None and offer.loads == view.loading
        mine = can and view.initialiser == session.member and view.grant > uploaded
        return mine or view.state == types_pb2.JOB_STATE_RUNNING or view.timeline != links.timeline

    while True:
        view = await session.wait_until(
            settled, lambda view: view.reason or "version 0", session.options.join_timeout_s
        )
        if view.timeline != links.timeline:
            raise errors.RolledBackError("the job goes on with other servers")
        if view.state == types_pb2.JOB_STATE_RUNNING:
            # In asynchronous mode shards need not stand at the same version.
            want = Latest() if view.consistency.mode == types_pb2.MODE_ASYNC else AtLeast(0)
            return await _on_this_timeline(session, links, links.pulls.ask(Pull(want, frozen=True)))
        assert offer is not None
        uploaded = view.grant
        try:
            await _on_this_timeline(session, links, links.pushes.initialize(uploaded, offer.read, offer.state))
            await session.ask(
                "Coordinator.InitializeDone",
                partial(coordinator_pb2.InitializeDoneRequest, member=session.member, grant=uploaded),
                _CALL_S,
            )
        except errors.FencedError as error:
            log.info("another worker uploads version 0", reason=str(error))


async def _on_this_timeline(session: Session, links: ShardLinks, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of ``work``; raises RolledBackError once the job goes on with other servers."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            seen = session.editions
            view = session.check()
            if view.timeline != links.timeline or view.state == types_pb2.JOB_STATE_RECOVERING:
                raise errors.RolledBackError("the job goes back to a checkpoint")
            changed = asyncio.ensure_future(session.changed(seen))
            try:
                await asyncio.wait([task, changed], return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
