"""Pushing to and pulling from all shards at once, with retries, back-off and a deadline.

A push that fails names the shards without it. A synchronous pull moves on only when every shard has published it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar, cast

import structlog

from paramserver import errors
from paramserver.compress.casts import Cast
from paramserver.core.events import (
    AtLeast,
    Exactly,
    Want,
)
from paramserver.core.plan import Chunk, Plan
from paramserver.failpoints import planned, reach
from paramserver.tensors.codec import chunk_frames, split_frame
from paramserver.transport.base import Channel, Frames, each
from paramserver.transport.messages import (
    chunk_ref,
    pack_mask,
    put_name,
    put_want,
)
from paramserver.v1 import shard_pb2
from paramserver.worker.contribution import PushFacts, frames_as_ready, frames_of, put_place
from paramserver.worker.early import EarlyChunks
from paramserver.worker.pulled import Answer, Pulled, pulled_of
from paramserver.worker.shared import Attached, SharedMemory
from paramserver.worker.turns import Traffic, Turns

log = structlog.get_logger("paramserver.worker")

T = TypeVar("T")
_BACK_OFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_ATTEMPT_S = 60.0
_PARK_S = 5.0
_CLAIM_S = 2.0
_ATTACH_S = 10.0


class ShardLinks:
    """The shards of a job, as a worker sees them. ``worker`` tells this worker's present member number."""

    def __init__(
        self,
        channels: Sequence[Channel],
        plan: Plan,
        job: str,
        worker: Callable[[], int],
        wait_timeout_s: float = 600.0,
        log_interval_s: float = 5.0,
    ) -> None:
        self.channels = list(channels)
        self.plan = plan
        self.job = job
        self.timeline = 0
        self.waiting_for = ""
        # How many workers share a step, where that is known.
        self.workers = 1
        # What this worker says of itself when it pulls, where it says anything.
        self.standing: shard_pb2.Standing | None = None
        # Shared with those of the servers that are on this host; set once, by whoever attaches.
        self.shared: SharedMemory | None = None
        # What weights are rounded to on their way here.
        self.rounding: Cast | None = None
        # Pulls of which somebody has been given the first part.
        self._pulls: set[asyncio.Task[Pulled]] = set()
        self._traffic = Traffic(len(self.channels), plan.layout.chunk_bytes)
        self._worker = worker
        self._wait_timeout_s = wait_timeout_s
        self._log_interval_s = log_interval_s

    # ---- push

    async def push(
        self, facts: PushFacts, read: Callable[[int], memoryview], early: EarlyChunks | None = None
    ) -> frozenset[shard_pb2.Outcome]:
        """Bring a contribution to every shard. ``read`` gives the bytes of a chunk by its index.

        ``early``: it is still being computed, and this tells which chunks are ready.

        Returns when every shard has counted it or had it already; the outcomes that there were.
        """
        between = asyncio.Lock() if planned("worker.between_shards") else None
        servers = len(self.channels)
        first = 0 if between else self._worker() % servers  # not all workers at the same server
        wanted = [[c for c in self.plan.chunks_of(server) if c.uses(facts.used)] for server in range(servers)]
        bytes_of = [sum(chunk.nbytes for chunk in chunks) for chunks in wanted]
        with self._traffic.leaving(facts.nonce, bytes_of, first, self.workers):
            tasks = {
                server: asyncio.ensure_future(self._push_in_turn(server, facts, wanted[server], read, between, early))
                for server in (*range(first, servers), *range(first))
            }
            results = await asyncio.gather(*(tasks[server] for server in range(servers)), return_exceptions=True)
        failed = [(s, r) for s, r in enumerate(results) if isinstance(r, BaseException)]
        if failed:
            server, error = failed[0]
            if len(failed) == 1 or not isinstance(error, errors.ParamServerError):
                raise error
            which = ", ".join(f"server-{s}" for s, _ in failed)
            raise type(error)(f"{facts.name} did not reach {which}; server-{server} said: {error}") from error
        return frozenset(cast(list[shard_pb2.Outcome], results))

    async def _push_in_turn(
        self,
        server: int,
        facts: PushFacts,
        wanted: Sequence[Chunk],
        read: Callable[[int], memoryview],
        between: asyncio.Lock | None,
        early: EarlyChunks | None,
    ) -> shard_pb2.Outcome:
        """All shards at once; only where a fault is planned between two shards, one after the other."""
        if between is None:
            return await self._push_one(server, facts, wanted, read, early)
        if early is not None:
            await early.whole()
        async with between:
            outcome = await self._push_one(server, facts, wanted, read)
            if server + 1 < len(self.channels):
                reach("worker.between_shards", facts.base_versions[server])
            return outcome

    async def _push_one(
        self,
        server: int,
        facts: PushFacts,
        wanted: Sequence[Chunk],
        read: Callable[[int], memoryview],
        early: EarlyChunks | None = None,
    ) -> shard_pb2.Outcome:
        begin, turns = early, self._traffic.turns(facts.nonce)  # only the first attempt

        async def attempt(timeout_s: float) -> shard_pb2.PushResponse:
            nonlocal begin, turns
            now, begin = begin, None
            mine, turns = turns, None
            if early is not None and now is None:
                await early.whole()
            attached = None
            if self.shared is not None and facts.node is not None:
                attached = self.shared.attached(server, self._worker())
            header = self.push_header(server, facts, 0 if attached is not None else len(wanted))
            if now is not None and attached is None:
                coming = frames_as_ready(header, {chunk.index: chunk for chunk in wanted}, read, now)
                return await self._upload(server, coming, mine, self._wait_timeout_s)
            if attached is None:
                frames = frames_of(header, facts, wanted, read, apart=mine is not None)
                return await self._upload(server, frames, mine, timeout_s)
            put_place(header, attached, facts)
            try:
                reply = await attached.channel.upload("Shard.Push", chunk_frames(header, ()), timeout=timeout_s)
            except errors.GoneError:
                await self._detached(server)
                return await attempt(timeout_s)
            return cast(shard_pb2.PushResponse, reply)

        reply = await self._persist(server, f"to push {facts.name}", attempt)
        return shard_pb2.OUTCOME_ACCEPTED if reply.own else reply.outcome

    async def _upload(
        self, server: int, frames: Frames, turns: Turns | None, timeout_s: float
    ) -> shard_pb2.PushResponse:
        if turns is None:
            reply = await self.channels[server].upload("Shard.Push", frames, timeout=timeout_s)
            return cast(shard_pb2.PushResponse, reply)
        async with aclosing(turns.keep(server, each(frames))) as leaving:
            reply = await self.channels[server].upload("Shard.Push", leaving, timeout=timeout_s)
        return cast(shard_pb2.PushResponse, reply)

    def push_header(self, server: int, facts: PushFacts, chunks: int) -> shard_pb2.PushHeader:
        """What a server is told of a contribution, of which so many ``chunks`` follow."""
        header = shard_pb2.PushHeader(
            job=self.job,
            timeline=self.timeline,
            worker=self._worker(),
            samples=facts.samples,
            overflow=facts.overflow,
            base_version=facts.base_versions[server],
            clock=facts.clock,
            schedule=facts.schedule,
            clip_norm=facts.clip_norm,
            nonce=facts.nonce,
            used=pack_mask(facts.used, len(self.plan.layout.tensors)),
            groups=facts.groups,
            chunks=chunks,
        )
        put_name(header, facts.name)
        return header

    # ---- shared memory

    def direct(self) -> list[Attached] | None:
        """By server, how the thread that trains reaches it; None where that is not possible with all."""
        if self.shared is None or self.rounding is not None:
            return None
        found = [self.shared.attached(server, self._worker()) for server in range(len(self.channels))]
        ways = [one for one in found if one is not None and one.channel.undisturbed and not one.direct.gone]
        return ways if len(ways) == len(found) else None

    async def attach(self, shared: SharedMemory) -> dict[int, str]:
        """Share memory with the servers on this host; by server, why others cannot."""

        async def one(server: int) -> str:
            return await self._persist(server, "to attach", partial(self._attach, shared, server))

        tasks = [asyncio.ensure_future(one(server)) for server in range(len(self.channels))]
        try:
            refusals = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # or one would attach after all is closed
            await shared.close()
            raise
        self.shared = shared if shared.servers else None
        return {server: refusal for server, refusal in enumerate(refusals) if refusal}

    async def detach(self) -> None:
        """Share memory with nobody any more."""
        shared, self.shared = self.shared, None
        if shared is not None:
            await shared.close()

    async def _attach(self, shared: SharedMemory, server: int, timeout_s: float) -> str:
        return await shared.attach(
            server, self.channels[server], self.job, self.timeline, self._worker(), min(timeout_s, _ATTACH_S)
        )

    async def _detached(self, server: int) -> None:
        log.info("a server does not share memory with this worker any more", server=f"server-{server}")
        assert self.shared is not None
        await self.shared.lost(server)

    def _way(self, server: int) -> Channel:
        """Where small messages to a server go: over a socket of this host if it shares memory with this worker."""
        attached = self.shared.attached(server, self._worker()) if self.shared is not None else None
        return self.channels[server] if attached is None else attached.channel

    @property
    def kind(self) -> str:
        """What carries weights and gradients, as `status` shows it."""
        kind = self.channels[0].kind if self.channels else ""
        if self.shared is None or not self.shared.servers:
            return kind
        return "shm" if len(self.shared.servers) == len(self.channels) else f"shm+{kind}"

    # ---- initial weights

    async def initialize(self, grant: int, read: Callable[[int], memoryview]) -> None:
        """Upload version 0 to every shard."""

        async def one(server: int) -> None:
            chunks = self.plan.chunks_of(server)

            async def attempt(timeout_s: float) -> None:
                header = shard_pb2.InitializeHeader(
                    job=self.job, timeline=self.timeline, grant=grant, worker=self._worker(), chunks=len(chunks)
                )
                frames = chunk_frames(header, ((chunk_ref(chunk), read(chunk.index)) for chunk in chunks))
                await self.channels[server].upload("Shard.Initialize", frames, timeout=timeout_s)

            await self._persist(server, "to upload version 0", attempt)

        await asyncio.gather(*(one(server) for server in range(len(self.channels))))

    # ---- pull

    async def pull(self, want: Want, frozen: bool = False, ahead: bool = False, begin: bool = False) -> list[Pulled]:
        """Each shard's answer to ``want``, by server; in asynchronous mode their versions may differ.

        ``ahead``: what is asked for may be sent while it is made. ``begin``: return when all have begun; what is still
        to come of large ones is their `Pulled.rest`.
        """
        begin = begin and self.shared is None and not frozen
        one = self._begin_one if begin else partial(self._pull_one, frozen=frozen)
        return await asyncio.gather(*(one(server, want, ahead=ahead) for server in range(len(self.channels))))

    async def pull_version(
        self, at_least: int, frozen: bool = False, ahead: bool = False, begin: bool = False
    ) -> list[Pulled]:
        """One version, the same of every shard: ``at_least`` or a later one that all have; the rest as in `pull`."""
        results = await self.pull(AtLeast(at_least), frozen, ahead, begin)
        while len({result.version for result in results}) > 1:
            # The oldest: a shard that is behind may stay so until this worker has done its part of that step.
            oldest = min(result.version for result in results)
            newer = [s for s, result in enumerate(results) if result.version > oldest]
            for server in newer:
                results[server].drop()
            try:
                again = await asyncio.gather(*(self._pull_one(s, Exactly(oldest), frozen) for s in newer))
            except errors.GoneError:  # dropped, so every shard has a later one or will have it
                for result in results:
                    result.drop()
                results = await self.pull(AtLeast(oldest + 1), frozen)
                continue
            for server, result in zip(newer, again, strict=True):
                results[server] = result
        return results

    async def published(self, version: int) -> bool:
        """Whether all shards have published ``version`` already; False if that cannot be told just now."""

        async def one(channel: Channel) -> bool:
            request = shard_pb2.PullRequest(
                job=self.job, timeline=self.timeline, worker=self._worker(), wait_s=0.0, header_only=True
            )
            put_want(request, AtLeast(version))
            ready = False
            async for raw in channel.download("Shard.Pull", request, timeout=_PARK_S):
                ready = split_frame(raw)[0].pull.ready
            return ready

        try:
            return all(await asyncio.gather(*(one(channel) for channel in self.channels)))
        except errors.ParamServerError:
            return False

    async def _begin_one(self, server: int, want: Want, ahead: bool) -> Pulled:
        """A shard's answer as soon as it is known which version that is."""
        begun: asyncio.Future[Pulled] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._pull_one(server, want, False, ahead, begun))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)
        try:
            await asyncio.wait([task, begun], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not begun.done():
            return task.result()
        pulled = begun.result()
        assert pulled.rest is not None
        pulled.rest.comes_by(task)
        return pulled

    async def _pull_one(
        self,
        server: int,
        want: Want,
        frozen: bool,
        ahead: bool = False,
        begun: asyncio.Future[Pulled] | None = None,
    ) -> Pulled:
        """A shard's answer, when all of it is there. ``begun``: gets it before that, if there is a lot to come."""
        deadline = time.monotonic() + self._wait_timeout_s
        said = time.monotonic()
        try:
            while True:
                request = self.pull_request(want, _PARK_S)
                request.include_frozen, request.ahead = frozen, ahead
                request.arrivals = ahead and len(self.channels) > 1
                if self.shared is not None:
                    if self.shared.outdated(server, request.worker):  # joined again, as another member
                        await self._persist(server, "to attach", partial(self._attach, self.shared, server))
                    question = self.shared.question(server, request.worker) if self.rounding is None else None
                    if question is not None:
                        request.shared.CopyFrom(question)
                try:
                    answer = await self._persist(server, "to pull", partial(self._download, server, request, begun))
                except errors.RolledBackError:
                    raise
                except errors.FencedError:
                    if not await self._readmitted(request.worker):
                        raise
                    continue
                if isinstance(answer, Pulled):
                    return answer
                self.waiting_for = f"server-{server}: {answer}" if answer else f"server-{server}"
                now = time.monotonic()
                if now >= deadline:
                    raise errors.DeadlineError(f"waited {self._wait_timeout_s:g} s for {self.waiting_for}")
                if now - said >= self._log_interval_s:
                    said = now
                    log.info(f"waiting for {self.waiting_for}")
        finally:
            self.waiting_for = ""

    def pull_request(self, want: Want, wait_s: float) -> shard_pb2.PullRequest:
        """A question for weights that may wait so long for its answer."""
        request = shard_pb2.PullRequest(
            job=self.job, timeline=self.timeline, worker=self._worker(), wait_s=wait_s, standing=self.standing
        )
        put_want(request, want)
        if self.rounding is not None:
            request.encoding = self.rounding.encoding
        return request

    async def _readmitted(self, former: int) -> bool:
        """Given up for lost (paused, cut off): True once the session has joined again under a new number."""
        for _ in range(100):
            if self._worker() != former:
                return True
            await asyncio.sleep(0.05)
        return False

    async def _download(
        self,
        server: int,
        request: shard_pb2.PullRequest,
        begun: asyncio.Future[Pulled] | None,
        timeout_s: float,
    ) -> Pulled | str:
        answer = Answer(self.plan, server, self.rounding, begun)
        stream = self._way(server).download("Shard.Pull", request, timeout=timeout_s + _PARK_S)
        with self._traffic.telling(server, request.arrivals):
            async with aclosing(stream) as frames:
                async for raw in frames:
                    frame, parts = split_frame(raw)
                    if frame.arrived:
                        self._traffic.arrived(server, frame.arrived)
                        continue
                    answer.add(frame, parts)
                    if answer.waiting_for is not None:
                        return answer.waiting_for
        header, chunks = answer.whole()
        slot = header.slot if header.HasField("slot") else None
        if slot is not None:
            if self.shared is None or server not in self.shared.servers:
                raise errors.UnavailableError(f"server-{server} and this worker share no memory any more")
            chunks = self.shared.chunks(server, slot, request.include_frozen)
        return pulled_of(header, chunks)

    async def idle(self) -> None:
        """Tell every shard that this worker has nothing to do."""
        request = shard_pb2.IdleRequest(job=self.job, timeline=self.timeline, worker=self._worker())

        async def one(server: int) -> None:
            await self._persist(
                server,
                "to say that this worker is idle",
                lambda timeout_s: self.channels[server].call("Shard.Idle", request, timeout=timeout_s),
            )

        await asyncio.gather(*(one(server) for server in range(len(self.channels))))

    async def claim(self, server: int, request: shard_pb2.ClaimRequest) -> shard_pb2.ClaimResponse | None:
        """Ask a server for a slice of the open step; None if it does not answer."""
        request.job, request.timeline, request.worker = self.job, self.timeline, self._worker()
        try:
            reply = await self._way(server).call("Shard.Claim", request, timeout=_CLAIM_S)
        except errors.ParamServerError as error:
            log.debug("no answer to a question for work", error=str(error))
            return None
        return cast(shard_pb2.ClaimResponse, reply)

    # ---- trying again

    async def _persist(self, server: int, what: str, attempt: Callable[[float], Coroutine[Any, Any, T]]) -> T:
        """Try until it works, somebody says never, or the deadline passes (the error then names the shard)."""
        started = time.monotonic()
        deadline = started + self._wait_timeout_s
        tries, said = 0, 0.0
        while True:
            try:
                return await attempt(min(_ATTEMPT_S, max(0.1, deadline - time.monotonic())))
            except errors.RetryableError as error:
                now = time.monotonic()
                if now >= deadline:
                    raise errors.DeadlineError(
                        f"server-{server} at {self.channels[server].address} did not let this worker {what[3:]} "
                        f"within {self._wait_timeout_s:g} s: {error}"
                    ) from error
                # That a server is busy is nothing to talk about, unless it lasts.
                busy = isinstance(error, errors.OverloadedError) and now - started < self._log_interval_s
                if not busy and (said == 0.0 or now - said >= self._log_interval_s):
                    said = now
                    log.info("trying again", server=f"server-{server}", what=what, error=str(error))
                await asyncio.sleep(_BACK_OFF_S[min(tries, len(_BACK_OFF_S) - 1)])
                tries += 1

    async def close(self) -> None:
        """Close the channels."""
        for pull in list(self._pulls):
            pull.cancel()
        if self.shared is not None:
            await self.shared.close()
        await asyncio.gather(*(channel.close() for channel in self.channels), return_exceptions=True)
