"""What the tester calls wrong, and what it lets pass: without running anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paramserver import errors
from tests.support.behaviour.generate import of_labels
from tests.support.behaviour.judge import differs, judge
from tests.support.behaviour.played import Played

WEIGHTS = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
FOUND = {"seen": [1.0, 0.5], "model": WEIGHTS}
REFUSED, EITHER = "data=IterableDataset", "body=no step on some batches"


def ended(error: BaseException | None = None, code: int = 0, **more: Any) -> Played:
    return Played(error, code=code, **{"weights": WEIGHTS, "found": {0: FOUND}, **more})


def judged(label: str, played: Played, wanted: Played | None = None) -> str:
    return judge(of_labels([label]), wanted or ended(), played)


def test_equal() -> None:
    assert not judged("loop=range", ended())


@pytest.mark.parametrize(
    ("label", "played"),
    [
        ("loop=range", ended(weights={"w": torch.tensor([1.0, 2.0 + 1e-6], dtype=torch.float64)})),
        ("loop=range", ended(weights={})),
        ("loop=range", ended(weights=None)),
        ("loop=range", ended(found={})),
        ("loop=range", ended(found={0: {**FOUND, "seen": [1.0]}})),
        ("loop=range", ended(found={0: {**FOUND, "seen": [1.0, 0.6]}})),
        ("loop=range", ended(errors.DataError("the data set is odd"), 2)),
        ("loop=range", ended(errors.JobFailedError("3 samples have not counted"), 1)),
        ("loop=range", ended(code=3)),
        ("loop=range", ended(stuck=True)),
        (REFUSED, ended()),
        (REFUSED, ended(errors.DataError("the data set is odd"), 2)),
        (REFUSED, ended(errors.DataError("an IterableDataset has no numbers"), 0)),
        (REFUSED, ended(TypeError("IterableDataset"), 1)),
        (EITHER, ended(weights={"w": torch.zeros(2, dtype=torch.float64)})),
        (EITHER, ended(ZeroDivisionError("division by zero"), 1)),
        (EITHER, ended(errors.JobFailedError("samples have not counted"), 0)),
        (EITHER, ended(errors.JobFailedError("samples have not counted"), 1)),
    ],
)
def test_wrong(label: str, played: Played) -> None:
    assert judged(label, played)


@pytest.mark.parametrize(
    ("label", "played"),
    [
        (REFUSED, ended(errors.DataError("an IterableDataset has no numbers"), 2)),
        (EITHER, ended()),
        (EITHER, ended(errors.DataError("any sentence"), 2)),
    ],
)
def test_right(label: str, played: Played) -> None:
    assert not judged(label, played)


def test_an_exit_code_or_an_exception_that_gets_lost() -> None:
    assert judged("end=sys.exit(3) at the end", ended(), ended(code=3))
    assert not judged("end=sys.exit(3) at the end", ended(code=3), ended(code=3))
    raised = ended(RuntimeError("the cat"), 1)
    assert judged("end=an exception in the middle", ended(), raised)
    assert judged("end=an exception in the middle", ended(errors.UserError("no"), 2), raised)
    assert not judged("end=an exception in the middle", ended(RuntimeError("the cat"), 1), raised)


def test_a_script_that_plain_torch_does_not_take_is_wrong_itself() -> None:
    assert "the script is wrong" in judged("loop=range", ended(), ended(TypeError("odd"), 1))


@pytest.mark.parametrize(
    ("wanted", "got"),
    [
        (np.zeros(()), np.zeros(1)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), torch.zeros(2)),
        (torch.zeros(2), [0.0, 0.0]),
        ([1, 2], [1, 2, 3]),
        ({"a": 1}, {}),
        (1.0, 1.1),
        ("a", "b"),
        (1, None),
    ],
)
def test_differs(wanted: Any, got: Any) -> None:
    assert differs(wanted, got, 1e-7, "it")
    assert not differs(wanted, wanted, 1e-7, "it")
