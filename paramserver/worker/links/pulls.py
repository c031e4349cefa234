"""Pulls weights from all shards at once. A synchronous pull ends only when every shard has published the version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import structlog

from paramserver import errors
from paramserver.core.versions.events import AtClock, AtLeast, Exactly, Joining, Want
from paramserver.core.work.stealing import Assignment
from paramserver.tensors.codec import split_frame
from paramserver.transport.base import Place
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import assignment_to_proto, put_want
from paramserver.worker.gradients.flow_control import FlowControl
from paramserver.worker.host.tier import HostTier
from paramserver.worker.links.near import Near
from paramserver.worker.links.questions import Questions
from paramserver.worker.links.targets import Targets
from paramserver.worker.links.traced import TracedPull
from paramserver.worker.weights.landing import Landing
from paramserver.worker.weights.pulled import Answer, Pulled, Slot, pulled_of

if TYPE_CHECKING:
    from paramserver.compress.casts import Cast
    from paramserver.worker.memory.shared import Attached

log = structlog.get_logger("paramserver.worker")

# How long a server may keep a question before it says for whom it waits.
_PARK_S = 5.0
# How long weights that are published may take to come to this host by another worker, and how much longer for each
# byte, which is the time on a link of 1 Mb/s. Then this worker pulls by itself.
_BY_HOST_S, _BY_HOST_BYTE_S = 10.0, 8e-6


@dataclass(frozen=True, slots=True)
class Pull:
    """One question for weights to all shards, and what the worker can use of an answer.

    ``want``: with `AtLeast`, all shards answer with the same version, this one or a later one. With other wants, in
    asynchronous mode, their versions may differ. A sequence has the want of each shard.
    """

    want: Want | Sequence[Exactly]
    # Also the tensors that never change.
    frozen: bool = False
    # The header without the weights.
    bare: bool = False
    # The bytes of the weights, even if the model's parameters lie in memory shared with servers.
    copied: bool = False
    # Servers may send the version while they make it, and acknowledge chunks that this worker is pushing.
    ahead: bool = False
    # The answer is given when it has begun: the part of a large one that is still to come is its `Pulled.rest`.
    begin: bool = False
    # Memory into which the weights may be received.
    landing: Landing | None = None
    # Seconds that a server may keep the question.
    wait_s: float = _PARK_S
    # The question also says what this worker computes, and asks for acknowledgements of what it pushes.
    tells: bool = True

    def of(self, shard: int) -> Want:
        """The version that this request asks a shard for."""
        return self.want[shard] if isinstance(self.want, Sequence) else self.want


def exactly(versions: Iterable[int]) -> list[Exactly]:
    """By shard, this version and no other. A server that has dropped its version answers GoneError."""
    return [Exactly(version) for version in versions]


class Pulls:
    """Asks for versions. ``rounding``: the type that weights are rounded to on their way here."""

    def __init__(
        self, targets: Targets, near: Near, questions: Questions, flow_control: FlowControl, rounding: Cast | None
    ) -> None:
        self._targets, self._near, self._flow_control = targets, near, flow_control
        self._questions = questions
        self.rounding = rounding
        # The one pull of this host; None where each worker pulls by itself.
        self.host: HostTier | None = None
        # The server, in words, for which a pull waits just now.
        self.waiting_for = ""
        self._assignment: shard_pb2.Assignment | None = None
        # Pulls whose caller has been given the first part.
        self._begun: set[asyncio.Task[Pulled]] = set()

    def say(self, assignment: Assignment | None) -> None:
        """Tell servers this assignment with each pull from now on; None: tell them nothing."""
        self._assignment = None if assignment is None else assignment_to_proto(assignment)

    async def ask(self, pull: Pull) -> list[Pulled]:
        """The answers of all shards. Raises what a shard answers, and DeadlineError if a version does not come."""
        if isinstance(pull.want, AtClock | Joining):
            await self._questions.at_work()
        if self.host is not None and self.host.shares and _sharable(pull):
            return await self._by_host(pull, self.host)
        return await self._ask_all(pull)

    async def for_host(self, version: int, landing: Landing) -> list[Pulled]:
        """``version`` or a later one, for all workers of this host. Nothing writes to ``landing`` after that."""
        return await self._ask_all(Pull(AtLeast(version), ahead=True, landing=landing, tells=False))

    async def _by_host(self, pull: Pull, host: HostTier) -> list[Pulled]:
        """Ask the servers which version there is, and take its weights from where they lie on this host."""
        assert isinstance(pull.want, AtLeast)
        bare = replace(pull, bare=True, begin=False, landing=None)
        coming = asyncio.ensure_future(host.take(pull.want.version))
        try:
            headers = await self._ask_all(bare)
            while True:
                version = headers[0].version
                async with asyncio.timeout(_BY_HOST_S + sum(self._targets.nbytes) * _BY_HOST_BYTE_S):
                    found = await coming
                if found is None:
                    break
                if found[0] == version:
                    return [
                        replace(header, slot=found[1], chunks=host.chunks_in(shard, found[1]))
                        for shard, header in enumerate(headers)
                    ]
                if found[0] > version:
                    headers = await self._ask_all(replace(bare, want=AtLeast(found[0])))
                coming = asyncio.ensure_future(host.take(headers[0].version))
        except TimeoutError:
            host.pause("the weights have not come to this host in time")
        finally:
            coming.cancel()
        return await self._ask_all(replace(pull, want=AtLeast(version), ahead=False, begin=False, landing=None))

    async def _ask_all(self, pull: Pull) -> list[Pulled]:
        """The answers of all shards to this worker."""
        every = range(len(self._targets))
        results = await self._ask_each(every, pull)
        while isinstance(pull.want, AtLeast) and len({result.version for result in results}) > 1:
            # The oldest: a shard that is behind may stay so until this worker has done its part of that step.
            oldest = min(result.version for result in results)
            newer = [s for s, result in enumerate(results) if result.version > oldest]
            for shard in newer:
                results[shard].drop()
            if pull.landing is not None:  # streams of two versions would write there
                pull.landing.close()
            plain = replace(pull, ahead=False, begin=False, landing=None)
            try:
                again = await self._ask_each(newer, replace(plain, want=Exactly(oldest)))
            except errors.GoneError:  # dropped, so every shard has a later one or will have it
                for result in results:
                    result.drop()
                results = await self._ask_each(every, replace(plain, want=AtLeast(oldest + 1)))
                continue
            for shard, result in zip(newer, again, strict=True):
                results[shard] = result
        return results

    async def _ask_each(self, shards: Iterable[int], pull: Pull) -> list[Pulled]:
        begins = pull.begin and self._near.shared is None and not pull.frozen
        one = self._begin_one if begins else self._ask_one
        tasks = [asyncio.ensure_future(one(shard, pull)) for shard in shards]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # or one would still write to a landing
            raise

    async def published(self, version: int) -> bool:
        """Whether all shards have published ``version`` already; False if that cannot be told just now."""
        pull = Pull(AtLeast(version), bare=True, wait_s=0.0, tells=False)
        try:
            attempts = (self._attempt(shard, pull, None, _PARK_S) for shard in range(len(self._targets)))
            return all(isinstance(answer, Pulled) for answer in await asyncio.gather(*attempts))
        except errors.ParamServerError:
            return False

    async def _begin_one(self, shard: int, pull: Pull) -> Pulled:
        """A shard's answer as soon as it is known which version that is."""
        begun: asyncio.Future[Pulled] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._ask_one(shard, pull, begun))
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
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

    async def _ask_one(self, shard: int, pull: Pull, begun: asyncio.Future[Pulled] | None = None) -> Pulled:
        """A shard's answer, when all of it is there. ``begun``: gets it before that, if there is a lot to come."""
        targets = self._targets
        deadline = time.monotonic() + targets.wait_timeout_s
        said = time.monotonic()
        try:
            while True:
                member = targets.worker()
                try:
                    attempt = partial(self._attempt, shard, pull, begun)
                    answer = await targets.persist(shard, "to pull", attempt, targets.nbytes[shard])
                except errors.RolledBackError:
                    raise
                except errors.FencedError:
                    if not await self._readmitted(member):
                        raise
                    continue
                if isinstance(answer, Pulled):
                    return answer
                self.waiting_for = f"{targets.names[shard]}: {answer}" if answer else targets.names[shard]
                now = time.monotonic()
                if now >= deadline:
                    raise errors.DeadlineError(f"waited {targets.wait_timeout_s:g} s for {self.waiting_for}")
                if now - said >= targets.log_interval_s:
                    said = now
                    log.info(f"waiting for {self.waiting_for}")
        finally:
            self.waiting_for = ""

    def pull_request(self, shard: int, pull: Pull, attached: Attached | None) -> shard_pb2.PullRequest:
        """The message to a shard. ``attached``: the server shares memory, and the worker reads the weights there."""
        targets = self._targets
        request = shard_pb2.PullRequest(
            job=targets.job,
            timeline=targets.timeline,
            worker=targets.worker(),
            wait_s=pull.wait_s,
            include_frozen=pull.frozen,
            header_only=pull.bare,
            ahead=pull.ahead,
            acks=pull.ahead and len(targets) > 1 and pull.tells,
            assignment=self._assignment if pull.tells else None,
        )
        put_want(request, pull.of(shard))
        if self.rounding is not None:
            request.encoding = self.rounding.encoding
        elif self._near.shared is not None and attached is not None:
            request.shared.CopyFrom(self._near.shared.question(shard, attached))
        return request

    async def _readmitted(self, former: int) -> bool:
        """This worker was given up for lost: True once the session has joined again, under a new member number."""
        for _ in range(100):
            if self._targets.worker() != former:
                return True
            await asyncio.sleep(0.05)
        return False

    async def _attempt(
        self, shard: int, pull: Pull, begun: asyncio.Future[Pulled] | None, timeout_s: float
    ) -> Pulled | str:
        """A shard's answer, or for whom it waits."""
        await self._near.attach_again(shard, timeout_s)
        targets, attached = self._targets, self._near.attached(shard)
        request = self.pull_request(shard, pull, attached)
        traced = TracedPull(targets.trace, targets.names[shard]) if targets.trace.on else None
        found: Pulled | str | None = None
        with self._flow_control.telling(shard, request.acks):
            if attached is not None and request.HasField("shared"):
                found = await self._look(shard, pull, request, attached, timeout_s + pull.wait_s)
            if found is None:
                landing = pull.landing
                answer = Answer(targets.plan, shard, targets.names[shard], self.rounding, begun, landing)
                place = None if landing is None else partial(landing.place, shard)
                found = await self._receive(shard, request, answer, place, traced, timeout_s + pull.wait_s)
        if traced is not None:
            version, waiting_for = (None, found) if isinstance(found, str) else (found.version, None)
            traced.answered(version, waiting_for)
        return found

    async def _look(
        self, shard: int, pull: Pull, request: shard_pb2.PullRequest, attached: Attached, timeout_s: float
    ) -> Pulled | str | None:
        """Ask a server that shares memory with this worker. None: the version does not lie there."""
        question = shard_pb2.ExchangeRequest(pull=request)
        reply = await attached.channel.call("Shard.Exchange", question, timeout=timeout_s)
        header = cast(shard_pb2.ExchangeResponse, reply).pulled
        if not header.ready:
            return header.waiting_for
        if pull.bare:
            return pulled_of(header, {})
        if not header.HasField("slot"):
            return None
        shared = self._near.shared
        if shared is None or self._near.attached(shard) is not attached:
            raise errors.UnavailableError(f"{self._targets.names[shard]} and this worker share no memory any more")
        slot = Slot(attached.weights, header.slot)
        read = shared.chunks_in if pull.copied else shared.chunks
        return pulled_of(header, read(shard, slot, pull.frozen), slot=slot)

    async def _receive(
        self,
        shard: int,
        request: shard_pb2.PullRequest,
        answer: Answer,
        place: Place | None,
        traced: TracedPull | None,
        timeout_s: float,
    ) -> Pulled | str:
        """Let a server send the version."""
        stream = self._targets.channels[shard].download("Shard.Pull", request, timeout=timeout_s, place=place)
        async with aclosing(stream) as frames:
            async for raw in frames:
                frame, parts = split_frame(raw)
                if frame.acks:
                    self._flow_control.acknowledged(shard, frame.acks)
                    continue
                answer.add(frame, parts)
                if traced is not None and frame.chunks:
                    traced.came(len(raw))
                if answer.waiting_for is not None:
                    return answer.waiting_for
        return answer.whole()

    def close(self) -> None:
        """Break off the pulls whose caller has been given the first part."""
        for pull in list(self._begun):
            pull.cancel()


def _sharable(pull: Pull) -> bool:
    """Whether weights that another worker has pulled can be the answer."""
    return isinstance(pull.want, AtLeast) and not (pull.frozen or pull.bare or pull.copied)
