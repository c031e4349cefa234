"""Weights on their way from a simulated shard to workers: whole versions, and pieces of drafts ahead of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramserver.core.layout.thresholds import REST_BYTES
from paramserver.simulate.machinery.blame import Chain
from paramserver.simulate.parts.pieces import Piece
from paramserver.simulate.parts.rest import Rest
from paramserver.simulate.servers.calls import Call, Delivery

# Answers a pull: the chain, and the pieces that come later.
Answering = Callable[[Chain, Rest | None], None]


class Outgoing:
    """``pieces``: the pieces of the shard."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def give(self, call: Call, draft: int, answer: Answering, chain: Chain) -> None:
        """Answer with a version, which was this draft (0: none). Pieces that were sent before are not sent again."""
        if call.transfer is None:
            answer(chain, None)
            return
        delivery = call.delivery
        if delivery is None or delivery.draft != draft:
            delivery = call.delivery = Delivery(draft)
        delivery.answer = lambda chain: answer(chain, None)
        for piece in range(len(self._pieces)):
            if piece not in delivery.sent:
                self._send(call, delivery, piece, chain)
        if not delivery.coming:
            answer(chain, None)
        elif call.begins and sum(self._pieces[piece].nbytes for piece in delivery.coming) >= REST_BYTES:
            delivery.rest = Rest({piece: 1.0 - self._pieces[piece].ready for piece in delivery.coming})
            answer(chain, delivery.rest)

    def ahead(self, call: Call, draft: int, piece: int, chain: Chain) -> None:
        """A piece of a draft is made: it leaves if the worker has asked for drafts."""
        if call.transfer is None or not (call.ahead and call.asked):
            return
        if call.delivery is None or call.delivery.draft != draft:
            call.delivery = Delivery(draft)
        self._send(call, call.delivery, piece, chain)

    def _send(self, call: Call, delivery: Delivery, piece: int, chain: Chain) -> None:
        assert call.transfer is not None

        def came(chain: Chain) -> None:
            delivery.coming.discard(piece)
            if delivery.rest is not None:
                delivery.rest.came(piece, chain)
            elif not delivery.coming and delivery.answer is not None:
                delivery.answer(chain)

        delivery.sent.add(piece)
        delivery.coming.add(piece)
        call.transfer.send(self._pieces[piece], chain, came)
