"""The weights that one worker pulls for its host: one pull at a time, and no slot is written that somebody reads."""

from __future__ import annotations

import random

import pytest

from paramserver.core.layout.host_weights import (
    Begin,
    Came,
    Effect,
    Failed,
    Give,
    GivesUp,
    HostWeights,
    Leaves,
    Refuse,
    Wants,
)


def test_two_readers_get_one_pull() -> None:
    host = HostWeights(4)
    assert host.handle(Wants(0, 10, 5)) == [Begin(5, 0)]
    assert host.handle(Wants(1, 11, 5)) == []
    assert host.handle(Came(5)) == [Give(10, 5, 0), Give(11, 5, 0)]


def test_whoever_comes_late_gets_what_lies_there() -> None:
    host = HostWeights(4)
    host.handle(Wants(0, 10, 5))
    host.handle(Came(6))
    assert host.handle(Wants(1, 11, 5)) == [Give(11, 6, 0)]


def test_a_pull_that_brought_too_little_is_followed_by_another_one() -> None:
    host = HostWeights(4)
    host.handle(Wants(0, 10, 5))
    host.handle(Wants(1, 11, 6))
    assert host.handle(Came(5)) == [Give(10, 5, 0), Begin(6, 1)]
    assert host.handle(Came(6)) == [Give(11, 6, 1)]


def test_a_slot_is_used_again_when_nobody_reads_it() -> None:
    host = HostWeights(4)
    host.handle(Wants(0, 1, 1))
    host.handle(Wants(1, 2, 1))
    host.handle(Came(1))
    assert host.handle(Wants(0, 3, 2, (0,))) == [Begin(2, 1)]
    host.handle(Came(2))
    # Reader 1 has not said yet that it reads version 2: slot 0 is still its own.
    assert host.handle(Wants(0, 4, 3, (1,))) == [Begin(3, 2)]
    host.handle(Wants(1, 5, 3, (1,)))
    host.handle(Came(3))
    assert host.handle(Wants(0, 6, 4, (2,))) == [Begin(4, 0)]


def test_the_slot_of_a_reader_that_has_left_is_used_again() -> None:
    host = HostWeights(2)
    host.handle(Wants(0, 1, 1))
    host.handle(Wants(1, 2, 1))
    host.handle(Came(1))
    host.handle(Wants(0, 3, 2, (0,)))
    host.handle(Came(2))
    assert host.handle(Wants(0, 4, 3, (1,))) == [
        Refuse(4, "its readers use all the memory that it has for weights"),
    ]
    host.handle(Leaves(1))
    assert host.handle(Wants(0, 5, 3, (1,))) == [Begin(3, 0)]


def test_a_pull_that_fails_is_refused_to_all_who_wait_and_its_slot_is_free() -> None:
    host = HostWeights(4)
    host.handle(Wants(0, 1, 1))
    host.handle(Wants(1, 2, 1))
    assert host.handle(Failed("no memory")) == [Refuse(1, "no memory"), Refuse(2, "no memory")]
    assert host.used == frozenset()
    assert host.handle(Wants(0, 3, 1)) == [Begin(1, 0)]


def test_nobody_is_answered_who_has_given_up_or_left() -> None:
    host = HostWeights(4)
    host.handle(Wants(0, 1, 1))
    host.handle(Wants(1, 2, 1))
    host.handle(Wants(2, 3, 1))
    host.handle(GivesUp(1))
    host.handle(Leaves(1))
    assert host.handle(Came(1)) == [Give(3, 1, 0)]


@pytest.mark.parametrize("seed", range(50))
def test_no_slot_is_written_that_a_reader_may_read(seed: int) -> None:
    """Random readers, some of which leave. Each may read what it said, and what it was given since."""
    chance = random.Random(seed)
    host, published, calls = HostWeights(6), 1, 0
    reading: dict[int, set[int]] = {reader: set() for reader in range(4)}
    asked: dict[int, int] = {}
    pulling: Begin | None = None

    def carry_out(effects: list[Effect]) -> None:
        nonlocal pulling
        for effect in effects:
            if isinstance(effect, Begin):
                assert pulling is None
                assert not any(effect.slot in slots for slots in reading.values())
                pulling = effect
            elif isinstance(effect, Give):
                reading[asked.pop(effect.call)].add(effect.slot)
            else:
                asked.pop(effect.call)

    for _ in range(400):
        reader = chance.randrange(4)
        match chance.randrange(5):
            case 0 | 1 if reader not in asked.values():
                calls += 1
                asked[calls] = reader
                # It keeps one of its slots at most.
                reading[reader] = set(sorted(reading[reader])[-1:])
                carry_out(host.handle(Wants(reader, calls, published, tuple(reading[reader]))))
            case 2 if pulling is not None:
                begun, pulling = pulling, None
                carry_out(host.handle(Came(max(published, begun.version))))
            case 3:
                published += 1
            case 4 if chance.random() < 0.2:
                reading[reader] = set()
                asked = {call: other for call, other in asked.items() if other != reader}
                carry_out(host.handle(Leaves(reader)))
    if pulling is not None:
        carry_out(host.handle(Came(published + 1)))
    assert not asked
