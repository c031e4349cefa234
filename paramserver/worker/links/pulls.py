"""Pulls weights from all shards at once. A synchronous pull ends only when every shard has published the version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, cast

import structlog

from paramserver import errors
from paramserver.core.versions.events import AtClock, AtLeast, Exactly, Joining, Latest, Want
from paramserver.core.work.stealing import Assignment
from paramserver.tensors.codec import split_frame
from paramserver.transport.base import Channel
from paramserver.v1 import shard_pb2
from paramserver.wire.messages import assignment_to_proto, put_want
from paramserver.worker.gradients.flow_control import FlowControl
from paramserver.worker.links.near import Near
from paramserver.worker.links.questions import Questions
from paramserver.worker.links.targets import Targets
from paramserver.worker.links.traced import TracedPull
from paramserver.worker.weights.pulled import Answer, Pulled, Slot, pulled_of

if TYPE_CHECKING:
    from paramserver.compress.casts import Cast
    from paramserver.worker.memory.shared import Attached

log = structlog.get_logger("paramserver.worker")

_PARK_S = 5.0


class Pulls:
    """Asks for versions. ``rounding``: the type that weights are rounded to on their way here."""

    def __init__(
        self, targets: Targets, near: Near, questions: Questions, flow_control: FlowControl, rounding: Cast | None
    ) -> None:
        self._targets, self._near, self._flow_control = targets, near, flow_control
        self._questions = questions
        self.rounding = rounding
        # The server, in words, for which a pull waits just now.
        self.waiting_for = ""
        self._assignment: shard_pb2.Assignment | None = None
        # Pulls whose caller has been given the first part.
        self._begun: set[asyncio.Task[Pulled]] = set()

    def say(self, assignment: Assignment | None) -> None:
        """Tell servers this assignment with each pull from now on; None: tell them nothing."""
        self._assignment = None if assignment is None else assignment_to_proto(assignment)

    async def pull(self, want: Want, frozen: bool = False, ahead: bool = False, begin: bool = False) -> list[Pulled]:
        """Each shard's answer to ``want``, by shard; in asynchronous mode their versions may differ.

        ``ahead``: servers may send the version while they make it. ``begin``: return when all answers have begun; the
        part of a large answer that is still to come is its `Pulled.rest`.
        """
        if isinstance(want, AtClock | Joining):
            await self._questions.at_work()
        begin = begin and self._near.shared is None and not frozen
        one = self._begin_one if begin else partial(self._pull_one, frozen=frozen)
        return await asyncio.gather(*(one(shard, want, ahead=ahead) for shard in range(len(self._targets))))

    async def pull_version(
        self, at_least: int, frozen: bool = False, ahead: bool = False, begin: bool = False
    ) -> list[Pulled]:
        """One version, the same of every shard: ``at_least`` or a later one that all have; the rest as in `pull`."""
        results = await self.pull(AtLeast(at_least), frozen, ahead, begin)
        while len({result.version for result in results}) > 1:
            # The oldest: a shard that is behind may stay so until this worker has done its part of that step.
            oldest = min(result.version for result in results)
            newer = [s for s, result in enumerate(results) if result.version > oldest]
            for shard in newer:
                results[shard].drop()
            try:
                again = await asyncio.gather(*(self._pull_one(s, Exactly(oldest), frozen) for s in newer))
            except errors.GoneError:  # dropped, so every shard has a later one or will have it
                for result in results:
                    result.drop()
                results = await self.pull(AtLeast(oldest + 1), frozen)
                continue
            for shard, result in zip(newer, again, strict=True):
                results[shard] = result
        return results

    async def pull_exactly(self, versions: Sequence[int]) -> list[Pulled]:
        """By shard, this version. Raises GoneError if a server has dropped its version."""
        asked = (self._pull_one(shard, Exactly(version), False) for shard, version in enumerate(versions))
        return await asyncio.gather(*asked)

    async def newest(self) -> list[Pulled]:
        """By shard, its newest version, without the weights."""
        shards = range(len(self._targets))
        return await asyncio.gather(*(self._pull_one(shard, Latest(), False, bare=True) for shard in shards))

    async def again(self, versions: Sequence[int]) -> list[Pulled]:
        """By shard, the version of the weights at hand once more. Raises GoneError if a server has dropped one."""
        results = await self.pull_exactly(versions)
        shared = self._near.shared
        for shard, result in enumerate(results):
            if result.slot is not None and shared is not None and not shared.copies:
                result.chunks.update(shared.chunks_in(shard, result.slot))
        return results

    async def published(self, version: int) -> bool:
        """Whether all shards have published ``version`` already; False if that cannot be told just now."""
        targets = self._targets

        async def one(channel: Channel) -> bool:
            request = shard_pb2.PullRequest(
                job=targets.job, timeline=targets.timeline, worker=targets.worker(), wait_s=0.0, header_only=True
            )
            put_want(request, AtLeast(version))
            ready = False
            async for raw in channel.download("Shard.Pull", request, timeout=_PARK_S):
                ready = split_frame(raw)[0].pull.ready
            return ready

        try:
            return all(await asyncio.gather(*(one(channel) for channel in targets.channels)))
        except errors.ParamServerError:
            return False

    async def _begin_one(self, shard: int, want: Want, ahead: bool) -> Pulled:
        """A shard's answer as soon as it is known which version that is."""
        begun: asyncio.Future[Pulled] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._pull_one(shard, want, False, ahead, begun))
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

    async def _pull_one(
        self,
        shard: int,
        want: Want,
        frozen: bool,
        ahead: bool = False,
        begun: asyncio.Future[Pulled] | None = None,
        bare: bool = False,
    ) -> Pulled:
        """A shard's answer, when all of it is there. ``begun``: gets it before that, if there is a lot to come.

        ``bare``: without the weights.
        """
        targets = self._targets
        deadline = time.monotonic() + targets.wait_timeout_s
        said = time.monotonic()
        try:
            while True:
                member = targets.worker()
                try:
                    ask = partial(self._ask, shard, want, frozen, ahead, begun, bare)
                    answer = await targets.persist(shard, "to pull", ask, targets.nbytes[shard])
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

    def pull_request(self, shard: int, want: Want, wait_s: float, attached: Attached | None) -> shard_pb2.PullRequest:
        """A question for weights, which the server may answer after up to ``wait_s`` seconds."""
        targets = self._targets
        request = shard_pb2.PullRequest(
            job=targets.job,
            timeline=targets.timeline,
            worker=targets.worker(),
            wait_s=wait_s,
            assignment=self._assignment,
        )
        put_want(request, want)
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

    async def _ask(
        self,
        shard: int,
        want: Want,
        frozen: bool,
        ahead: bool,
        begun: asyncio.Future[Pulled] | None,
        bare: bool,
        timeout_s: float,
    ) -> Pulled | str:
        """One attempt: a shard's answer, or for whom it waits."""
        await self._near.attach_again(shard, timeout_s)
        targets, attached = self._targets, self._near.attached(shard)
        request = self.pull_request(shard, want, _PARK_S, attached)
        request.include_frozen, request.ahead, request.header_only = frozen, ahead, bare
        request.acks = ahead and len(targets) > 1
        answer = Answer(targets.plan, shard, targets.names[shard], self.rounding, begun)
        traced = TracedPull(targets.trace, targets.names[shard]) if targets.trace.on else None
        with self._flow_control.telling(shard, request.acks):
            if attached is not None and request.HasField("shared"):
                found = await self._exchange(shard, request, attached, timeout_s)
                if found is not None:
                    return found
                request.ClearField("shared")
            stream = targets.channels[shard].download("Shard.Pull", request, timeout=timeout_s + _PARK_S)
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
                        if traced is not None:
                            traced.answered(None, answer.waiting_for)
                        return answer.waiting_for
        header, chunks = answer.whole()
        if traced is not None:
            traced.answered(header.version, None)
        return pulled_of(header, chunks)

    async def _exchange(
        self, shard: int, request: shard_pb2.PullRequest, attached: Attached, timeout_s: float
    ) -> Pulled | str | None:
        """The answer of a server that shares memory. None: the version does not lie there."""
        name, trace = self._targets.names[shard], self._targets.trace
        traced = TracedPull(trace, name) if trace.on else None
        question = shard_pb2.ExchangeRequest(pull=request)
        reply = await attached.channel.call("Shard.Exchange", question, timeout=timeout_s + _PARK_S)
        header = cast(shard_pb2.ExchangeResponse, reply).pulled
        if traced is not None:
            traced.answered(header.version if header.ready else None, header.waiting_for or None)
        if not header.ready:
            return header.waiting_for
        if request.header_only:
            return pulled_of(header, {})
        if not header.HasField("slot"):
            return None
        shared = self._near.shared
        if shared is None or self._near.attached(shard) is not attached:
            raise errors.UnavailableError(f"{name} and this worker share no memory any more")
        slot = Slot(attached.weights, header.slot)
        return pulled_of(header, shared.chunks(shard, slot, request.include_frozen), slot=slot)

    def close(self) -> None:
        """Break off the pulls whose caller has been given the first part."""
        for pull in list(self._begun):
            pull.cancel()
