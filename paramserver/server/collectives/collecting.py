"""Calls of ranks: they bring contributions to rounds and wait for results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import torch

from paramserver import errors
from paramserver.core.collectives.rounds import (
    MAX_RANKS,
    Complete,
    Effect,
    Forget,
    Refused,
    RoundName,
    Rounds,
    RoundsError,
    StepOverError,
    Terms,
    UnknownGroupError,
)
from paramserver.frames import AnyFrame
from paramserver.server.collectives.reducing import check_reduction, reduce
from paramserver.server.rpc.process import Process
from paramserver.tensors.codec import frame_of
from paramserver.tensors.dtypes import tensor_from, torch_dtype
from paramserver.v1 import shard_pb2
from paramserver.wire.bounds import counting, patience, text

# A group whose ranks were killed leaves its last results here. A group that is only seldom used must not be forgotten.
_IDLE_S = 24 * 3600.0
_MAX_WAIT_S = 30 * 24 * 3600.0
_LOST = (
    "a server was started again, and the results of this process group are lost with the server before it: start all "
    "ranks again"
)


@dataclass(slots=True)
class _Open:
    """The bytes of an open round. ``given``: contributions by rank. ``result``: parts by rank, or one part."""

    result: asyncio.Future[Mapping[int, torch.Tensor]]
    given: dict[int, bytes] = field(default_factory=dict)


class Collecting:
    """All process groups at one server."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._rounds = Rounds(_IDLE_S)
        self._open: dict[RoundName, _Open] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        process.at_the_end(self._end)

    async def collect(self, request: shard_pb2.CollectRequest) -> AsyncIterator[AnyFrame]:
        """Take a contribution, wait for the others, and answer with the result if the rank takes it.

        The frames list one chunk each: its index is the rank that gave it, or 0 for a reduction. Slices are told which
        of them are missing.
        """
        self._process.check_job(request.job)
        if self._process.failure:
            raise errors.JobFailedError(self._process.failure)
        if request.leaves:
            self._perform(self._rounds.leave(request.group, request.rank))
            return
        name = self._come(request)
        found = self._open[name]
        wait_s = patience("wait_s", request.wait_s, _MAX_WAIT_S)
        slices = request.HasField("timeline")
        missing = self._rounds.missing(name) if slices else ()
        if not set(missing).isdisjoint(request.mine):
            yield frame_of(shard_pb2.FrameHeader(missing=missing), [])
            return
        try:
            async with asyncio.timeout(wait_s):
                result = await asyncio.shield(found.result)
        except TimeoutError:
            if not slices:
                raise errors.DeadlineError(self._rounds.late(name, wait_s)) from None
            yield frame_of(shard_pb2.FrameHeader(missing=self._rounds.missing(name)), [])
            return
        if not request.takes:
            return
        for index, part in result.items():
            raw: memoryview = memoryview(part.view(torch.uint8).numpy())  # type: ignore[arg-type]
            header = shard_pb2.FrameHeader(chunks=[shard_pb2.ChunkRef(index=index, bytes=raw.nbytes)])
            yield frame_of(header, [raw])

    def _come(self, request: shard_pb2.CollectRequest) -> RoundName:
        """Let a rank come to its round, which then is in ``_open``."""
        now = time.monotonic()
        group = self._group(request, now)
        channel, number = text("the channel", request.channel, 100), counting("number", request.number)
        name = RoundName(group, channel, number, request.piece)
        counting("the number of ranks", len(request.ranks), MAX_RANKS)
        counting("size", request.size, MAX_RANKS)
        gives = request.HasField("data")
        if gives and len(request.data) != request.bytes:
            raise errors.ProtocolError(
                f"a contribution of {len(request.data)} bytes, announced as {request.bytes} bytes"
            )
        if request.reduction:
            if not gives:
                raise errors.ProtocolError("every rank contributes to a reduction")
            check_reduction(request.reduction, torch_dtype(request.dtype))
        terms = Terms(
            text("the collective", request.what),
            tuple(request.ranks) or tuple(range(request.size)),
            request.reduction,
            text("the type", request.dtype, 40),
            request.bytes,
            "slice" if request.HasField("timeline") else "rank",
        )
        try:
            if request.opens:
                self._perform(self._rounds.open(name.group, request.size, now))
            effects = self._rounds.come(name, terms, request.rank, gives, now, request.done)
        except UnknownGroupError:
            raise errors.JobFailedError(_LOST) from None
        except StepOverError as error:
            raise errors.GoneError(str(error)) from None
        except RoundsError as error:
            raise errors.ProtocolError(str(error)) from None
        if name not in self._open:
            self._open[name] = _Open(asyncio.get_running_loop().create_future())
        if gives and not self._open[name].result.done():
            self._open[name].given.setdefault(request.rank, request.data)
        if why := self._rounds.refusal(name):
            self._perform(effects)
            raise errors.UserError(why)
        self._perform(effects, terms)
        return name

    def _group(self, request: shard_pb2.CollectRequest, now: float) -> str:
        """The name of the group: that of the ranks, or that of the slices of a timeline."""
        if not request.HasField("timeline"):
            return text("the group", request.group, 100)
        try:
            name, effects = self._rounds.follow(
                counting("timeline", request.timeline), counting("size", request.size, MAX_RANKS), now
            )
        except RoundsError as error:
            raise errors.StaleViewError(str(error)) from None
        self._perform(effects)
        return name

    def _perform(self, effects: list[Effect], terms: Terms | None = None) -> None:
        for effect in effects:
            match effect:
                case Complete(name, givers):
                    assert terms is not None, "a round is complete when a rank comes"
                    task = asyncio.create_task(self._complete(self._open[name], givers, terms))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case Refused(name, why):
                    self._fail(self._open[name], errors.UserError(why))
                case Forget(names):
                    for name in names:
                        self._fail(self._open.pop(name), errors.GoneError("the process group has ended"))

    async def _complete(self, found: _Open, givers: tuple[int, ...], terms: Terms) -> None:
        parts = {rank: tensor_from(found.given[rank], terms.dtype if terms.reduction else "uint8") for rank in givers}
        found.given = {}
        try:
            if terms.reduction:
                values = list(parts.values())
                parts = {0: await self._process.arithmetic(lambda: reduce(terms.reduction, values))}
            if not found.result.done():
                found.result.set_result(parts)
        except Exception as error:  # the ranks that wait for the result get the error
            self._fail(found, error)

    def _fail(self, found: _Open, error: Exception) -> None:
        if not found.result.done():
            found.result.set_exception(error)
            found.result.exception()  # nobody may be waiting

    def _end(self) -> None:
        for found in self._open.values():
            self._fail(found, errors.JobFailedError(self._process.failure))
