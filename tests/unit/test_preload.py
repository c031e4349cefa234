"""The pure parts of preloading: requests, who shares a preloaded process, what `ps` shows, random numbers."""

from __future__ import annotations

import os
import random
from multiprocessing import process

import numpy as np
import pytest
import torch

from paramserver.preload.chance import draw_anew
from paramserver.preload.request import Request, key_of
from paramserver.preload.title import fitting
from paramserver.processes.lines import NamedLines, OnceHeard


def test_a_request_arrives_as_it_was() -> None:
    odd = os.fsdecode(b"\xff\xfe not UTF-8")
    request = Request(7, ("python", "-m", "a", "", "é", odd), {"A": "1", odd: "x\n"}, (1, 2, 9))
    assert Request.decode(request.encode()) == request


def test_processes_share_a_preloaded_process_if_only_variables_of_this_package_differ() -> None:
    here = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "PARAMSERVER_INTERNAL_INDEX": "0"}
    assert key_of(here, "PARAMSERVER_") == key_of({**here, "PARAMSERVER_INTERNAL_INDEX": "1"}, "PARAMSERVER_")
    assert key_of(here, "PARAMSERVER_") != key_of({**here, "OMP_NUM_THREADS": "2"}, "PARAMSERVER_")
    assert key_of(here, "PARAMSERVER_") != key_of({**here, "MKL_NUM_THREADS": "2"}, "PARAMSERVER_")


@pytest.mark.parametrize("size", [1, 2, 5, 6, 20])
def test_a_command_line_fills_its_place_and_ends_with_zero(size: int) -> None:
    text = fitting(["ab", "", "c"], size)
    assert len(text) == size
    assert text[-1] == 0
    assert b"ab\0\0c\0".startswith(text[:-1].rstrip(b"\0"))


def test_a_forked_process_draws_its_own_numbers() -> None:
    """Python, NumPy, torch, and the key of multiprocessing: all are drawn when the library is imported."""
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state(), process.current_process().authkey)

    def drawn() -> list[object]:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        draw_anew()
        key = bytes(process.current_process().authkey)
        return [random.random(), float(np.random.rand()), torch.rand(1).item(), key]

    try:
        for first, second in zip(drawn(), drawn(), strict=True):
            assert first != second
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        process.current_process().authkey = before[3]


def test_an_output_is_made_when_the_first_bytes_come() -> None:
    lines: list[str] = []
    made: list[NamedLines] = []

    def make() -> NamedLines:
        made.append(NamedLines("preload", lambda _, text: lines.append(text)))
        return made[-1]

    silent, loud = OnceHeard(make), OnceHeard(make)
    silent.end()
    assert not made
    loud.feed(b"a warn")
    loud.feed(b"ing\n")
    loud.end()
    assert (lines, len(made)) == (["a warning"], 1)
