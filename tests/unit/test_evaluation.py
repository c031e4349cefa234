"""Dealing out the batches of an evaluation, and results as bytes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from paramserver import errors
from paramserver.core.job.dealing import Evaluation
from paramserver.worker.data.values import MOST_BYTES, decode, encode


def test_each_batch_is_leased_once_and_parts_become_smaller() -> None:
    found, parts = Evaluation(100), list[list[int]]()
    while part := found.lease(len(parts) % 2 + 1, 2):
        parts.append(part)
    assert [index for part in parts for index in part] == list(range(100))
    assert len(parts[0]) == 25
    assert len(parts[-1]) == 1
    assert not found.complete


def test_batches_of_a_worker_that_is_gone_come_again_and_count_once() -> None:
    found = Evaluation(4)
    mine, others = found.lease(1, 1), found.lease(2, 1)
    assert (mine, others) == ([0, 1], [2])
    assert found.done(0, b"a")
    assert found.give_back(1)
    assert not found.give_back(1)
    assert found.holders() == [2]
    assert [found.lease(2, 1) for _ in range(3)] == [[1], [3], []]
    assert found.done(1, b"b")
    assert not found.done(1, b"late"), "the first result counts"
    assert not found.done(9, b""), "it was leased by an earlier coordinator"
    assert found.done(3, b"d")
    assert found.done(2, b"c")
    assert found.complete
    assert found.results(0, 1 << 20) == [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]
    assert found.results(1, 1) == [(1, b"b")]
    assert found.nbytes == 4 + 4 * 128, "the results, and what there is around each of them"


def test_what_was_given_back_and_comes_after_all_is_not_leased_again() -> None:
    found = Evaluation(3)
    found.lease(1, 1)
    found.give_back(1)
    assert found.done(0, b"")
    assert [found.lease(2, 9), found.lease(2, 9), found.lease(2, 9)] == [[1], [2], []]


@pytest.mark.parametrize("seed", range(20))
def test_random_workers_come_to_an_end_with_each_batch_once(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randrange(1, 80)
    found, held, counted = Evaluation(size), {worker: list[int]() for worker in range(3)}, list[int]()
    for _ in range(10_000):
        worker = chance.randrange(3)
        if chance.random() < 0.05:
            found.give_back(worker)
            held[worker] = []
        elif chance.random() < 0.02:
            found.take_from_others(worker)
        elif held[worker]:
            index = held[worker].pop(0)
            counted += [index] if found.done(index, str(index).encode()) else []
        else:
            held[worker] = found.lease(worker, 3)
        if found.complete:
            break
    assert sorted(counted) == list(range(size))
    assert [value for _, value in found.results(0, 1 << 20)] == [str(index).encode() for index in range(size)]


VALUES: list[Any] = [
    None,
    True,
    -3,
    0.1,
    float("inf"),
    "text",
    {"loss": torch.tensor(0.1), "n": [1, (2.5, "x")], "empty": {}},
    torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.zeros(0, 3),
    torch.tensor(True),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_result_comes_back_as_it_was(value: Any) -> None:
    found = decode(encode(value))
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_arrays_come_back_as_arrays() -> None:
    found = decode(encode(np.arange(3.0)))
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [0, 1, 2]
    assert decode(encode(np.float32(0.5))) == 0.5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "not object"),
        ({1: 2}, "not dict"),
        (torch.zeros(1, dtype=torch.complex64), "tensor of torch.complex64"),
        (np.array(["x"]), "cannot take an array of"),
        (torch.zeros(MOST_BYTES), f"{MOST_BYTES} is the most for a batch"),
    ],
    ids=["object", "number as key", "complex", "texts", "large"],
)
def test_refused_results(value: Any, text: str) -> None:
    with pytest.raises(errors.UserError, match=text):
        encode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff\xff\xff",
        b"\x02\x00\x00\x00{}",
        b"\x01\x00\x00\x001more",
        encode(torch.zeros(3))[:-1],
        b'\x1a\x00\x00\x00{"tensor":["float99",1000]}',
        b'\x1e\x00\x00\x00{"tensor":["float32",99999999]}',
        b'\x1b\x00\x00\x00{"tensor":["float32",-1,-1]}' + bytes(4),
    ],
)
def test_bytes_that_are_no_result_are_refused(data: bytes) -> None:
    with pytest.raises(errors.ProtocolError):
        decode(data)
