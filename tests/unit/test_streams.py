"""Batches of a stream by their number: read in order, kept for a while, and read again from where that is cheapest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from paramserver import errors
from paramserver.worker.data.seeding import states
from paramserver.worker.data.streams import Stream

SAMPLES = 1000


class Lines(IterableDataset[Any]):
    """Numbers, and a number by chance beside each."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples, self.epoch, self.read = samples, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.samples):
            self.read += 1
            yield torch.tensor([self.epoch, number]), random.random()


class Sought(Lines):
    """Goes on where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.samples:
            self.at += 1
            self.read += 1
            yield torch.tensor([self.epoch, self.at - 1]), random.random()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def stream(data: Lines, kept: int = 4, own: bool = False, rank: int = 0, **options: Any) -> Stream:
    options = {"batch_size": 3, **options}
    return Stream(DataLoader(data, **options), 7, lambda epoch, digest: digest, kept, own, rank)


def numbers(found: Any) -> list[int]:
    return [] if found is None else found[1][0][:, 1].tolist()


def test_batches_are_those_of_torchs_loader() -> None:
    one = stream(Lines(20))
    loader: Any = DataLoader(Lines(20), 3)
    wanted = [x[:, 1].tolist() for x, _ in loader]
    found = [numbers(one.batch(0, at)) for at in range(len(wanted))]
    assert found == wanted
    assert one.batch(0, len(wanted)) is None
    one.close()
    assert numbers(one.batch(0, 1)) == wanted[1], "is at hand, or read again"
    assert [one.batch(0, at) is None for at in (len(wanted) + 3, 2)] == [True, False]


@pytest.mark.parametrize("kind", [Lines, Sought])
def test_a_batch_is_the_same_in_whatever_order_they_are_asked_for(kind: type[Lines]) -> None:
    one = stream(kind())
    first = {(epoch, at): one.batch(epoch, at) for epoch in (0, 1) for at in (0, 5, 6, 200, 333)}
    assert first[0, 333][0] == 1, "the last batch is short"  # type: ignore[index]
    before = states()
    for _ in range(2):
        other = stream(kind())
        for epoch, at in [(1, 200), (1, 6), (0, 333), (0, 5), (0, 0), (1, 333), (1, 0), (1, 5), (0, 6), (0, 200)]:
            assert repr(other.batch(epoch, at)) == repr(first[epoch, at])
    assert states() == before, "the generators of the process are as they were"
    assert repr(first[0, 0]) != repr(first[1, 0])


def test_what_was_read_lately_is_not_read_again_and_a_state_saves_the_way() -> None:
    plain, sought = Lines(), Sought()
    one, other = stream(plain), stream(sought)
    for each in (one, other):
        each.batch(0, 300)
        each.batch(0, 297)
    assert (plain.read, sought.read) == (903, 903), "three batches back are at hand"
    one.batch(0, 280), other.batch(0, 280)
    assert plain.read == 903 + 843, "from the beginning"
    assert sought.read == 903 + 3 * (281 - 256), "from the state after batch 255"


def test_own_streams_give_the_next_batch_whatever_the_number() -> None:
    one, other = stream(Lines(7), own=True), stream(Lines(7), own=True, rank=1)
    assert [numbers(one.batch(0, at)) for at in (4, 9, 2, 0)] == [[0, 1, 2], [3, 4, 5], [6], []]
    assert one.batch(0, 1) is None
    assert numbers(one.batch(1, 3)) == [0, 1, 2], "another epoch"
    assert other.batch(0, 0)[1][1].tolist() != stream(Lines(7), own=True).batch(0, 0)[1][1].tolist()  # type: ignore[index]


def test_without_a_batch_size_a_sample_is_a_batch_and_counts_once() -> None:
    one = stream(Lines(5), batch_size=None)
    count, (x, _) = one.batch(0, 3)  # type: ignore[misc]
    assert (count, x.tolist()) == (1, [0, 3])
    assert one.batch(0, 5) is None


def test_a_stream_that_others_read_otherwise_is_refused() -> None:
    told: list[float] = []

    def agree(epoch: int, digest: float) -> float:
        told.append(digest)
        return told[0]

    def begin(data: Lines) -> object:
        return Stream(DataLoader(data, 3), 7, agree).batch(0, 2)

    begin(Lines(20)), begin(Lines(20))
    assert told[0] == told[1]

    class Shuffled(Lines):
        def __iter__(self) -> Iterator[Any]:
            yield from ((torch.tensor([self.epoch, number]), 0.0) for number in range(9, 0, -1))

    with pytest.raises(errors.DataError, match="Shuffled gives another first batch in epoch 1 here"):
        begin(Shuffled())
