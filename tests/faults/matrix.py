"""Crash matrix, campaign and recovery times, in pieces: ``python -m tests.faults.matrix WHAT [--range A:B] ...``.

WHAT is "matrix", "campaign", "kills", "list" or "document". Results go into a JSON file, one entry per case; those of
an earlier piece stay. "document" writes docs/reliability.md from it. A piece ends with 0 if all of its cases went well.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.faults import document, runs
from tests.support.faults.cases import Case, campaign, kills, matrix

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "faults" / "results.json"
DOCUMENT = ROOT / "docs" / "reliability.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a piece; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=__doc__)
    parser.add_argument("what", choices=["matrix", "campaign", "kills", "document", "list"])
    parser.add_argument("--range", default=":", help="cases A to B (exclusive), as 0:40; all by default")
    parser.add_argument("--only", default="", help="only cases whose name this regular expression finds")
    parser.add_argument("--again", action="store_true", help="also cases that have a good result already")
    parser.add_argument("--seed", type=int, default=1, help="of a campaign")
    parser.add_argument("--faults", type=int, default=200, help="of a campaign, in all")
    parser.add_argument("--each", type=int, default=4, help="of a campaign, in one run")
    parser.add_argument("--kinds", default="worker,server,coordinator,store,network", help="of a campaign")
    parser.add_argument("--kills", type=int, default=50, help="of each role")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many seconds")
    parser.add_argument("--no-checkpoints", action="store_true", help="run without checkpoints")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    outcomes = runs.load(args.results)
    if args.what == "document":
        if not outcomes:
            parser.error(f"there are no results in {args.results}: the page would lose those that it has")
        DOCUMENT.write_text(document.document(DOCUMENT.read_text(), outcomes))
        return 0
    cases = _cases(args)
    if args.what == "list":
        for number, case in enumerate(cases):
            print(number, case.name)
        return 0
    return _run(cases, args, outcomes)


def _cases(args: argparse.Namespace) -> list[Case]:
    if args.what == "campaign":
        cases = campaign(args.seed, -(-args.faults // args.each), args.each, tuple(args.kinds.split(",")))
    elif args.what == "kills":
        cases = [case for role in ("worker", "server") for case in kills(role, -(-args.kills // 10), 10)]
    else:
        cases = matrix()
    first, _, last = args.range.partition(":")
    cases = cases[int(first or 0) : int(last) if last else None]
    return [case for case in cases if re.search(args.only, case.name)]


def _run(cases: Sequence[Case], args: argparse.Namespace, outcomes: dict[str, runs.Outcome]) -> int:
    bench = runs.Bench(args.results.parent / "logs", checkpoints=not args.no_checkpoints)
    begun, bad, left = time.monotonic(), 0, 0
    for case in cases:
        known = outcomes.get(case.name)
        if known is not None and known.verdict == "ok" and not args.again:
            continue
        if time.monotonic() - begun > args.seconds:
            left += 1
            continue
        outcome = bench.run(case)
        outcomes[case.name] = outcome
        runs.save(args.results, outcomes)
        bad += outcome.verdict != "ok"
        print(document.line(outcome), flush=True)
    print(f"{len(cases) - bad - left} of {len(cases)} went well" + (f", {left} have not been run" if left else ""))
    return 1 if bad or left else 0


if __name__ == "__main__":
    sys.exit(main())
