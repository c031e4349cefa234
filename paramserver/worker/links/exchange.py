"""A step's push and pull as one message to each server and one answer, sent by the thread that trains.

This is for the case in which all goes well, on one host. No other thread of this process has to wake up, which would
take most of the step of a small model. In all other cases the push is made again in the background, and counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from paramserver.core.versions.events import AtLeast
from paramserver.failpoints import planned
from paramserver.tracing import SCRIPT
from paramserver.transport.direct import ask_all
from paramserver.v1 import shard_pb2
from paramserver.worker.gradients.contribution import PushFacts
from paramserver.worker.gradients.leaving import Leaving
from paramserver.worker.links.pulls import Pull
from paramserver.worker.links.shards import ShardLinks
from paramserver.worker.memory.shared import Attached
from paramserver.worker.weights.pulled import Pulled, Slot, pulled_of

# The longest wait. Meanwhile the thread does not hear that the membership has changed, or that the job has ended.
MOST_S = 0.25
# On a busy machine an answer may come so much later than servers were asked to send it.
_GRACE_S = 0.1


def possible(links: ShardLinks) -> bool:
    """Whether the thread that trains can ask all servers, as far as is known before it has a contribution."""
    return _ways(links) is not None


def _ways(links: ShardLinks) -> list[Attached] | None:
    return links.near.ways() if links.pulls.rounding is None else None


def exchange(links: ShardLinks, leaving: Leaving, version: int, wait_s: float) -> list[Pulled] | bool:
    """Push a sealed contribution to all shards and pull ``version`` from them, which must come within ``wait_s``.

    True: all have counted the contribution, but the version has to be pulled. False: it has to be pushed.
    """
    facts = leaving.facts
    shared, ways = links.near.shared, _ways(links)
    if shared is None or ways is None or facts.slot is None or planned("worker.between_shards"):
        return False
    trace = links.trace
    times = [trace.now()] if trace.script else []
    sent = (lambda: times.append(trace.now())) if times else None
    lines = [way.direct for way in ways]
    requests = [_request(links, shard, way, facts, version, wait_s) for shard, way in enumerate(ways)]
    answers = cast(
        Sequence[shard_pb2.ExchangeResponse] | None,
        ask_all(lines, "Shard.Exchange", requests, wait_s + _GRACE_S, sent),
    )
    if len(times) == 2:
        trace.span("send", SCRIPT, times[0], version - 1, [facts.nonce], times[1])
    if answers is None:
        return False
    headers = [answer.pulled for answer in answers]
    if not all(header.ready and header.HasField("slot") for header in headers):
        return True
    if len({header.version for header in headers}) > 1:
        return True
    slots = [Slot(way.weights, header.slot) for way, header in zip(ways, headers, strict=True)]
    return [
        pulled_of(header, shared.chunks(shard, slot, False), slot=slot)
        for shard, (header, slot) in enumerate(zip(headers, slots, strict=True))
    ]


def _request(
    links: ShardLinks, shard: int, way: Attached, facts: PushFacts, version: int, wait_s: float
) -> shard_pb2.ExchangeRequest:
    push = links.pushes.push_header(shard, facts, 0, way)
    pull = links.pulls.pull_request(shard, Pull(AtLeast(version), wait_s=wait_s), way)
    return shard_pb2.ExchangeRequest(push=push, pull=pull)
