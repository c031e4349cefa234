"""What a worker is told of its contributions on their way."""

from __future__ import annotations

import asyncio

from paramserver.server.versions.acks import Acks
from paramserver.v1 import shard_pb2


def told(news: list[shard_pb2.Ack]) -> dict[int, int]:
    return {one.nonce: one.chunks for one in news}


def test_who_listens_is_told_of_its_own_once() -> None:
    acks, mine, others = Acks(), asyncio.Event(), asyncio.Event()
    with acks.heard(1, mine) as news, acks.heard(2, others) as silence:
        assert news() == []
        with acks.counting(1, 77) as came:
            came()
            came()
            assert mine.is_set()
            assert not others.is_set()
            assert told(news()) == {77: 2}
            assert news() == silence() == []
            with acks.counting(1, 78) as another:
                came()
                another()
                assert told(news()) == {77: 3, 78: 1}
        assert news() == [], "it has been answered"
        with acks.counting(1, 77) as again:
            again()
            assert told(news()) == {77: 1}, "an attempt begins anew"


def test_who_comes_late_hears_what_is_there() -> None:
    acks, listener = Acks(), asyncio.Event()
    with acks.counting(1, 5) as came:
        came()
        with acks.heard(1, listener) as news:
            assert told(news()) == {5: 1}
        came()
        assert not listener.is_set()


def test_nothing_is_left() -> None:
    acks = Acks()
    with acks.heard(3, asyncio.Event()), acks.counting(3, 9) as came:
        came()
    assert not any(vars(acks).values())


def test_what_the_network_repeats_counts_once() -> None:
    acks = Acks()
    with acks.heard(1, asyncio.Event()) as news, acks.counting(1, 7) as came:
        came()
        with acks.counting(1, 7) as again:
            again()
            assert told(news()) == {7: 1}
            again()
            assert told(news()) == {7: 2}
        came()
        came()
        assert told(news()) == {7: 3}
