"""Calls of ranks: they bring contributions to rounds and wait for results."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
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
# A rank brings its contribution in pieces that are no larger.
MAX_BYTES = 4 << 20
# A round for which nobody waits is forgotten after so long, and earlier if there is no room. A rank whose call broke
# off calls again at once, but a slice that has put its sum off computes another slice first.
_LEFT_S, _SLICES_LEFT_S, _LEFT_WITHOUT_ROOM_S = 60.0, 3600.0, 15.0
_SWEEP_S = 5.0
# Of a round, beside what was brought to it.
_ROUND_BYTES = 2048
_LOST = (
    "a server was started again, and the results of this process group are lost with the server before it: start all "
    "ranks again"
)


def _budget() -> int:
    """Bytes for all rounds of this process: a quarter of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


@dataclass(slots=True)
class _Open:
    """The bytes of an open round. ``given``: contributions by rank. ``result``: parts by rank, or one part.

    ``waiting``: so many calls wait for the result, and the last one that did has ended at ``left_at``.
    """

    result: asyncio.Future[Mapping[int, torch.Tensor]]
    slices: bool
    left_at: float
    given: dict[int, bytes] = field(default_factory=dict)
    nbytes: int = _ROUND_BYTES
    waiting: int = 0


class Collecting:
    """All process groups at one server."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._rounds = Rounds(_IDLE_S)
        self._open: dict[RoundName, _Open] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Bytes of all rounds, and of the calls that wait for them, which hold their contributions once more.
        self.nbytes = 0
        self.most_bytes = _budget()
        self._sweeping: asyncio.TimerHandle | None = None
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
        held, found.waiting = len(request.data), found.waiting + 1
        self.nbytes += held
        try:
            async for frame in self._answer(request, name, found):
                yield frame
        finally:
            self.nbytes -= held
            found.waiting, found.left_at = found.waiting - 1, time.monotonic()
            if self._sweeping is None:
                self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    async def _answer(
        self, request: shard_pb2.CollectRequest, name: RoundName, found: _Open
    ) -> AsyncIterator[AnyFrame]:
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
        if max(len(request.data), request.bytes) > MAX_BYTES:
            raise errors.ProtocolError(f"a contribution has at most {MAX_BYTES} bytes, not {request.bytes}")
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
            _ranks(request),
            request.reduction,
            text("the type", request.dtype, 40),
            request.bytes,
            "slice" if request.HasField("timeline") else "rank",
        )
        self._make_room(name, len(request.data))
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
        found = self._open.get(name)
        if found is None:
            found = self._open[name] = _Open(asyncio.get_running_loop().create_future(), terms.kind == "slice", now)
            self.nbytes += found.nbytes
        if gives and not found.result.done() and request.rank not in found.given:
            found.given[request.rank] = request.data
            self._resize(found, found.nbytes + len(request.data))
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
                        gone = self._open.pop(name)
                        self._resize(gone, 0)
                        self._fail(gone, errors.GoneError("the process group has ended"))

    async def _complete(self, found: _Open, givers: tuple[int, ...], terms: Terms) -> None:
        parts = {rank: tensor_from(found.given[rank], terms.dtype if terms.reduction else "uint8") for rank in givers}
        found.given = {}
        try:
            if terms.reduction:
                values = list(parts.values())
                parts = {0: await self._process.arithmetic(lambda: reduce(terms.reduction, values))}
            if not found.result.done():
                self._resize(found, found.nbytes if not terms.reduction else _ROUND_BYTES + parts[0].nbytes)
                found.result.set_result(parts)
        except Exception as error:  # the ranks that wait for the result get the error
            self._fail(found, error)

    def _fail(self, found: _Open, error: Exception) -> None:
        if not found.result.done():
            found.result.set_exception(error)
            found.result.exception()  # nobody may be waiting

    # ---- memory

    def _resize(self, found: _Open, nbytes: int) -> None:
        self.nbytes += nbytes - found.nbytes
        found.nbytes = nbytes

    def _make_room(self, name: RoundName, nbytes: int) -> None:
        """Make room for a contribution. Raises OverloadedError if there is none: the rank calls again.

        The oldest round that is not complete may take as much again, so that the others get on after it.
        """
        wanted = self.nbytes + 2 * nbytes + (0 if name in self._open else _ROUND_BYTES)
        if wanted <= self.most_bytes:
            return
        wanted -= self._forget_left(_LEFT_WITHOUT_ROOM_S)
        oldest = next((one for one, found in self._open.items() if not found.result.done()), name)
        if wanted > (2 * self.most_bytes if name == oldest else self.most_bytes):
            raise errors.OverloadedError(
                f"the collectives under way at this server have {self.nbytes} bytes, and {self.most_bytes} are the "
                "most: wait until some are complete, use more servers, or give the server more memory"
            )

    def _sweep(self) -> None:
        """Forget the rounds for which nobody waits, and look again as long as there are such rounds."""
        self._sweeping = None
        self._forget_left(_LEFT_S)
        if any(not found.waiting for found in self._open.values()):
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def _forget_left(self, left_s: float) -> int:
        """Forget the rounds for which nobody has waited for so long; returns how many bytes that gives back."""
        before, now = self.nbytes, time.monotonic()
        left = [
            name
            for name, found in self._open.items()
            if not found.waiting and now - found.left_at > (_SLICES_LEFT_S if found.slices else left_s)
        ]
        self._perform(self._rounds.drop(left))
        return before - self.nbytes

    def _end(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for found in self._open.values():
            self._fail(found, errors.JobFailedError(self._process.failure))


def _ranks(request: shard_pb2.CollectRequest) -> Sequence[int]:
    """The ranks of a round: all of the group cost no memory, however many the message says there are."""
    everybody = range(request.size)
    same = not request.ranks or (
        len(request.ranks) == len(everybody) and all(a == b for a, b in zip(request.ranks, everybody, strict=True))
    )
    return everybody if same else tuple(request.ranks)
