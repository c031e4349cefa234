"""The table of docs/parity.md: a few of its rows, what it has rows for, and that it fails where something differs."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import pytest
import torch
from torch.optim import lr_scheduler

from benchmarks.parity import page
from benchmarks.parity.refusals import REFUSED
from benchmarks.parity.rows import DDP, PLAIN, Refusal, Row, differences, sentence
from benchmarks.parity.table import ROWS, SUBJECTS
from benchmarks.parity.training import Training, sgd


def of(reference: str, *features: str) -> list[Row]:
    """The rows of these features."""
    found = [row for row in ROWS if row.reference == reference and row.feature in features]
    assert len(found) == len(features)
    return found


def test_some_rows_beside_plain_torch() -> None:
    rows = of(PLAIN, "A plain loop, data in order", "`Muon`", "`OneCycleLR`", "Two models, each with a scheduler")
    assert differences(rows) == [0.0] * 4


@pytest.mark.long
def test_some_rows_beside_two_processes_of_ddp() -> None:
    rows = of(DDP, "Uneven inputs: the last step has one slice", "Parameters that some or all slices do not use")
    assert differences(rows) == [0.0, 0.0]


def test_a_row_that_differs_fails() -> None:
    calls = iter((0.1, 0.2))  # plain torch is the first to train
    row = Row("another rate", PLAIN, Training(optimizer=lambda p: torch.optim.SGD(p, lr=next(calls))), 1e-3)
    with pytest.raises(
        RuntimeError, match=r"another rate: differs from plain torch, one process by 0\.\d+, and not by"
    ):
        differences([replace(row, workers=(1,))])


def test_a_row_whose_bits_depend_on_the_workers_fails() -> None:
    calls = iter((0.1, 0.1, 0.2))
    row = Row("workers", PLAIN, Training(optimizer=lambda p: torch.optim.SGD(p, lr=next(calls))), 10.0)
    with pytest.raises(RuntimeError, match=r"workers: .* workers have different bits"):
        differences([replace(row, workers=(1, 1))])


def test_a_refusal_gives_its_sentence_and_fails_without_one() -> None:
    (lbfgs,) = (refusal for refusal in REFUSED if refusal.what == "`LBFGS`")
    assert sentence(lbfgs).startswith("LBFGS is not supported")
    with pytest.raises(RuntimeError, match="nothing: not refused"):
        sentence(Refusal("nothing", lambda ctx: None))


def test_there_are_rows_for_all_optimizers_and_schedulers_of_torch() -> None:
    named = set(re.findall(r"`(\w+)`", " ".join([row.feature for row in ROWS] + [refusal.what for refusal in REFUSED])))
    optimizers = {
        name for name, kind in vars(torch.optim).items() if inspect.isclass(kind) and name in torch.optim.__all__
    }
    assert optimizers - {"Optimizer"} - named == set()
    assert {*lr_scheduler.__all__} - {"LRScheduler"} - named == set()


def test_the_page_has_every_row_and_every_refusal() -> None:
    lines = re.findall(r"^\| (.*?) \| (.*?) \|", page.PAGE.read_text(), re.MULTILINE)
    assert [line for line in lines if line in {(row.feature, row.reference) for row in ROWS}] == [
        (row.feature, row.reference) for row in ROWS
    ]
    assert {refusal.what for refusal in REFUSED} <= {line[0] for line in lines}


def test_the_page_says_what_was_measured() -> None:
    (row,) = of(PLAIN, "`OneCycleLR`")
    text = page.text({"Learning rates": [(row, 0.0), (replace(row, within=2e-6), 1.25e-7)]}, [(REFUSED[0], "a | b")])
    assert "| `OneCycleLR` | plain torch, one process | 0 | bits |\n" in text
    assert "| `OneCycleLR` | plain torch, one process | 1.2e-07 | 2e-06 |\n" in text
    assert text.endswith("| `LBFGS` | a &#124; b |\n")


def test_features_are_named_once_for_each_reference() -> None:
    assert len({(row.feature, row.reference) for row in ROWS}) == len(ROWS)
    assert sum(map(len, SUBJECTS.values())) == len(ROWS)
    assert sgd([torch.nn.Parameter(torch.ones(1))]).defaults["fused"]
