"""The crash matrix, random faults, and kills again and again, with real processes: `make test-faults`.

Each outcome goes into a file of results, from which `python -m tests.faults.matrix document` writes
docs/reliability.md. A case that has gone well stays in the file and is not run again.
"""

from __future__ import annotations

import pytest

from tests.support.faults import document
from tests.support.faults.cases import Case
from tests.support.faults.results import Results
from tests.support.faults.runs import Bench

pytestmark = pytest.mark.faults


def judge(case: Case, bench: Bench, results: Results) -> None:
    """The planned faults struck, and the result is that of a run without faults."""
    outcome = bench.run(case)
    results.add(outcome)
    print(document.line(outcome), flush=True)
    assert (outcome.verdict, outcome.detail) == ("ok", ""), f"{outcome}\n{outcome.log}"


def test_matrix(case: Case, bench: Bench, results: Results) -> None:
    """One process is killed, answers with an error, or loses messages, at one place and one moment."""
    judge(case, bench, results)


def test_campaign(case: Case, bench: Bench, results: Results) -> None:
    """Several random faults strike one run."""
    judge(case, bench, results)


def test_kills(case: Case, bench: Bench, results: Results) -> None:
    """Processes of one role are killed again and again. The times until training goes on are in the document."""
    judge(case, bench, results)


def test_kills_of_copies(case: Case, bench: Bench, results: Results) -> None:
    """Servers are killed again and again. Their shards have backups, so the job never goes back."""
    judge(case, bench, results)
