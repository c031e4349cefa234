"""A fixed few cases of the crash matrix; all of it is `make test-faults`."""

from __future__ import annotations

import pytest

from tests.support.faults.cases import Case, sampled
from tests.support.faults.runs import Bench


@pytest.fixture(scope="module")
def bench() -> Bench:
    """One run without faults serves all cases."""
    return Bench()


CASES = sampled()


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whoever_is_killed_the_result_is_the_same(bench: Bench, case: Case) -> None:
    outcome = bench.run(case)
    assert (outcome.verdict, outcome.detail) == ("ok", ""), f"{outcome}\n{outcome.log}"
    assert outcome.struck == len(case.plan.faults)
