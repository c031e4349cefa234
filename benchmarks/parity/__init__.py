"""Writes docs/parity.md: features beside plain torch or DDP on the same data, and the sentence of each refusal."""

from __future__ import annotations

import sys

from benchmarks.parity import page
from benchmarks.parity.refusals import REFUSED
from benchmarks.parity.rows import differences, sentence
from benchmarks.parity.table import ROWS, SUBJECTS
from benchmarks.rows import Row


def run(repetitions: int) -> list[Row]:
    """Write the page. Raises RuntimeError if a difference is too large, or if a refusal is missing."""
    found = iter(differences(ROWS))
    by_subject = {subject: [(row, next(found)) for row in rows] for subject, rows in SUBJECTS.items()}
    page.PAGE.write_text(page.text(by_subject, [(refusal, sentence(refusal)) for refusal in REFUSED]))
    print(f"{len(ROWS)} rows and {len(REFUSED)} refusals are in {page.PAGE.name}", file=sys.stderr)
    return []
