"""The connection of the worker with the seat to another worker of its host: questions, and contributions on offer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError

from paramserver import errors
from paramserver.core.layout.host_weights import Give, Refuse
from paramserver.core.versions.reduction import is_node
from paramserver.transport.shm.channel import Line
from paramserver.transport.shm.segments import Foreign
from paramserver.v1 import shard_pb2
from paramserver.v1.local_pb2 import Envelope, HostShare
from paramserver.wire.bounds import MAX_SLICES
from paramserver.worker.host.guest import OFFER, SHARE, TAKE
from paramserver.worker.host.sums import Sums

# Only used slots take memory: three while all workers keep step, at most two more than there are workers.
SLOTS = 32
# A question is kept for so long. Then the answer says that this worker is alive.
ALIVE_S = 0.5
# The calls that a worker may have open.
_MOST_CALLS = 128

Answer = Give | Refuse | None


class _Keeper(Protocol):
    """The methods of the worker with the seat that a reader needs."""

    sums: Sums

    def ask(self, reader: int, version: int, reading: Sequence[int], answer: Callable[[Answer], None]) -> int: ...

    def give_up(self, call: int) -> bool: ...

    def offered(
        self, worker: int, inbox: memoryview, header: shard_pb2.PushHeader, answer: Callable[[bool], None]
    ) -> int: ...

    def left(self, reader: Reader) -> None: ...


class Reader(Line):
    """``number``: of the other worker. ``inbox``: the memory in which it offers contributions."""

    def __init__(self, keeper: _Keeper, number: int, inbox: Foreign) -> None:
        super().__init__()
        self.number = number
        self._keeper, self._inbox = keeper, inbox
        # By call of the other side: the number of the question, and what ends the wait for it.
        self._open: dict[int, tuple[int, asyncio.TimerHandle]] = {}
        # By call of the other side: the number of the offer; None until it is known.
        self._offers: dict[int, int | None] = {}
        self._loop = asyncio.get_running_loop()

    def heard(self, envelope: Envelope) -> None:
        """A question, an offer, or that it is given up."""
        if envelope.cancel:
            if envelope.call in self._offers:
                self._withdraw(envelope.call)
            else:
                self._end(envelope.call)
            return
        calls = self._open.keys() | self._offers.keys()
        if envelope.call in calls or len(calls) >= _MOST_CALLS:
            raise errors.ProtocolError("these calls make no sense")
        try:
            if envelope.method == TAKE:
                self._asks(envelope.call, shard_pb2.PullRequest.FromString(envelope.message))
            elif envelope.method == SHARE:
                self._shares(envelope.call, HostShare.FromString(envelope.message))
            elif envelope.method == OFFER:
                self._offered(envelope.call, shard_pb2.PushHeader.FromString(envelope.message))
            else:
                raise errors.ProtocolError("a worker of this host makes a call that is not known")
        except DecodeError as error:
            raise errors.ProtocolError("what came from a worker of this host is no message") from error

    def lost(self) -> None:
        """The other worker is gone."""
        for call in list(self._open):
            self._end(call)
        for call in list(self._offers):
            self._withdraw(call)
        self._keeper.left(self)

    # ---- weights

    def _asks(self, call: int, request: shard_pb2.PullRequest) -> None:
        if not all(slot < SLOTS for slot in request.shared.reading):
            raise errors.ProtocolError("this question for weights makes no sense")
        timer = self._loop.call_later(ALIVE_S, self._still_there, call)
        self._open[call] = 0, timer
        asked = self._keeper.ask(
            self.number, request.min_version, request.shared.reading, lambda answer: self._answer(call, answer)
        )
        if call in self._open:  # it is not answered yet
            self._open[call] = asked, timer

    def _end(self, call: int) -> bool:
        """A question is over. False: it was before."""
        asked, timer = self._open.pop(call, (0, None))
        if timer is None:
            return False
        timer.cancel()
        self._keeper.give_up(asked)
        return True

    def _still_there(self, call: int) -> None:
        if self._end(call):
            self._tell(call, shard_pb2.PullHeader())

    def _answer(self, call: int, answer: Answer) -> None:
        self._end(call)
        if isinstance(answer, Give):
            self._tell(call, shard_pb2.PullHeader(ready=True, version=answer.version, slot=answer.slot))
        elif answer is not None:
            self.post(Envelope(call=call, error=errors.UnavailableError.__name__, text=answer.reason))

    # ---- contributions

    def _shares(self, call: int, share: HostShare) -> None:
        if not (share.lo <= share.hi <= share.of <= MAX_SLICES and 0.0 <= share.patience_s < float("inf")):
            raise errors.ProtocolError("these slices of a step make no sense")
        self._keeper.sums.expect(self.number, share)
        if call:
            self.post(Envelope(call=call, message=b""))

    def _offered(self, call: int, header: shard_pb2.PushHeader) -> None:
        name = header.sync
        if name.of > MAX_SLICES or not is_node(name.lo, name.hi, name.of):
            raise errors.ProtocolError("this contribution makes no sense")
        self._offers[call] = None
        number = self._keeper.offered(
            self.number, self._inbox.view, header, lambda counted: self._answer_offer(call, counted)
        )
        if call in self._offers:
            self._offers[call] = number

    def _answer_offer(self, call: int, counted: bool) -> None:
        self._offers.pop(call, None)
        outcome = shard_pb2.OUTCOME_ACCEPTED if counted else shard_pb2.OUTCOME_UNSPECIFIED
        self.post(Envelope(call=call, message=shard_pb2.PushResponse(outcome=outcome).SerializeToString()))

    def _withdraw(self, call: int) -> None:
        number = self._offers.pop(call, None)
        if number is not None:
            self._keeper.sums.withdraw(number)

    def _tell(self, call: int, header: shard_pb2.PullHeader) -> None:
        self.post(Envelope(call=call, message=header.SerializeToString()))
