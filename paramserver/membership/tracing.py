"""A member's part in a trace: it records when the coordinator says so, and hands in what it has recorded.

Each part goes with questions for the coordinator's clock, so that the parts of all members can be brought together.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import structlog

from paramserver import errors
from paramserver.core.trace.spans import Span
from paramserver.tracing import Recorder
from paramserver.transport.base import Channel
from paramserver.v1 import coordinator_pb2

log = structlog.get_logger("paramserver.session")

_EVERY_S = 0.25
_CALL_S = 5.0
# Spans of one part, which stays far below the most bytes of a message.
_MOST_SPANS = 5000
# Questions for the clock before the first part, and with each part.
_FIRST_QUESTIONS, _QUESTIONS = 8, 2
# How long the script may take to add what it has to add after the end of a trace.
_SCRIPT_S = 10.0
# How long a member that leaves tries to hand in the rest.
_LEAVE_S = 2.0


class Tracer:
    """Lives in the event loop of a session. ``member`` tells the member number. ``script``: see `Recorder.begin`."""

    def __init__(self, recorder: Recorder, channel: Channel, member: Callable[[], int], script: bool) -> None:
        self._recorder, self._channel, self._member, self._script = recorder, channel, member, script
        self._number = 0
        self._task: asyncio.Task[None] | None = None
        self._leaving = False

    def hear(self, order: coordinator_pb2.TraceOrder) -> None:
        """The newest order of the coordinator. A coordinator that knows of no trace ends the one that is under way."""
        if order.number == self._number or not order.number:
            if order.over or not order.number:
                self._recorder.end()
            return
        self._number = order.number
        if order.over or self._leaving:
            return
        if self._task is not None:
            self._task.cancel()
        self._recorder.begin(order.steps, order.profiler, self._script)
        self._task = asyncio.create_task(self._hand_in(order.number))

    async def close(self) -> None:
        """This member leaves: hand in the rest."""
        self._leaving = True
        self._recorder.end()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_LEAVE_S)
            self._task.cancel()

    async def _hand_in(self, number: int) -> None:
        recorder, ended_at = self._recorder, 0.0
        questions = [question for _ in range(_FIRST_QUESTIONS) if (question := await self._ask(number)) is not None]
        part: coordinator_pb2.TracePart | None = None
        while True:
            ended = not recorder.on
            if ended and not ended_at:
                ended_at = time.monotonic()
            if recorder.script and ended:
                ended = self._leaving or time.monotonic() - ended_at > _SCRIPT_S
            if part is None:
                questions += [q for _ in range(_QUESTIONS) if (q := await self._ask(number)) is not None]
                part, questions = self._part(number, questions, ended), []
            try:
                await self._send(part)
            except errors.RetryableError as error:
                log.debug("a part of a trace is handed in again", reason=str(error))
            except errors.ParamServerError as error:
                log.info("this process records no more of the trace", reason=str(error))
                recorder.end()
                return
            else:
                if part.last:
                    return
                part = None
            if recorder.empty or part is not None:
                await asyncio.sleep(_EVERY_S)

    async def _ask(self, number: int) -> coordinator_pb2.ClockSample | None:
        """One question for the coordinator's clock; None if no answer comes."""
        asked_ns = self._recorder.now()
        try:
            clock_ns = await self._send(coordinator_pb2.TracePart(member=self._member(), number=number))
        except errors.ParamServerError:
            return None
        return coordinator_pb2.ClockSample(asked_ns=asked_ns, answered_ns=self._recorder.now(), coordinator_ns=clock_ns)

    async def _send(self, part: coordinator_pb2.TracePart) -> int:
        reply = await self._channel.call("Coordinator.HandIn", part, timeout=_CALL_S)
        return cast(coordinator_pb2.HandInResponse, reply).clock_ns

    def _part(
        self, number: int, questions: list[coordinator_pb2.ClockSample], ended: bool
    ) -> coordinator_pb2.TracePart:
        recorder = self._recorder
        part = part_of(recorder, _MOST_SPANS)
        part.member, part.number, part.steps = self._member(), number, recorder.begun
        part.last = ended and recorder.empty
        part.clocks.extend(questions)
        return part


def part_of(recorder: Recorder, most: int) -> coordinator_pb2.TracePart:
    """The spans that this process has recorded, ``most`` at most, and facts about the process."""
    spans, dropped = recorder.take(most)
    return coordinator_pb2.TracePart(
        spans=map(span_to_proto, spans),
        dropped=dropped,
        pid=os.getpid(),
        host=socket.gethostname(),
        clock=_clock(),
    )


def span_to_proto(span: Span) -> coordinator_pb2.TraceSpan:
    """A span as it travels."""
    return coordinator_pb2.TraceSpan(
        name=span.name,
        track=span.track,
        begin_ns=span.begin_ns,
        duration_ns=span.end_ns - span.begin_ns,
        step=span.step,
        flows=span.flows,
        notes=span.notes,
    )


def span_from_proto(span: coordinator_pb2.TraceSpan) -> Span:
    """A span that has travelled."""
    return Span(
        span.name,
        span.track,
        span.begin_ns,
        span.begin_ns + span.duration_ns,
        span.step if span.HasField("step") else None,
        tuple(span.flows),
        dict(span.notes),
    )


@cache
def _clock() -> str:
    """The clock of this process: that of this start of the machine's kernel, in this time namespace. Empty: unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:
        return ""
