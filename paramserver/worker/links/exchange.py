"""A step's push and pull with one message there and one back, by the thread that trains, while it waits anyway.

This is for the case in which all goes well, on one host: no other thread of this process has to wake up, which is most
of the step of a small model. Whatever else happens, the push is made again in the background, and counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from paramserver.core.versions.events import AtLeast
from paramserver.failpoints import planned
from paramserver.transport.direct import ask_all
from paramserver.v1 import shard_pb2
from paramserver.worker.gradients.contribution import PushFacts, put_place
from paramserver.worker.links.shards import ShardLinks
from paramserver.worker.memory.shared import Attached
from paramserver.worker.weights.pulled import Pulled, pulled_of

# Meanwhile the thread does not hear that the membership has changed, or the job has ended: so not longer than this.
MOST_S = 0.25
# An answer may come so much later than it was asked for, on a busy machine.
_GRACE_S = 0.1


def exchange(links: ShardLinks, facts: PushFacts, version: int, wait_s: float) -> list[Pulled] | bool:
    """Push to all shards and pull ``version`` from them, which must come within ``wait_s``.

    True: all have counted the contribution, but the version has to be pulled. False: it has to be pushed.
    """
    shared, ways = links.near.shared, links.near.ways() if links.pulls.rounding is None else None
    if shared is None or ways is None or facts.slot is None or planned("worker.between_shards"):
        return False
    lines = [way.direct for way in ways]
    requests = [_request(links, server, way, facts, version, wait_s) for server, way in enumerate(ways)]
    answers = cast(
        Sequence[shard_pb2.ExchangeResponse] | None, ask_all(lines, "Shard.Exchange", requests, wait_s + _GRACE_S)
    )
    if answers is None:
        return False
    headers = [answer.pulled for answer in answers]
    if not all(header.ready and header.HasField("slot") for header in headers):
        return True
    if len({header.version for header in headers}) > 1:
        return True
    return [pulled_of(header, shared.chunks(server, header.slot, False)) for server, header in enumerate(headers)]


def _request(
    links: ShardLinks, server: int, way: Attached, facts: PushFacts, version: int, wait_s: float
) -> shard_pb2.ExchangeRequest:
    push, pull = links.pushes.push_header(server, facts, 0), links.pulls.pull_request(AtLeast(version), wait_s)
    put_place(push, way, facts)
    shared = links.near.shared
    question = shared.question(server, way.worker) if shared is not None else None
    assert question is not None, "who can be reached is attached"
    pull.shared.CopyFrom(question)
    return shard_pb2.ExchangeRequest(push=push, pull=pull)
