"""The tests of this folder as a program: ``python -m tests.faults.matrix WHAT [--range A:B] ...``.

WHAT is "matrix", "campaign", "kills" or "kills_of_copies": these tests are run by pytest, with the options of
conftest.py and of pytest. "list" shows the cases of the matrix; "document" writes docs/reliability.md from the results.
Ends with 0 if all of the cases that were run went well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.faults import document
from tests.support.faults.cases import matrix
from tests.support.faults.results import RESULTS, ROOT, Results

DOCUMENT = ROOT / "docs" / "reliability.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Do one of these things; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=__doc__, add_help=False)
    parser.add_argument("what", choices=["matrix", "campaign", "kills", "kills_of_copies", "document", "list"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    args, options = parser.parse_known_args(argv)
    if args.what == "list":
        for number, case in enumerate(matrix()):
            print(number, case.name)
        return 0
    if args.what == "document":
        outcomes = Results(args.results).all()
        if not outcomes:
            parser.error(f"there are no results in {args.results}: the page would lose those that it has")
        DOCUMENT.write_text(document.document(DOCUMENT.read_text(), outcomes))
        return 0
    test = f"{ROOT / 'tests' / 'faults' / 'test_faults.py'}::test_{args.what}"
    return int(pytest.main(["-q", "-s", test, "--results", str(args.results), *options]))


if __name__ == "__main__":
    sys.exit(main())
